"""Official export: a folder that the stock class, and everything built for it, loads."""

import json
import os
import shutil
import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from hf_ext.configuration import ExtConfig


def official_config(config: ExtConfig) -> dict:
    """The official `config.json` of one of our configurations.

    Raises:
        ValueError: the configuration departs from what the official architecture can express; the field is named.
    """
    config.refuse_inexpressible()
    content = json.loads(config.to_json_string(use_diff=True))
    make_official(content, config)
    return content


def make_official(content: dict, config: ExtConfig) -> None:
    """Replace what is ours in the content of a `config.json`, and in the configurations inside it."""
    for field in config.runtime_fields:
        content.pop(field, None)
    content.pop("auto_map", None)
    content["model_type"] = config.official_model_type
    if content.get("architectures"):
        content["architectures"] = [name.removeprefix("Ext") for name in content["architectures"]]
    for name in config.sub_configs:
        if isinstance(content.get(name), dict):
            make_official(content[name], getattr(config, name))


def export_official(
    model: PreTrainedModel, folder: str | os.PathLike, *, tokenizer: object | None = None, overwrite: bool = False
) -> Path:
    """Write `model` as an official checkpoint: official `model_type`, class names and weights layout.

    The stock class loads the folder, and so do programs that know official checkpoints only (vLLM, ONNX exporters).

    Args:
        model: a model of this package; adapters must be merged first.
        folder: where to write. It is written under a temporary name beside it and moved into place.
        tokenizer: saved along, when given.
        overwrite: whether the model in an existing folder may be replaced; other files in it stay.

    Returns:
        The folder.

    Raises:
        ValueError: not a model of this package, or a configuration that the official architecture cannot express.
        FileExistsError: the folder exists and is not empty.
        OSError: the folder cannot be written.
    """
    if not isinstance(getattr(model, "config", None), ExtConfig) or not isinstance(model, PreTrainedModel):
        hint = " Merge the adapter first: model.merge_and_unload()." if hasattr(model, "merge_and_unload") else ""
        raise ValueError(f"export_official takes a model of this package, got {type(model).__name__}.{hint}")
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise ValueError("the model carries an adapter, which the official format has no place for; merge it first.")
    model.config.refuse_inexpressible()
    folder = Path(folder)
    folder = folder.resolve() if folder.is_symlink() else folder
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; give the name of a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise FileExistsError(f"{folder} exists and is not empty; choose another folder or pass overwrite=True.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(scratch)
        content = official_config(model.config)  # saving has just written the class name and dtype into it
        (scratch / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        keep_other_files(folder, scratch)
        scratch.chmod(0o755)  # mkdtemp makes it private
        replace_folder(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


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
