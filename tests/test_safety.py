"""Checkpoints of somebody else's: nothing of them runs, leaves its folder, or takes memory that is not there."""

import functools
import json
import logging
import math
import random
import shutil
import signal
import time
from pathlib import Path

import harness
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from mutations import mutate_config, mutate_safetensors
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_bert import BERT, bert, saved_bert
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, BertModel
from typer.testing import CliRunner

import hf_ext
from hf_ext import ExtBertConfig, ExtBertModel, ExtLlamaConfig, ExtLlamaForCausalLM, ExtSwinConfig, safety
from hf_ext.cli.app import app
from hf_ext.data.packages import fetch_package

ABSURD = [
    {"vocab_size": 10**12},
    {"hidden_size": 10**8},
    {"intermediate_size": 10**12},
    {"max_position_embeddings": 10**13},
    {"vocab_size": 10**30},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_bert(tmp_path / "model", ExtBertModel)


def rewrite(folder: Path, name: str = "config.json", **fields: object) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, **fields}))


# --- pickles ------------------------------------------------------------------------------------------------------


class Dangerous:
    """What a pickle may do when it is read as a pickle."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.victim,))


def pickled(folder: Path, **more: object) -> Path:
    state = load_file(folder / "model.safetensors")
    torch.save({**state, **more}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_safetensors_by_default(folder: Path) -> None:
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("load", [ExtBertModel.from_pretrained, AutoModel.from_pretrained])
def test_pickle_is_read_only_when_asked_for(load, folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    pickled(folder)
    with pytest.raises(OSError, match=r"are pickles \(pytorch_model\.bin\).*use_safetensors=False"):
        load(folder)
    loaded = load(folder, use_safetensors=False)
    assert type(loaded) is ExtBertModel
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(ValueError, match="weights_only=False would run"):
        load(folder, use_safetensors=False, weights_only=False)
    loaded.save_pretrained(folder)
    assert type(load(folder)) is ExtBertModel, "beside safetensors a pickle is not looked at"


def test_command_that_makes_safetensors_of_pickles(folder: Path, tmp_path: Path) -> None:
    pickled(folder)
    refused = CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out")])
    assert refused.exit_code == 1 and "hf-ext export MODEL OUT --pickle" in refused.stderr
    assert CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out"), "--pickle"]).exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_pickle_runs_nothing(folder: Path, tmp_path: Path) -> None:
    pickled(folder, dangerous=Dangerous(tmp_path / "victim"))
    with pytest.raises(Exception, match="(?i)weights.?only"):
        ExtBertModel.from_pretrained(folder, use_safetensors=False)
    assert not (tmp_path / "victim").exists()


def test_stock_class_is_as_it_was(tmp_path: Path) -> None:
    BertModel(BertConfig(**BERT)).save_pretrained(tmp_path)
    pickled(tmp_path)
    assert type(BertModel.from_pretrained(tmp_path)) is BertModel


# --- remote code, paths -------------------------------------------------------------------------------------------


def test_no_code_of_a_checkpoint_runs_unasked(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    for name in ("modeling_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(f"open({str(victim)!r}, 'w')\nclass Evil: pass\n")
    heads = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "modeling_evil.Evil")
    rewrite(folder, auto_map=heads)
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "tokenization_evil.Evil"]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert type(AutoConfig.from_pretrained(folder)) is ExtBertConfig
    assert type(AutoModel.from_pretrained(folder)) is ExtBertModel
    assert type(ExtBertModel.from_pretrained(folder)) is ExtBertModel
    for command in (["export", str(folder), str(tmp_path / "out")], ["generate", str(folder), "-p", "x"]):
        CliRunner().invoke(app, command)
    try:
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        assert "NameError" not in str(error)
    assert not victim.exists()


@pytest.mark.parametrize("path", ["../secret.safetensors", "/etc/secret.safetensors", "a/../../secret.safetensors"])
def test_index_cannot_lead_out_of_the_folder(path: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": path}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is not in its folder"):
        ExtBertModel.from_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match="is no index of weights"):
        ExtBertModel.from_pretrained(folder)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b/c", "~/x", "a\\b", "..", "a/..", "--x"])
def test_model_ids_are_no_paths(name: str) -> None:
    result = CliRunner().invoke(app, ["export", "--", name, "out"])
    assert result.exit_code != 0 and "error: " in result.stderr


@pytest.mark.parametrize(
    ("name", "version", "sha256"),
    [
        ("--index-url=http://evil", "1", "0" * 64),
        ("../evil", "1", "0" * 64),
        ("a/../../b", "1", "0" * 64),
        ("good", "1 --pre", "0" * 64),
        ("good", "1", "../../../etc"),
    ],
)
def test_packages_are_named_not_commanded(name: str, version: str, sha256: str) -> None:
    with pytest.raises(ValueError, match="is not the name, version or sha256 of a package"):
        fetch_package(name, version, sha256)


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", ABSURD, ids=str)
def test_absurd_sizes_are_refused_before_memory_is_taken(fields: dict, folder: Path) -> None:
    start = time.perf_counter()
    with pytest.raises(ValueError, match="Check the sizes|no model can be built"):
        bert(ExtBertModel, **fields)
    rewrite(folder, **fields)
    logging.disable(logging.CRITICAL)  # the library's table of shapes that differ
    try:
        with pytest.raises((ValueError, RuntimeError), match="Check the sizes|no model can|ignore_mismatched_sizes"):
            ExtBertModel.from_pretrained(folder)
        with pytest.raises(ValueError, match="Check the sizes|no model can"):
            ExtBertModel.from_pretrained(folder, ignore_mismatched_sizes=True)
    finally:
        logging.disable(logging.NOTSET)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (ExtBertConfig, {"num_hidden_layers": 10**9}),
        (ExtBertConfig, {"num_attention_heads": 10**9, "hidden_size": 10**9}),
        (ExtBertConfig, {"num_labels": 10**10}),
        (ExtSwinConfig, {"depths": [2, 10**9]}),
        (hf_ext.ExtGPTNeoConfig, {"attention_types": [[["global"], 10**10]]}),
        (hf_ext.ExtCLIPConfig, {"text_config": {"num_hidden_layers": 10**10}}),
    ],
    ids=str,
)
def test_numbers_that_are_counted_out_have_a_limit(config: type, fields: dict, tmp_path: Path) -> None:
    config().save_pretrained(tmp_path)
    rewrite(tmp_path, **fields)
    with pytest.raises(ValueError, match=r"says \d+, and \d+ is the most"):
        config.from_pretrained(tmp_path)


def test_models_of_any_real_size_can_be_described() -> None:
    """405 billion parameters, on the meta device."""
    config = ExtLlamaConfig(
        vocab_size=128256, hidden_size=16384, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8,
        intermediate_size=53248, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = ExtLlamaForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 400e9
    with pytest.raises(ValueError, match="the parameters of this ExtLlamaForCausalLM take 1,6"):
        ExtLlamaForCausalLM(config)


def test_memory_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert 2**28 < safety.physical_memory() < 2**50
    monkeypatch.setattr(safety, "LARGE", 0)
    bert(ExtBertModel)
    monkeypatch.setattr(safety, "physical_memory", lambda: 1000)
    with pytest.raises(ValueError, match="the parameters of this ExtBertModel take"):
        bert(ExtBertModel)
    ExtBertModel.from_pretrained(folder)  # memory for what is in the file is the file's size


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "1000000\n"}, 1_000_000),  # a container with a tree of its own
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "max"}, 1000),  # the limit of a group around it
        ("0::/a/b\n", {"a/memory.max": "1000", "a/b/memory.max": "10"}, 10),
        ("0::/a\n", {"a/memory.max": "max\n"}, math.inf),
        ("0::/a\n", {}, math.inf),
        ("0::/../a\n", {"memory.max": "7"}, 7),
        ("7:cpu,cpuacct:/a\n5:memory:/a\n", {"memory/a/memory.limit_in_bytes": "2000", "memory.max": "3"}, 2000),
        ("5:memory:/docker/f00\n", {"memory/memory.limit_in_bytes": "3000"}, 3000),  # a path of the machine's
        ("5:memory:/a\n0::/a\n", {"memory/a/memory.limit_in_bytes": "400", "a/memory.max": "500"}, 400),
        ("7:cpu:/a\n", {"memory/a/memory.limit_in_bytes": "400"}, math.inf),
        (None, {"memory.max": "5"}, math.inf),
    ],
)
def test_memory_of_a_container(lines: str | None, files: dict[str, str], expected: float, tmp_path: Path) -> None:
    """Both versions of Linux's control groups."""
    if lines is not None:
        (tmp_path / "cgroup").write_text(lines)
    for name, content in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(content)
    assert safety.container_memory(tmp_path / "cgroup", tmp_path / "tree") == expected


