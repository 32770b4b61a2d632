"""Self-contained repositories: they load where `hf_ext` cannot be imported, and stay as they are when saved again."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from tiny_bert import BERT, bert, tokenizer
from transformers import AutoModel, AutoModelForMaskedLM

import hf_ext
from hf_ext import ExtBertConfig, ExtBertForMaskedLM, ExtBertForSequenceClassification, export_self_contained
from hf_ext.hub import self_contained

# One head of every architecture: what it is made for, else the base model; every head of one architecture.
SUBJECTS = harness.one_per_architecture(
    "causal", "seq2seq", "masked", "image_row", "pair", "text", "image",
    where=lambda s: s.class_name in s.architecture.heads.values(),
)  # fmt: skip
EVERY_HEAD = harness.subjects(configs="one", where=lambda s: s.model_type == "ext_bert")


def auto_class_of(subject: harness.Subject) -> str:
    return next(auto for auto, name in subject.architecture.heads.items() if name == subject.class_name)


def prepare(subject: harness.Subject, folder: Path, *, tuned: bool) -> dict:
    """Export a tiny model and keep what it gives."""
    config = subject.our_config(**subject.fields)
    model = subject.ours(config).eval()
    harness.randomise(model)
    export_self_contained(model, folder / "model")
    inputs = subject.inputs(config)
    torch.manual_seed(0)
    outputs = {n: x.detach() for n, x in model(**inputs).items() if torch.is_tensor(x)}
    torch.save(inputs, folder / "inputs.pt")
    torch.save(outputs, folder / "outputs.pt")
    job = {
        "name": str(subject),
        "folder": str(folder / "model"),
        "auto_class": auto_class_of(subject),
        "class_name": subject.class_name,
        "model_type": subject.model_type,
        "inputs": str(folder / "inputs.pt"),
        "outputs": str(folder / "outputs.pt"),
    }
    labels = subject.labels(config, inputs) if tuned else {}
    if labels:
        torch.save(labels, folder / "labels.pt")
        job["labels"] = str(folder / "labels.pt")
    return job


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    """What the clean machine says: one process for all."""
    root = tmp_path_factory.mktemp("clean")
    jobs = []
    for subject in {str(s): s for s in [*SUBJECTS, *EVERY_HEAD]}.values():
        folder = root / re.sub(r"\W", "_", str(subject))
        folder.mkdir()
        jobs.append(prepare(subject, folder, tuned=subject in SUBJECTS))
    classifier = ExtBertForSequenceClassification(ExtBertConfig(**BERT, id2label={0: "ham", 1: "spam"}))
    export_self_contained(classifier, root / "classifier", tokenizer=tokenizer())
    export_self_contained(bert(), root / "mlm", tokenizer=tokenizer())
    speech = harness.one_per_architecture("seq2seq", where=lambda s: s.model_type == "ext_whisper")[0]
    whisper = root / "whisper"
    export_self_contained(speech.ours(speech.our_config(**speech.fields)), whisper, tokenizer=tokenizer())
    extractor = {
        "feature_size": 8, "n_fft": 400, "hop_length": 160, "chunk_length": 30, "sampling_rate": 16000,
    }  # fmt: skip
    (whisper / "preprocessor_config.json").write_text(json.dumps(extractor))
    self_contained.add_code(whisper, speech.architecture)
    jobs += [
        {"name": "text-classification", "pipeline": "text-classification", "folder": str(root / "classifier"),
         "input": "w1 w2"},
        {"name": "fill-mask", "pipeline": "fill-mask", "folder": str(root / "mlm"), "input": "w1 [MASK] w2"},
        {"name": "asr", "pipeline": "automatic-speech-recognition", "folder": str(whisper), "input": None},
    ]  # fmt: skip
    (root / "jobs.json").write_text(json.dumps(jobs))
    (root / "cwd").mkdir()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(root / "modules"),
        "HF_HOME": str(root / "home"),
    }
    done = subprocess.run(
        [sys.executable, "-I", str(Path(__file__).with_name("clean_machine.py")), str(root / "jobs.json")],
        capture_output=True, text=True, timeout=300, cwd=root / "cwd", env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_architecture_loads_without_the_package(subject: harness.Subject, results: dict[str, dict]) -> None:
    """The same numbers; fine-tuned and saved again with all its files; nothing is warned about."""
    found = results[str(subject)]
    assert "error" not in found, found["error"]
    assert found["difference"] <= 1e-6
    assert not found["warned"]
    if subject.kind not in ("image", *harness.POOLED):  # these have no loss
        assert found["same_code"] and found["same_map"] and found["same_weights"], found


def test_every_architecture_is_there() -> None:
    assert {s.model_type for s in SUBJECTS} == set(hf_ext.architectures())


@pytest.mark.parametrize("subject", EVERY_HEAD, ids=str)
def test_every_head_loads_without_the_package(subject: harness.Subject, results: dict[str, dict]) -> None:
    found = results[str(subject)]
    assert "error" not in found, found["error"]
    assert found["difference"] <= 1e-6


@pytest.mark.parametrize("task", ["text-classification", "fill-mask"])
def test_pipelines(task: str, results: dict[str, dict]) -> None:
    found = results[task]
    assert "error" not in found, found["error"]
    assert not found["warned"]
    assert 0 < found["result"][0]["score"] <= 1


def test_speech_pipeline_knows_whisper(results: dict[str, dict]) -> None:
    """The library's own goes by the official model type."""
    found = results["asr"]
    assert "error" not in found, found["error"]
    assert found["kind"] == "seq2seq_whisper"


