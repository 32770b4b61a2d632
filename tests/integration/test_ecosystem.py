"""Trainer, adapters, quantised training, placing and ONNX over every architecture (`ecosystem.py`)."""

import contextlib
import json
from pathlib import Path

import ecosystem
import killed_run
import pytest
import torch
from ecosystem import ADAPTERS, NEW_TOKENS, PROMPTS, StockFails
from harness import Subject, flat, of_architectures, one_per_architecture, slow_unless, subjects
from matrix import AS_STOCK, END, START, YES

import hf_ext

MAIN = ("masked", "causal", "seq2seq", "image_row", "pair", "text", "image")  # heads, the most used one first


def own_blocks(subject: Subject) -> bool:
    return subject.case.blocks_of is None


def over(found: list[Subject]):
    """Parametrise over subjects, with readable names."""
    assert found, "nothing to check"
    return pytest.mark.parametrize("subject", found, ids=str)


matrix = pytest.mark.matrix  # a column of the README's table of what was tried with what


@contextlib.contextmanager
def as_stock():
    """Skip where the stock class cannot do it either."""
    try:
        yield
    except StockFails as error:
        pytest.skip(f"the stock class cannot either: {error}")


@matrix("Trainer")
@over(one_per_architecture(*MAIN[:4], where=own_blocks))
def test_trainer(subject):
    ecosystem.check_trainer(subject)


@matrix("bf16")
@over(one_per_architecture(*MAIN[:4], where=own_blocks))
def test_bf16(subject):
    ecosystem.check_bf16(subject)


@over(one_per_architecture(*MAIN[:4], where=lambda s: s.model_type in ("ext_bert", "ext_llama", "ext_t5", "ext_vit")))
def test_torch_compile(subject):
    ecosystem.check_torch_compile(subject)


@pytest.mark.parametrize(
    "class_name", ["ExtBertForMaskedLM", pytest.param("ExtGPT2LMHeadModel", marks=pytest.mark.slow)]
)
def test_a_killed_trainer_resumes_to_the_uninterrupted_run(class_name, tmp_path):
    """Weights, optimizer, random numbers and logged losses are bit-equal, after a kill in the middle of an epoch. The
    encoder computes on real tokens only."""
    (subject,) = subjects(configs="one", where=lambda s: s.class_name == class_name)
    killed_run.run_killed(subject, tmp_path / "killed")
    kept = sorted(place.name for place in (tmp_path / "killed").glob("checkpoint-*"))
    assert kept[-1] == f"checkpoint-{killed_run.KEPT}"
    killed_run.run(subject, tmp_path / "killed", resume=True)
    killed_run.run(subject, tmp_path / "whole")
    resumed, whole = (tmp_path / name / f"checkpoint-{killed_run.STEPS}" for name in ("killed", "whole"))
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        found, expected = (torch.load(folder / name, weights_only=False) for folder in (resumed, whole))
        assert flat(found) == flat(expected), name
    logs = [json.loads((folder / "trainer_state.json").read_text())["log_history"] for folder in (resumed, whole)]
    assert logs[0] == logs[1] and len(logs[0]) == killed_run.STEPS


@matrix("label smoothing")
@over(one_per_architecture(*MAIN[:3], where=own_blocks))
def test_label_smoothing(subject):
    ecosystem.check_label_smoothing(subject)


@matrix("other adapters")
@pytest.mark.parametrize("method", ADAPTERS)
@over(one_per_architecture(*MAIN, where=own_blocks))
def test_adapter(subject, method):
    with as_stock():
        ecosystem.check_adapter(subject, method)


@matrix("prompt and prefix tuning")
@pytest.mark.parametrize("method", PROMPTS)
@over(
    one_per_architecture("causal", "seq2seq", where=own_blocks)
    + one_per_architecture("row", where=lambda s: own_blocks(s) and not s.causal)
)
def test_prompt(subject, method):
    with as_stock():
        ecosystem.check_prompt(subject, method)


@over(one_per_architecture("causal", "masked"))
def test_no_target(subject):
    ecosystem.check_no_target(subject)


@over(one_per_architecture(*MAIN, where=own_blocks))
def test_hotswap(subject):
    ecosystem.check_hotswap(subject)


@matrix("new tokens on tied embeddings")
@pytest.mark.parametrize("way", NEW_TOKENS)
@over(one_per_architecture("causal", "masked", "seq2seq", where=lambda s: own_blocks(s) and s.is_text))
def test_new_tokens(subject, way):
    with as_stock():
        ecosystem.check_new_tokens(subject, way)


@matrix("QLoRA")
@over(one_per_architecture("causal", "masked", "seq2seq", where=own_blocks))
def test_qlora(subject):
    pytest.importorskip("bitsandbytes", reason="quantisation needs bitsandbytes")
    ecosystem.check_qlora(subject)


@matrix("offload")
@over(one_per_architecture(*MAIN))
def test_offload(subject):
    ecosystem.check_offload(subject)


def exported() -> list:
    """One class of each architecture; tracing takes seconds, so one of them in every run, the others when asked for."""
    return slow_unless(of_architectures("bert"), one_per_architecture(*MAIN))


@matrix("ONNX")
@over(exported())
def test_onnx(subject):
    pytest.importorskip("onnxruntime", reason="the graph is run in ONNX Runtime")
    ecosystem.check_onnx(subject)


def test_table_of_the_readme():
    """The table is of the architectures that there are, nothing in it failed, and nothing is left open in what every
    model can do."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    lines = [line.strip("|").split("|") for line in readme.partition(START)[2].partition(END)[0].split("\n") if line]
    columns = [cell.strip() for cell in lines[0]]
    rows = {name.strip(" `"): dict(zip(columns[1:], map(str.strip, cells), strict=True)) for name, *cells in lines[2:]}
    assert rows.keys() == hf_ext.architectures().keys()
    assert {"Trainer", "LoRA", "other adapters", "QLoRA", "FSDP2", "ONNX"} <= set(columns)
    assert all(
        cell in ("", YES, AS_STOCK, f"({YES})", f"({AS_STOCK})") for row in rows.values() for cell in row.values()
    )
    for column in ("LoRA", "checkpointing", "offload"):
        assert all(row[column] for row in rows.values()), column
