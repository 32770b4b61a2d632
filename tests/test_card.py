"""Model cards: what they say, and metadata in the form that the Hub takes."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from tiny_bert import BERT, bert, saved_bert

from hf_ext import (
    ExtBertForSequenceClassification,
    ExtViTConfig,
    ExtViTModel,
    architectures,
    export_official,
    export_self_contained,
)
from hf_ext.hub.card import PIPELINE_TAGS, auto_class_of, model_card, write_card

SUMMARY = {
    "settings": {
        "model": "google-bert/bert-base-uncased",
        "data": "stanfordnlp/imdb",
        "task": "text-classification",
        "method": "lora",
    },
    "metrics": {"loss": 0.25, "accuracy": 0.9375, "pearson": None},
}


def saved(folder: Path, summary: dict | None = None, cls: type = ExtBertForSequenceClassification) -> Path:
    saved_bert(folder, cls)
    if summary is not None:
        (folder / "finetune.json").write_text(json.dumps(summary))
    return folder


def code_of(card: ModelCard) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)


def test_card_of_a_fine_tuned_model(tmp_path: Path) -> None:
    card = model_card(saved(tmp_path / "m", SUMMARY), "me/mine")
    data = card.data
    assert data.base_model == "google-bert/bert-base-uncased"
    assert data.datasets == ["stanfordnlp/imdb"]
    assert data.pipeline_tag == "text-classification" and data.library_name == "transformers"
    assert data.tags == ["hf_ext", "bert"]
    assert {r.metric_type: r.metric_value for r in data.eval_results} == {"loss": 0.25, "accuracy": 0.9375}
    assert "ExtBertForSequenceClassification of bert" in card.text
    assert "| accuracy | 0.9375 |" in card.text and "text-classification, lora" in card.text
    assert 'ExtBertForSequenceClassification.from_pretrained("me/mine")' in code_of(card)[0]
    assert len(code_of(card)) == 1 and "export_self_contained" in card.text, "it does not load without the package"


def test_metadata_survives_the_hub_client(tmp_path: Path) -> None:
    """Written, read back as a file and as metadata, and back into evaluation results."""
    path = write_card(saved(tmp_path / "m", SUMMARY), "me/mine")
    content = metadata_load(path)
    name, results = model_index_to_eval_results(content["model-index"])
    assert name == "mine" and len(results) == 2
    assert str(ModelCard.load(path)) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["official", "self_contained"])
def test_how_to_load_without_the_package(kind: str, tmp_path: Path) -> None:
    model = bert()
    if kind == "official":
        card = model_card(export_official(model, tmp_path / "m"), "me/mine")
    else:
        card = ModelCard.load(export_self_contained(model, tmp_path / "m") / "README.md")
        assert card.data.pipeline_tag == "fill-mask"
    name, trust = ("me/mine", "") if kind == "official" else ("m", ", trust_remote_code=True")
    ours, other = code_of(card)
    assert "from hf_ext import ExtBertForMaskedLM" in ours
    assert f'AutoModelForMaskedLM.from_pretrained("{name}"{trust})' in other


def test_nothing_of_this_machine_is_told(tmp_path: Path) -> None:
    """Paths are private, and no repositories."""
    (tmp_path / "data.csv").touch()
    settings = {**SUMMARY["settings"], "model": str(tmp_path / "m"), "data": "data.csv"}
    card = model_card(saved(tmp_path / "m", {**SUMMARY, "settings": settings}), "me/mine")
    assert card.data.base_model is None and card.data.datasets is None
    assert str(tmp_path) not in str(card) and "data.csv" not in str(card)


def test_a_card_that_a_person_wrote_stays(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    (folder / "README.md").write_text("mine")
    assert write_card(folder).read_text() == "mine"
    export_self_contained(bert(), folder, overwrite=True)
    assert (folder / "README.md").read_text() == "mine"


def test_adapter_and_image_model(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "me/base"}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    card = model_card(tmp_path / "adapter", "me/mine")
    assert card.data.library_name == "peft" and card.data.base_model == "me/base"
    sizes = {"image_size": 8, "patch_size": 4, **{n: v for n, v in BERT.items() if n.startswith(("hidden", "num"))}}
    ExtViTModel(ExtViTConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path / "vit")
    assert model_card(tmp_path / "vit").data.pipeline_tag == "image-feature-extraction"
    with pytest.raises(ValueError, match="no config.json"):
        model_card(tmp_path)


def test_every_class_has_an_auto_class() -> None:
    for architecture in architectures().values():
        for name in architecture.heads.values():
            assert architecture.heads[auto_class_of(architecture, name)] == name
            assert auto_class_of(architecture, name.removeprefix("Ext")) == auto_class_of(architecture, name)
    assert auto_class_of(architectures()["ext_gpt2"], "ExtGPT2LMHeadModel") in PIPELINE_TAGS
