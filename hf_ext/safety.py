"""What is checked before a file or a configuration of somebody else's is acted upon.

A checkpoint is data: reading it must not run code, leave its folder, or take memory that the machine does not have.
"""

import contextlib
import copy
import inspect
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_ext.configuration import whole_numbers

# The product of the three largest numbers of a configuration bounds the number of parameters to within a factor of a
# few; below this, whatever the architecture, a model fits into the memory of any machine.
LARGE = 10**9


def physical_memory() -> float:
    """Bytes of the machine's memory; infinite where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def container_memory(groups: Path = Path("/proc/self/cgroup"), tree: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that the control groups of this process, and those around them, may take; infinite without a limit.

    Args:
        groups: a line "number:controllers:path" for each hierarchy; version 2 has one, without controllers.
        tree: where the hierarchies are mounted. A container may see its own group as the root of the tree, and as the
            path one that only the machine has.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (tree / "memory", "memory.limit_in_bytes") if controllers else (tree, "memory.max")
        place = root / path.lstrip("/")
        for group in (place, *place.parents):
            if group.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # no such group here; "max"
                    limits.append(int((group / name).read_text()))
    return min(limits)


def memory() -> float:
    """Bytes that this process can have."""
    return min(physical_memory(), container_memory())


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def numbers(config: PreTrainedConfig) -> Iterator[int]:
    """The whole numbers of a configuration and of those inside it, but for the ids of tokens and labels."""
    for field, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from numbers(value)
        elif not field.endswith(("_id", "_ids", "id2label", "label2id", "_tokens")):
            yield from (number for number in whole_numbers(value) if number > 0)


@contextlib.contextmanager
def sizes_that_exist() -> Iterator[None]:
    """Turns torch's words about impossible sizes into a ValueError about the configuration."""
    try:
        yield
    except (AssertionError, RuntimeError, TypeError) as error:
        known = ("Padding_idx", "Storage size calculation overflowed", "empty(): argument 'size'")
        if not any(words in str(error) for words in known):
            raise
        raise ValueError(f"no model can be built from the sizes in this configuration: {error}") from error


def refuse_more_than_memory(needed: int, what: str) -> None:
    """Raise ValueError if `needed` bytes are more than the machine, or the container, has."""
    there = memory()
    if needed > there:
        raise ValueError(
            f"{what} take {needed / 1e9:,.1f} GB, and there are {there / 1e9:,.1f} GB here. Check the sizes in the "
            "configuration; a model that is meant to be that large is built on the meta device, or loaded with "
            "device_map and offloading."
        )


def check_size(model: nn.Module, config: PreTrainedConfig) -> None:
    """Before a model allocates anything: raise ValueError if its parameters cannot fit into the machine's memory.

    What is built on the meta device, as when a checkpoint is loaded, takes no memory and may be of any real size.
    """
    largest = sorted(numbers(config))[-3:]
    if math.prod(largest) < LARGE or torch.empty(0).device.type != "cpu" or is_deepspeed_zero3_enabled():
        return  # DeepSpeed divides the parameters among processes as they are made
    try:
        inspect.signature(type(model)).bind(config)
    except TypeError:  # a user's class that needs more than a configuration
        return
    with torch.device("meta"), init.no_init_weights(), sizes_that_exist():
        twin = type(model)(copy.deepcopy(config))
    refuse_more_than_memory(tensor_bytes(twin.parameters()), f"the parameters of this {type(model).__name__}")


def check_files(source: str | os.PathLike, use_safetensors: bool | None) -> None:
    """Look at the names of a local checkpoint's files before they are opened.

    Raises:
        ValueError: an index that leads out of the folder.
        OSError: the weights are pickles only, and the caller did not ask for them (`use_safetensors=False`).
    """
    folder = Path(source)
    if not folder.is_dir():
        return
    pickles = sorted(file.name for file in folder.glob("pytorch_model*.bin*"))
    if use_safetensors is None and pickles and not any(folder.glob("*.safetensors*")):
        raise OSError(
            f"the weights of {folder} are pickles ({pickles[0]}), which are read only when asked for: pass "
            "use_safetensors=False if you trust where they come from, or make safetensors of them: "
            "hf-ext export MODEL OUT --pickle."
        )
    for index in folder.glob("*.index.json"):
        try:
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            outside = next((file for file in files if Path(file).is_absolute() or ".." in Path(file).parts), None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of weights ({error!r}); save or fetch the model again.") from error
        if outside is not None:
            raise ValueError(f"{index} names {outside!r}, which is not in its folder; such a checkpoint is not read.")
