"""Precision, recall and F1 of exactly matching entities over rows of BIO labels."""

import datasets
import evaluate

from hf_ext.training.metrics import span_f1


class SpanF1(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        labels = datasets.Sequence(datasets.Value("string"))
        features = datasets.Features({"predictions": labels, "references": labels})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        return span_f1(references, predictions)
