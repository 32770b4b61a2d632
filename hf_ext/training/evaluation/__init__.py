"""Metric modules that `evaluate.load` takes with no network.

    accuracy = evaluate.load(metric_path("accuracy"))
    accuracy.compute(predictions=[0, 1], references=[0, 0])

Each is a thin cover over a well-kept library. Those that not everybody needs (sacrebleu, rouge_score, jiwer) come with
the extra `metrics`. `hf-ext finetune` measures by the same functions (`hf_ext.training.metrics`).
"""

import importlib
from pathlib import Path
from types import ModuleType

METRICS = ("accuracy", "f1", "span_f1", "perplexity", "bleu", "rouge", "word_error_rate")


def metric_path(name: str) -> str:
    """What to hand to `evaluate.load`.

    Raises:
        ValueError: there is no metric of that name.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}; there are {', '.join(METRICS)}.")
    return str(Path(__file__).with_name(f"{name}.py"))


def require(package: str) -> ModuleType:
    """A package of the extra `metrics`.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this metric needs {package}, which comes with an extra: pip install 'hf-ext[metrics]'"
        ) from error
