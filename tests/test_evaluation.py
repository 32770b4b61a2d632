"""Metric modules: `evaluate.load` takes them offline, and they give what one computes by hand."""

import math
import sys
from pathlib import Path

import evaluate
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_ext.training import evaluation
from hf_ext.training.evaluation import METRICS, metric_path


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Metric modules are copied to a cache, and results are kept there."""
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_METRICS_CACHE", "HF_EVALUATE_CACHE", "HF_MODULES_CACHE"):
            patch.setattr(evaluate.config, name, folder / name)
        yield


def measure(name: str, config: str | None = None, **inputs: object) -> dict:
    return evaluate.load(metric_path(name), config).compute(**inputs)


def test_accuracy_and_f1() -> None:
    predictions, references = [0, 1, 1, 2], [0, 1, 2, 2]
    assert measure("accuracy", predictions=predictions, references=references) == {"accuracy": 0.75}
    # class 0: 1; class 1: precision 1/2, recall 1, so 2/3; class 2: precision 1, recall 1/2, so 2/3
    found = measure("f1", predictions=predictions, references=references)
    assert found["f1"] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)
    found = measure("f1", predictions=predictions, references=references, average="micro")
    assert found["f1"] == pytest.approx(0.75)


def test_multilabel() -> None:
    rows = {"predictions": [[1, 0], [1, 1]], "references": [[1, 0], [0, 1]]}
    assert measure("accuracy", "multilabel", **rows) == {"accuracy": 0.5}
    # three positives found, two right, two wanted: precision 2/3, recall 1
    assert measure("f1", "multilabel", **rows, average="micro")["f1"] == pytest.approx(0.8)


def test_span_f1() -> None:
    """One of two entities found, and two that are none."""
    gold, found = [["B-PER", "I-PER", "O", "B-LOC"]], [["B-PER", "O", "B-PER", "B-LOC"]]
    scores = measure("span_f1", predictions=found, references=gold)
    assert scores == pytest.approx({"precision": 1 / 3, "recall": 1 / 2, "f1": 0.4})


def test_bleu() -> None:
    """Six words against six, one of them wrong: 5/6, 3/5, 1/4 of the n-grams up to three, none of the three of four."""
    found, wanted = ["the cat sat on the mat"], ["the cat sits on the mat"]
    exact = measure("bleu", predictions=wanted, references=wanted)
    assert exact["bleu"] == pytest.approx(100)
    scores = measure("bleu", predictions=found, references=wanted)
    assert scores["precisions"][:3] == pytest.approx([100 * 5 / 6, 100 * 3 / 5, 100 * 1 / 4])
    # a precision of nothing counts as half a match, here of three (sacreBLEU's exponential smoothing)
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 1 / 4 * 0.5 / 3) ** 0.25)
    several = measure("bleu", predictions=found, references=[[*wanted, *found]])
    assert several["bleu"] == pytest.approx(100)
    with pytest.raises(ValueError, match="equally many references"):
        measure("bleu", predictions=[*found, *found], references=[wanted, [*wanted, *found]])


def test_rouge() -> None:
    """Of three words and four, two are the same, in the same order, not side by side: 2 * 2 / 7."""
    scores = measure("rouge", predictions=["a cat ran"], references=["a big cat slept"])
    assert scores["rouge1"] == scores["rougeL"] == pytest.approx(4 / 7)
    assert scores["rouge2"] == 0


def test_word_error_rate() -> None:
    """One word changed and one left out, of six; by letters: "sat" to "sit", and " mat"."""
    scores = measure("word_error_rate", predictions=["the cat sit on the"], references=["the cat sat on the mat"])
    assert scores == pytest.approx({"wer": 2 / 6, "cer": 5 / 22})


def test_perplexity(tmp_path: Path) -> None:
    """Of a model that says the same of every word, the size of its vocabulary; padding is not counted."""
    config = LlamaConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    model = LlamaForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "even")
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w9")
    tokenizer.save_pretrained(tmp_path / "even")
    texts = ["w1 w2", "w3 w4 w5 w6", "w1 w2 w3"]
    found = measure("perplexity", predictions=texts, model_id=str(tmp_path / "even"), batch_size=2)
    assert found["perplexities"] == pytest.approx([10, 10, 10], rel=1e-5)
    assert found["perplexity"] == pytest.approx(found["mean_perplexity"]) == pytest.approx(10, rel=1e-5)
    # One text at a time and by the loss of the class itself, with other weights.
    torch.nn.init.normal_(model.lm_head.weight)
    model.eval().save_pretrained(tmp_path / "uneven")
    tokenizer.save_pretrained(tmp_path / "uneven")
    ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    losses = [model(row, labels=row).loss.item() for row in ids]
    found = measure("perplexity", predictions=texts, model_id=str(tmp_path / "uneven"))
    assert found["perplexities"] == pytest.approx([math.exp(loss) for loss in losses], rel=1e-4)
    counts = [row.shape[1] - 1 for row in ids]
    total = sum(loss * count for loss, count in zip(losses, counts)) / sum(counts)
    assert found["perplexity"] == pytest.approx(math.exp(total), rel=1e-4)
    with pytest.raises(ValueError, match="text 2 has fewer than two tokens"):
        measure("perplexity", predictions=["w1 w2", "w3"], model_id=str(tmp_path / "even"))


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(ImportError, match=r"needs jiwer.*hf-ext\[metrics\]"):
        evaluation.require("jiwer")


def test_names() -> None:
    files = {path.stem for path in Path(metric_path("f1")).parent.glob("*.py")} - {"__init__"}
    assert files == set(METRICS)
    with pytest.raises(ValueError, match="there is no metric 'bluf'; there are accuracy"):
        metric_path("bluf")