# --- what is written ----------------------------------------------------------------------------------------------


def test_only_what_is_needed(tmp_path: Path) -> None:
    folder = export_self_contained(bert(), tmp_path / "out")
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "model.safetensors", "modeling_bert.py", "configuration_bert.py", "modeling.py"} <= names
    assert not names & {"auto.py", "seq2seq.py", "speech.py", "registry.py", "modeling_llama.py", "__init__.py"}
    for file in folder.glob("*.py"):
        assert not re.search(r"^\s*(from|import) hf_ext", file.read_text(), flags=re.MULTILINE)
    entries = json.loads((folder / "config.json").read_text())["auto_map"]
    heads = hf_ext.architecture_of("bert").heads
    assert set(entries) == {"AutoConfig", *heads}
    assert entries["AutoModelForMaskedLM"] == "modeling_bert.ExtBertForMaskedLM"
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "no scratch folder is left"


def test_existing_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match=r"out exists and is not empty; .*overwrite=True"):
        export_self_contained(bert(), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious.txt"]
    export_self_contained(bert(), tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "precious.txt").read_text() == "keep me"
    assert (tmp_path / "out" / "modeling_bert.py").is_file()


def test_installed_package_comes_first_and_leaves_no_dead_reference(tmp_path: Path) -> None:
    """Here the installed class is taken; a model that it saves carries no code, so it must not refer to any."""
    model = bert()
    folder = export_self_contained(model, tmp_path / "out")
    loaded = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded) is ExtBertForMaskedLM
    assert torch.equal(loaded.bert.embeddings.word_embeddings.weight, model.bert.embeddings.word_embeddings.weight)
    assert type(AutoModel.from_pretrained(folder)) is hf_ext.ExtBertModel, "no remote code, no question asked"
    loaded.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = export_self_contained(loaded, tmp_path / "third")
    assert "auto_map" in json.loads((again / "config.json").read_text())


def test_code_of_the_users_own_goes_the_librarys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered subclass: the library copies its file and refers to it."""
    (tmp_path / "own_model.py").write_text("from hf_ext import ExtBertModel\n\n\nclass Own(ExtBertModel):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_model").Own
    own.register_for_auto_class("AutoModel")
    own(ExtBertConfig(**BERT)).save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == {"AutoModel": "own_model.Own"}
    assert (tmp_path / "out" / "own_model.py").is_file()


def test_tokenizer_is_found_by_its_class(tmp_path: Path) -> None:
    """Old files do not name it; the library looks it up by an official model type that the folder does not have."""
    folder = export_self_contained(bert(), tmp_path / "out", tokenizer=tokenizer())
    content = json.loads((folder / "tokenizer_config.json").read_text())
    given = content.pop("tokenizer_class")
    for old in (content, None):  # no class, no file
        (folder / "tokenizer_config.json").unlink()
        if old is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(old))
        self_contained.add_code(folder, hf_ext.architecture_of("bert"))
        assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer" != given


# --- what is refused ----------------------------------------------------------------------------------------------


def test_classes_of_the_users_own_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(ExtBertForMaskedLM):
        pass

    with pytest.raises(ValueError, match="Mine is not one of the classes of bert .*code from outside"):
        export_self_contained(Mine(ExtBertConfig(**BERT)), tmp_path / "out")
    monkeypatch.setattr(hf_ext.registry.NORMS, "choices", dict(hf_ext.registry.NORMS.choices))
    hf_ext.register_norm("mine")(type("MyNorm", (torch.nn.LayerNorm,), {}))
    config = hf_ext.ExtTransformerConfig(**next(iter(harness.CASES["ext_transformer"].configs.values())))
    model = hf_ext.ExtTransformerModel(config)
    config.norm = "mine"
    with pytest.raises(ValueError, match="norm='mine' is a class of your own"):
        export_self_contained(model, tmp_path / "out")
    with pytest.raises(ValueError, match="export_self_contained takes a model of this package, got Linear"):
        export_self_contained(torch.nn.Linear(2, 2), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_failure_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export_self_contained(bert(), tmp_path / "out")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(self_contained, "add_code", fail)
    with pytest.raises(OSError, match="No space left"):
        export_self_contained(bert(), folder, overwrite=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    shutil.rmtree(folder)