def test_what_a_container_allows_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safety, "LARGE", 0)
    monkeypatch.setattr(safety, "container_memory", lambda: 1000)
    with pytest.raises(ValueError, match="of this ExtBertModel take .* and there are 0.0 GB here"):
        bert(ExtBertModel)


# --- broken files -------------------------------------------------------------------------------------------------


@functools.cache
def checkpoint(model_type: str) -> tuple[type, Path]:
    subject = harness.base_subject(model_type)
    folder = harness.scratch()
    subject.ours(subject.our_config(**subject.fields)).save_pretrained(folder)
    return subject.ours, folder


def load_mutated(kind: str, seed: int, folder: Path) -> None:
    """One broken checkpoint: it loads, or what is wrong is said, in time."""
    chance = random.Random(f"{kind} {seed}")
    cls, source = checkpoint(chance.choice(sorted(hf_ext.architectures())))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    if kind == "config":
        content = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_bytes(mutate_config(content, chance))
    else:
        (folder / "model.safetensors").write_bytes(
            mutate_safetensors((source / "model.safetensors").read_bytes(), chance)
        )
    try:
        signal.alarm(60)  # the default action ends the process: a hang is not to be slept through
        cls.from_pretrained(folder)
    except (ValueError, OSError, StrictDataclassError, SafetensorError) as error:
        assert str(error).strip(), f"{kind} {seed}: {cls.__name__}: {type(error).__name__} without a word"
    except RuntimeError as error:
        assert "ignore_mismatched_sizes" in str(error), f"{kind} {seed}: {cls.__name__}: {error}"
    except Exception as error:
        pytest.fail(f"{kind} {seed}: {cls.__name__}: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


@pytest.fixture
def no_log():
    """Broken files are reported at length."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(("kind", "count"), [("config", 150), ("weights", 100)])
def test_broken_files_are_errors_that_say_so(kind: str, count: int, tmp_path: Path, no_log: None) -> None:
    for seed in range(count):
        load_mutated(kind, seed, tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("config", 3000), ("weights", 2000)])
def test_thousands_of_broken_files(kind: str, count: int, tmp_path: Path, no_log: None) -> None:
    for seed in range(1000, 1000 + count):
        load_mutated(kind, seed, tmp_path / "model")
