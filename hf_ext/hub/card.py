"""Model cards: what a folder's files say about the model, with metadata that the Hub accepts."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_ext.auto import Architecture, architecture_of

# The Hub's name of a task. Of several Auto classes that lead to one class, the first here says what it is for.
PIPELINE_TAGS = {
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForZeroShotImageClassification": "zero-shot-image-classification",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForSeq2SeqLM": None,  # translation, summarisation or another: the model's user knows
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModel": "feature-extraction",
}
SUMMARY = "finetune.json"  # what `hf-ext finetune` leaves beside a model


def model_card(
    folder: str | os.PathLike,
    repo_id: str | None = None,
    *,
    base_model: str | None = None,
    datasets: Sequence[str] = (),
    metrics: dict[str, float] | None = None,
) -> ModelCard:
    """The card of a saved model or adapter: architecture, base model, data, metrics, how to load it.

    What is not given is taken from what `hf-ext finetune` and PEFT left in the folder. Names that can be no repository
    of the Hub, such as local paths, are left out: a card is public.

    Args:
        folder: of the model.
        repo_id: where it goes, for the code that loads it.
        base_model: what it was fine-tuned from.
        datasets: what it was trained on.
        metrics: name -> value on the evaluation rows.

    Raises:
        ValueError: the folder holds no model of this package's architectures.
    """
    folder = Path(folder)
    config, adapter, summary = (read_json(folder / f) for f in ("config.json", "adapter_config.json", SUMMARY))
    settings = summary.get("settings", {})
    base_model = base_model or settings.get("model") or adapter.get("base_model_name_or_path")
    datasets = list(datasets) or [settings.get("data")]
    metrics = {n: v for n, v in (metrics or summary.get("metrics") or {}).items() if isinstance(v, int | float)}
    if not config and not adapter:
        raise ValueError(f"{folder} has no config.json; a folder written by save_pretrained is needed.")
    architecture = architecture_of(config.get("model_type", "")) if config else None
    class_name = (config.get("architectures") or [architecture.heads["AutoModel"]])[0] if config else ""
    auto_class = auto_class_of(architecture, class_name) if config else "AutoModel"
    tag = PIPELINE_TAGS.get(auto_class)
    if tag == "feature-extraction" and "image_size" in config:
        tag = "image-feature-extraction"

    name = (repo_id or folder.resolve().name).split("/")[-1]
    data_names = [dataset for dataset in datasets if is_repository(dataset)]
    card_data = ModelCardData(
        library_name="peft" if adapter and not config else "transformers",
        pipeline_tag=tag,
        base_model=base_model if is_repository(base_model) else None,
        datasets=data_names or None,
        tags=["hf_ext", *([architecture.official_model_type or architecture.model_type] if architecture else [])],
        model_name=name if metrics else None,
        eval_results=evaluation(metrics, tag, data_names) or None,
    )
    what = f"{class_name} of {architecture.name}" if architecture else "an adapter of PEFT"
    parts = [f"# {name}\n", f"This is {what}, written by `hf_ext`.\n"]
    if card_data.base_model:
        parts.append(f"- **Base model:** [{base_model}](https://huggingface.co/{base_model})\n")
    parts += [f"- **Data:** [{d}](https://huggingface.co/datasets/{d})\n" for d in data_names]
    if settings:
        parts.append(f"- **Fine-tuning:** {settings.get('task')}, {settings.get('method')}\n")
    if metrics:
        rows = "".join(f"| {name} | {value:.4g} |\n" for name, value in metrics.items())
        parts.append(f"\n## Evaluation\n\n| metric | value |\n|---|---|\n{rows}")
    parts.append("\n## How to load it\n\n" + loading(config, class_name, auto_class, repo_id or name, base_model))
    return ModelCard(f"---\n{card_data.to_yaml()}\n---\n\n" + "".join(parts))


def write_card(folder: str | os.PathLike, repo_id: str | None = None, **facts: object) -> Path:
    """Write `model_card` as README.md, unless the folder has one: what a person wrote stays."""
    path = Path(folder) / "README.md"
    if not path.exists():
        path.write_text(str(model_card(folder, repo_id, **facts)), encoding="utf-8")
    return path


def loading(config: dict, class_name: str, auto_class: str, repo_id: str, base_model: str | None) -> str:
    """The code that loads a model, with and without this package."""
    if not config:
        code = python("from peft import AutoPeftModel\n", f'model = AutoPeftModel.from_pretrained("{repo_id}")')
        return "With `import hf_ext` before it where the base model was saved by `hf_ext`:\n\n" + code
    official = not class_name.startswith("Ext")
    ours = class_name if not official else f"Ext{class_name}"
    text = "With `hf_ext`:\n\n" + python(f"from hf_ext import {ours}\n", f'model = {ours}.from_pretrained("{repo_id}")')
    if "auto_map" in config or official:
        trust = "" if official else ", trust_remote_code=True"
        load = f'model = {auto_class}.from_pretrained("{repo_id}"{trust})'
        return text + "Without it:\n\n" + python(f"from transformers import {auto_class}\n", load)
    return text + (
        "Without it: not from this repository. `hf_ext.export_official` and `hf_ext.export_self_contained` write one "
        "that loads without `hf_ext`.\n"
    )


def python(*lines: str) -> str:
    return "```python\n" + "\n".join(lines) + "\n```\n\n"


def evaluation(metrics: dict[str, float], tag: str | None, datasets: list[str]) -> list[EvalResult]:
    """Metrics in the Hub's form, which wants a data set's name: that of the rows held out where there is none."""
    dataset = datasets[0] if datasets else "evaluation rows"
    return [
        EvalResult(
            task_type=tag or "other", dataset_type=dataset, dataset_name=dataset, metric_type=name, metric_value=value
        )
        for name, value in metrics.items()
    ]


def auto_class_of(architecture: Architecture, class_name: str) -> str:
    """The Auto class that says what a class is for."""
    ours = f"Ext{class_name.removeprefix('Ext')}"
    leading = [auto_class for auto_class, name in architecture.heads.items() if name == ours]
    return next((auto for auto in PIPELINE_TAGS if auto in leading), leading[0] if leading else "AutoModel")


def is_repository(name: object) -> bool:
    """Whether a text can be the id of a repository: a name, or "owner/name", and nothing on this machine."""
    if not isinstance(name, str) or not name or Path(name).expanduser().exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt"))


def read_json(path: Path) -> dict:
    """A JSON object; empty where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
