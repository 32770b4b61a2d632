"""Metrics of each task on arrays, by scikit-learn and scipy. No torch. `hf_ext.training.evaluation` has those that
`evaluate.load` takes.

Legend: B batch, T tokens, L labels, N choices.
"""

import math
import re
from collections.abc import Sequence

import numpy as np

IGNORED = -100


def is_bio(names: Sequence[str]) -> bool:
    """Whether label names follow the BIO scheme: "O", "B-X" and "I-X" only, with at least one "B-"."""
    return all(re.fullmatch(r"O|[BI]-.+", name) for name in names) and any(name.startswith("B-") for name in names)


def entities(rows: Sequence[Sequence[str]]) -> set[tuple[int, str, int, int]]:
    """(row, type, first, end) of each entity of rows of BIO labels; end is one past the last token.

    An "I-X" that continues no X starts a new entity, as in the CoNLL evaluation script.
    """
    found = set()
    for row, labels in enumerate(rows):
        first, kind = 0, None
        for position, label in enumerate([*labels, "O"]):
            prefix, _, name = label.partition("-")
            if kind is not None and (prefix, name) != ("I", kind):
                found.add((row, kind, first, position))
                kind = None
            if kind is None and prefix != "O":
                first, kind = position, name
    return found


def span_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Micro precision, recall and F1 of exactly matching entities over sequences of BIO labels; 0 where undefined."""
    wanted, found = entities(gold), entities(predicted)
    right = len(wanted & found)
    return {
        "precision": right / max(len(found), 1),
        "recall": right / max(len(wanted), 1),
        "f1": 2 * right / max(len(wanted) + len(found), 1),
    }


def accuracy(predicted: np.ndarray, labels: np.ndarray) -> float:
    """Share of equal labels (B,), or of equal rows of 0/1 labels (B, L)."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predicted))


def f1(predicted: np.ndarray, labels: np.ndarray, average: str = "macro") -> float:
    """F1 of labels (B,) or of 0/1 labels (B, L), averaged as scikit-learn names it; a class that nobody names counts
    as 0."""
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predicted, average=average, zero_division=0.0))


def classification(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Accuracy and macro F1; logits (B, L), labels (B,). Multiple choice: logits (B, N)."""
    predicted = logits.argmax(-1)
    return {"accuracy": accuracy(predicted, labels), "f1": f1(predicted, labels)}


def multi_label(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Micro and macro F1 and exact-match accuracy at probability 0.5; logits and 0/1 labels (B, L)."""
    predicted, wanted = (logits > 0).astype(int), labels.astype(int)
    return {
        "f1": f1(predicted, wanted, "micro"),
        "f1_macro": f1(predicted, wanted),
        "accuracy": accuracy(predicted, wanted),
    }


def regression(predicted: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Mean squared error, Pearson and Spearman correlation; both (B,) or (B, 1).

    A correlation is NaN where it is not defined: fewer than two rows, or a constant column.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_squared_error

    predicted, labels = predicted.reshape(-1).astype(float), labels.reshape(-1).astype(float)
    defined = len(labels) > 1 and np.ptp(predicted) > 0 and np.ptp(labels) > 0
    return {
        "mse": float(mean_squared_error(labels, predicted)),
        "pearson": float(pearsonr(predicted, labels)[0]) if defined else math.nan,
        "spearman": float(spearmanr(predicted, labels)[0]) if defined else math.nan,
    }


def token_classification(logits: np.ndarray, labels: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Accuracy over labelled tokens, and F1: of spans for BIO names, else macro over labels.

    logits (B, T, L), labels (B, T) with -100 where a token has no label of its own.
    """
    predicted, labelled = logits.argmax(-1), labels != IGNORED
    share = accuracy(predicted[labelled], labels[labelled]) if labelled.any() else 0.0
    if is_bio(names):
        gold_rows = [[names[label] for label in row[keep]] for row, keep in zip(labels, labelled, strict=True)]
        rows = [[names[label] for label in row[keep]] for row, keep in zip(predicted, labelled, strict=True)]
        return {"accuracy": share, **span_f1(gold_rows, rows)}
    return {"accuracy": share, "f1": f1(predicted[labelled], labels[labelled])}


def question_answering(
    start_logits: np.ndarray, end_logits: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> dict[str, float]:
    """Exact match and mean F1 of the answer's token span, end not before start.

    start_logits, end_logits (B, T); starts, ends (B,) are inclusive token positions, both 0 for "no answer here".
    """
    exact, overlaps = [], []
    # (b, i, j) is the score of the span from i to j; -inf below the diagonal forbids an end before the start
    tokens = start_logits.shape[1]
    forbidden = np.tril(np.full((tokens, tokens), -np.inf), k=-1)
    for start_row, end_row, start, end in zip(start_logits, end_logits, starts, ends, strict=True):
        first, last = np.unravel_index(np.argmax(start_row[:, None] + end_row[None, :] + forbidden), forbidden.shape)
        exact.append(first == start and last == end)
        shared = max(0, min(last, end) - max(first, start) + 1)
        overlaps.append(2 * shared / ((last - first + 1) + (end - start + 1)))
    return {"exact_match": float(np.mean(exact)), "f1": float(np.mean(overlaps))}


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats per token; infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
