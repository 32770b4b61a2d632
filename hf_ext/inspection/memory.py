"""Peak memory of a block of code.

How it is measured:

- CUDA: `torch.cuda.max_memory_allocated`, reset before the block.
- Linux: the kernel's high-water mark of resident memory (`VmHWM` in /proc/self/status), reset before the block by
  writing 5 to /proc/self/clear_refs. `ru_maxrss` would not do: it cannot be reset, so that loading the weights hides a
  smaller step, and a child process inherits its parent's value across exec.
- Elsewhere, and where the mark cannot be reset: resident memory sampled every millisecond by a thread. Such a peak can
  be missed when it lasts for less than a sample.

Resident memory only tells the truth when freed memory goes back to the system. `measured_environment()` gives the
settings of glibc that make it so; they must be in the environment before a process starts, which is why
`hf_ext.inspection.benchmark` measures memory in fresh subprocesses.
"""

import contextlib
import ctypes
import gc
import os
import sys
import threading
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def measured_environment() -> dict[str, str]:
    """The current environment plus the glibc settings under which freed memory is returned at once.

    One arena, and a fixed threshold of 64 KiB from which an allocation is a mapping of its own: left alone, glibc
    raises that threshold up to 32 MiB as it goes, and keeps freed blocks.
    """
    return {
        **os.environ,
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_MMAP_MAX_": "1000000",
    }


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no field {field}")


def _reset_high_water_mark() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        _CLEAR.write_text("5")
        # Where the write is accepted without effect (some sandboxes), the mark stays above the resident size.
        return _status("VmHWM") - _status("VmRSS") < 16 * 2**20
    except OSError:
        return False


def resident_bytes() -> int:
    """Resident memory of this process, bytes."""
    if _STATUS.exists():
        return _status("VmRSS")
    import psutil  # a dependency of accelerate; only needed outside Linux

    return psutil.Process().memory_info().rss


class PeakMemory:
    """Context manager: `.peak` is the most memory inside the block, `.above` that minus what was in use at its start.

    Both in bytes. `.method` says how: "cuda allocator", "high-water mark" or "sampling".
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.baseline = self.peak = 0
        self.method = ""

    @property
    def above(self) -> int:
        return max(self.peak - self.baseline, 0)

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.device.type == "cuda":
            self.method = "cuda allocator"
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.baseline = torch.cuda.memory_allocated(self.device)
            return self
        with contextlib.suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)
        if _reset_high_water_mark():
            self.method = "high-water mark"
        else:
            self.method = "sampling"
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._sample, daemon=True)
        self.baseline = self.peak = resident_bytes()
        if self.method == "sampling":
            self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *exception) -> None:
        if self.method == "cuda allocator":
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device)
        elif self.method == "high-water mark":
            self.peak = max(self.baseline, _status("VmHWM"))
        else:
            self._stop.set()
            self._thread.join()
            self.peak = max(self.peak, resident_bytes())
