"""Official export: a folder that the stock class, and everything built for it, loads."""

import json
import os
from pathlib import Path

from transformers import PreTrainedModel

from hf_ext.configuration import ExtConfig
from hf_ext.hub.folders import check_model, write_folder, write_json


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
    check_model(model, "export_official")
    model.config.refuse_inexpressible()

    def fill(scratch: Path) -> None:
        model.save_pretrained(scratch)
        content = official_config(model.config)  # saving has just written the class name and dtype into it
        write_json(scratch / "config.json", content)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)

    return write_folder(folder, fill, overwrite=overwrite)
