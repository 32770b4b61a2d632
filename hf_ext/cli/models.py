"""`hf-ext models`, and how every command finds and loads a model and writes its results."""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

DTYPES = ("float32", "bfloat16", "float16")


def models() -> None:
    """List the architectures, the official model types they load, and their heads."""
    from rich.console import Console
    from rich.table import Table

    import hf_ext

    table = Table("architecture", "official type", "our type", "heads")
    for architecture in hf_ext.architectures().values():
        heads = architecture.class_names()
        common = os.path.commonprefix(heads)  # the same in every name: ExtBert
        shown = ", ".join(f"{name.removeprefix(common) or 'Model'}" for name in heads) if len(heads) > 1 else heads[0]
        table.add_row(
            architecture.name,
            architecture.official_model_type or "none",
            architecture.model_type,
            f"{common}: {shown}" if len(heads) > 1 else shown,
        )
    Console().print(table)


# ------------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True)
class FoundModel:
    """A model that exists.

    Attributes:
        source: what to hand to `from_pretrained`.
        config: its config.json; empty for an adapter.
        adapter: its adapter_config.json when it is a PEFT adapter, else None.
    """

    source: str
    config: dict
    adapter: dict | None = None

    @property
    def base(self) -> str:
        """The model that the adapter was trained on."""
        return (self.adapter or {}).get("base_model_name_or_path") or ""

    @property
    def class_name(self) -> str:
        """Official name of the class that it was saved from, "" where it does not say."""
        return (self.config.get("architectures") or [""])[0].removeprefix("Ext")


def find_model(model: str, *, weights: bool = True) -> FoundModel:
    """Looks a model up before anything heavy is loaded, so that what is wrong with it can be said plainly.

    Args:
        model: folder, or Hub id.
        weights: a folder must hold weights.

    Raises:
        ValueError: no such folder or Hub id, no or broken config.json, an unknown architecture, no weights.
    """
    folder = Path(model).expanduser()
    if folder.is_file():
        raise ValueError(f"{model} is a file; give the folder that it is in.")
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            return FoundModel(str(folder), {}, _read_json(folder / "adapter_config.json"))
        if not (folder / "config.json").is_file():
            raise ValueError(f"{model} has no config.json; a folder written by save_pretrained is needed.")
        config = _read_json(folder / "config.json")
        if weights and not any(any(folder.glob(p)) for p in ("*.safetensors", "*.bin", "*.index.json")):
            raise ValueError(f"{model} holds no weights (model.safetensors); save or fetch the model again.")
        source = str(folder)
    else:
        source, config = model, _from_hub(model)
        if "peft_type" in config:
            return FoundModel(model, {}, config)
    if not config.get("model_type"):
        raise ValueError(f"config.json of {model} has no model_type, so that its architecture is unknown.")
    from hf_ext.auto import architecture_of

    architecture_of(config["model_type"])  # raises, naming the known ones
    return FoundModel(source, config)


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); save or fetch the model again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object; save or fetch the model again.")
    return content


def _from_hub(model: str) -> dict:
    """config.json of a Hub repository, or its adapter_config.json where it has no other."""
    unreachable = ValueError(
        f"{model} is neither a folder nor a reachable Hub id; check the spelling"
        + (", or unset HF_HUB_OFFLINE." if _offline() else " and the connection, or give a folder.")
    )
    # What cannot be an id (owner/name) is a path; do not go and ask the Hub for it.
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model or not model.strip():
        raise ValueError(f"there is no folder {model!r}; check the path.")
    from transformers.utils import cached_file

    for name in ("config.json", "adapter_config.json"):
        try:
            path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise unreachable from error
        if path is not None:
            return _read_json(Path(path))
    if _offline():
        raise unreachable
    raise ValueError(f"the Hub repository {model} holds no config.json; it is no transformers model.")


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def refuse_adapter(found: FoundModel, command: str) -> None:
    """Raises ValueError, with the way out, for commands that need a whole model."""
    if found.adapter is not None:
        raise ValueError(
            f"{found.source} is a PEFT adapter of {found.base or 'another model'}, and {command} needs a whole model; "
            f"merge it first: hf-ext export {found.source} MERGED --merge"
        )


def torch_dtype(name: str):
    """torch dtype of an option's value, "auto" as it is."""
    import torch

    if name == "auto":
        return name
    if name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(('auto', *DTYPES))}", param_hint="'--dtype'")
    return getattr(torch, name)


@contextlib.contextmanager
def quiet(context: typer.Context | None = None) -> Iterator[None]:
    """Keeps the libraries' warnings and bars off the screen, unless --debug was given; back as it was afterwards."""
    if context is not None and (context.obj or {}).get("debug"):
        yield
        return
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    before, hub_before, bars = logging.get_verbosity(), hub_logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        hub_logging.set_verbosity(hub_before)
        if bars:
            logging.enable_progress_bar()


# ------------------------------------------------------------------------------------------------- results


def check_writable(path: Path | None) -> None:
    """Raises before the work, rather than after it, when its result could not be written."""
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; a file is needed", param_hint="'--json'")
    if not path.resolve().parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist", param_hint="'--json'")


def write_json(path: Path, content: object) -> None:
    """Writes next to the target and moves it there, so that no reader ever sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        os.chmod(name, 0o644)  # mkstemp's files are for their owner only
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f}"
