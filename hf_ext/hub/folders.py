"""Folders that hold a model: written whole or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from hf_ext.configuration import ExtConfig


def check_model(model: object, caller: str) -> None:
    """Raise ValueError unless `model` is a whole model of this package."""
    if not isinstance(getattr(model, "config", None), ExtConfig) or not isinstance(model, PreTrainedModel):
        hint = " Merge the adapter first: model.merge_and_unload()." if hasattr(model, "merge_and_unload") else ""
        raise ValueError(f"{caller} takes a model of this package, got {type(model).__name__}.{hint}")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError("the model carries an adapter, which a whole model's format has no place for; merge it first.")


def write_folder(folder: str | os.PathLike, fill: Callable[[Path], None], *, overwrite: bool = False) -> Path:
    """Let `fill` write a model into a folder under a temporary name beside `folder`, then move it into place.

    Args:
        folder: where the model shall be.
        fill: called with the temporary folder.
        overwrite: whether the model in an existing folder may be replaced; other files in it stay.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder exists and is not empty.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    folder = folder.resolve() if folder.is_symlink() else folder
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; give the name of a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder or pass overwrite=True.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(scratch)
        keep_other_files(folder, scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        replace_folder(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_json(path: Path, content: dict) -> None:
    """Write a configuration as the library does."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def keep_other_files(folder: Path, scratch: Path) -> None:
    """Copy what stands in `folder` besides a model: a model card, a history. Old weights stay behind."""
    for item in folder.iterdir() if folder.is_dir() else ():
        is_weights = item.suffix in (".safetensors", ".bin") or item.name.endswith(".index.json")
        if is_weights or (scratch / item.name).exists():
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.copytree(item, scratch / item.name, symlinks=True)
        else:
            shutil.copy2(item, scratch / item.name, follow_symlinks=False)


def replace_folder(scratch: Path, folder: Path) -> None:
    """Move `scratch` to `folder`; what was there goes only once the new content is in place."""
    if not folder.exists():
        os.replace(scratch, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        os.replace(folder, old)
        try:
            os.replace(scratch, folder)
        except BaseException:
            os.replace(old, folder)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
