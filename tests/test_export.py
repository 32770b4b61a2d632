"""Official export: what is in the folder, what is refused, what is left when something goes wrong."""

import json
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_bert import BERT, bert
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertForMaskedLM,
    BertModel,
    BertTokenizer,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
)

from hf_ext import (
    ExtBertConfig,
    ExtBertForMaskedLM,
    ExtBertModel,
    ExtLlamaConfig,
    ExtLlamaForCausalLM,
    ExtLlamaForQuestionAnswering,
    export_official,
)
from hf_ext.hub import folders
from hf_ext.hub.official import official_config

LLAMA = {**BERT, "num_key_value_heads": 1}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    """A folder that is there already, with something precious in it."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "precious.txt").write_text("keep me")
    return folder


# --- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "stock"),
    [
        (bert, BertForMaskedLM),
        (lambda: bert(ExtBertModel), BertModel),
        (lambda: ExtLlamaForCausalLM(ExtLlamaConfig(**LLAMA)).eval(), LlamaForCausalLM),
        (lambda: ExtLlamaForCausalLM(ExtLlamaConfig(**LLAMA, tie_word_embeddings=True)).eval(), LlamaForCausalLM),
        (lambda: ExtLlamaForQuestionAnswering(ExtLlamaConfig(**LLAMA)).eval(), LlamaForQuestionAnswering),
    ],
    ids=["bert_mlm", "bert", "llama", "llama_tied", "llama_qa"],
)
def test_stock_class_loads_the_folder(make, stock: type, tmp_path: Path) -> None:
    model = make()
    folder = export_official(model, tmp_path / "new" / "out")
    assert folder == tmp_path / "new" / "out"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == model.config.official_model_type
    assert config["architectures"] == [stock.__name__]
    assert not set(config) & {*model.config.runtime_fields, "auto_map"}
    assert "ext_" not in json.dumps(config) and "Ext" not in json.dumps(config)
    assert [p.name for p in folder.parent.iterdir()] == ["out"], "no scratch folder is left"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loaded, info = stock.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.tensor([[1, 5, 9, 2], [3, 3, 8, 1]])
    ours, theirs = model(ids), loaded.eval()(ids)
    for a, b in zip(ours.to_tuple(), theirs.to_tuple(), strict=False):
        if torch.is_tensor(a):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    # Byte for byte the file that the stock class writes.
    loaded.save_pretrained(tmp_path / "stock")
    assert (tmp_path / "stock" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    written = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert type(AutoConfig.from_pretrained(folder)) is stock.config_class
    assert config == written


def test_folder_content_and_mode(tmp_path: Path) -> None:
    folder = export_official(bert(), tmp_path / "out")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o055 == 0o055, "others may read it"


def test_round_trip_through_our_class(tmp_path: Path) -> None:
    model = bert(skip_padding=False, loss_chunk_size=7)
    loaded = ExtBertForMaskedLM.from_pretrained(export_official(model, tmp_path / "out"))
    assert loaded.config.model_type == "ext_bert"
    assert loaded.config.skip_padding, "runtime fields are not part of an official file"
    for (name, a), (other, b) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(a, b)


def test_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = bert(skip_padding=False)
    before = model.config.to_dict()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    export_official(model, tmp_path / "out")
    after = model.config.to_dict()
    assert after["model_type"] == "ext_bert"
    changed = {k for k in before if before[k] != after[k]}
    assert changed <= {"architectures", "dtype"}, "the two fields that `save_pretrained` itself fills in"
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert not model.training


def test_half_precision_is_kept(tmp_path: Path) -> None:
    folder = export_official(bert().bfloat16(), tmp_path / "out")
    assert {x.dtype for x in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_fields_that_only_the_official_file_has_stay(tmp_path: Path) -> None:
    labels = {0: "ham", 1: "spam"}
    config = ExtBertConfig(**BERT, architectures=["ExtBertModel"], id2label=labels, some_user_field=[1, 2])
    content = official_config(config)
    assert content["id2label"] == {"0": "ham", "1": "spam"}
    assert content["some_user_field"] == [1, 2]
    assert content["architectures"] == ["BertModel"]
    assert official_config(ExtBertConfig(**BERT)).get("architectures") is None


def test_refused_configuration_names_its_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that says it cannot be expressed is not written at all."""

    def refuse(self: ExtBertConfig) -> None:
        raise ValueError("attention_window=4 has no official field; set it to None.")

    monkeypatch.setattr(ExtBertConfig, "refuse_inexpressible", refuse)
    with pytest.raises(ValueError, match="attention_window=4"):
        export_official(bert(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_is_saved_along(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello"]))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    folder = export_official(bert(), tmp_path / "out", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(folder)("hello")["input_ids"] == [2, 5, 3]
    assert type(AutoModel.from_pretrained(folder)) is BertModel
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"


# --- what is in the way -------------------------------------------------------------------------------------------


def test_existing_folder_is_refused_and_untouched(old_folder: Path) -> None:
    with pytest.raises(FileExistsError, match=r"out exists and is not empty; .*overwrite=True"):
        export_official(bert(), old_folder)
    assert contents(old_folder) == {"precious.txt": b"keep me"}
    assert [p.name for p in old_folder.parent.iterdir()] == ["out"]


def test_overwrite_replaces_the_folder(old_folder: Path) -> None:
    export_official(bert(), old_folder, overwrite=True)
    assert sorted(contents(old_folder)) == ["config.json", "model.safetensors", "precious.txt"]
    assert contents(old_folder)["precious.txt"] == b"keep me", "what is no model stays"
    assert [p.name for p in old_folder.parent.iterdir()] == ["out"]
    model = bert()
    export_official(model, str(old_folder), overwrite=True)
    loaded = BertForMaskedLM.from_pretrained(old_folder)
    assert torch.equal(loaded.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)


def test_empty_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_official(bert(), tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_file_in_the_way(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(FileExistsError, match="out is a file; give the name of a folder"):
        export_official(bert(), tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "a file"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_unwritable_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that is a file, and a parent that may not be written (the administrator may write everywhere)."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        export_official(bert(), tmp_path / "file" / "out")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid() != 0:
        with pytest.raises(PermissionError, match="closed"):
            export_official(bert(), closed / "out")

    def refuse(*args: object, **kwargs: object) -> str:
        raise PermissionError(13, "Permission denied", str(closed))

    monkeypatch.setattr(folders.tempfile, "mkdtemp", refuse)
    with pytest.raises(PermissionError, match="closed"):
        export_official(bert(), closed / "out")
    assert list(closed.iterdir()) == []


def test_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative name, with a trailing slash."""
    monkeypatch.chdir(tmp_path)
    assert export_official(bert(), "out/") == Path("out")
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_link_to_a_folder(tmp_path: Path) -> None:
    """A link is followed: the folder that it names gets the files, the link stays."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    export_official(bert(), tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "out"]


# --- failures in the middle ---------------------------------------------------------------------------------------


def break_model(model: ExtBertForMaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_written(folder: Path, **kwargs: object) -> None:
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "save_pretrained", half_written)


def break_config(model: ExtBertForMaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)


def break_move(model: ExtBertForMaskedLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.replace

    def fail(source: Path, target: Path) -> None:
        if (Path(source) / "config.json").exists():  # the new folder, on its way to its place
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(folders.os, "replace", fail)


@pytest.mark.parametrize("fault", [break_model, break_config, break_move])
def test_failure_leaves_the_old_folder(fault, old_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    with monkeypatch.context() as patch:
        fault(model, patch)
        with pytest.raises(OSError, match="No space left"):
            export_official(model, old_folder, overwrite=True)
    assert contents(old_folder) == {"precious.txt": b"keep me"}
    assert [p.name for p in old_folder.parent.iterdir()] == ["out"], "no scratch folder is left"


@pytest.mark.parametrize("fault", [break_model, break_config, break_move])
def test_failure_leaves_nothing_where_nothing_was(fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = bert()
    with monkeypatch.context() as patch:
        fault(model, patch)
        with pytest.raises(OSError, match="No space left"):
            export_official(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export_official(model, tmp_path / "out")  # and the next try succeeds


def test_failing_tokenizer(old_folder: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        export_official(bert(), old_folder, tokenizer=Broken(), overwrite=True)
    assert contents(old_folder) == {"precious.txt": b"keep me"}
    assert [p.name for p in old_folder.parent.iterdir()] == ["out"]


# --- what is refused ----------------------------------------------------------------------------------------------


def test_adapter_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = bert()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(ValueError, match=r"got PeftModel.*model\.merge_and_unload\(\)"):
        export_official(adapted, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    folder = export_official(adapted.merge_and_unload(), tmp_path / "out")
    assert set(load_file(folder / "model.safetensors")) == set(load_file(
        export_official(bert(), tmp_path / "plain") / "model.safetensors"))  # fmt: skip


def test_model_with_an_injected_adapter_is_refused_or_has_official_names(tmp_path: Path) -> None:
    """The wrapper's inner model, and `add_adapter`, hold adapter layers too: an official reader knows no such names."""
    from peft import LoraConfig

    model = bert()
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    with pytest.raises(ValueError, match="(?i)adapter"):
        export_official(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", [BertModel, torch.nn.Linear, None])
def test_other_models_are_refused(what: type | None, tmp_path: Path) -> None:
    from transformers import BertConfig

    model = {BertModel: lambda: BertModel(BertConfig(**BERT)), torch.nn.Linear: lambda: torch.nn.Linear(2, 2)}.get(
        what, lambda: None
    )()
    with pytest.raises(ValueError, match=f"takes a model of this package, got {type(model).__name__}"):
        export_official(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
