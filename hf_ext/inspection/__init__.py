"""Looking at a model from outside: size, compute, memory, speed, and equality with the stock class.

- `parameters`: number of parameters, FLOPs of a forward pass, bytes of the key/value cache.
- `memory`: peak memory of a block of code, measured by the operating system or the CUDA allocator.
- `parity`: one checkpoint through our class and through the stock class, everything compared.
- `attention`: where each head looks, in a text or an image, and pictures of it.
- `benchmark`: our class and the stock class side by side, seconds and peak bytes.
"""

from importlib import import_module

# Public name -> the module that holds it; imported on first use so that `hf-ext --help` does not wait for torch.
_PUBLIC = {
    "BenchmarkRow": "benchmark",
    "benchmark": "benchmark",
    "PeakMemory": "memory",
    "cache_bytes": "parameters",
    "count_parameters": "parameters",
    "forward_flops": "parameters",
    "ParityReport": "parity",
    "ParityRow": "parity",
    "compare": "parity",
    "ragged_lengths": "inputs",
    "read_image": "attention",
    "read_text": "attention",
    "rollout": "attention",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
