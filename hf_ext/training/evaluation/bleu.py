"""Corpus BLEU in percent, as sacreBLEU defines it. References: a text, or equally many texts, for each prediction."""

import datasets
import evaluate

from hf_ext.training.evaluation import require


class Bleu(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        several = {"predictions": text, "references": datasets.Sequence(text)}
        features = [datasets.Features(several), datasets.Features({"predictions": text, "references": text})]
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions: list[str], references: list, **options: object) -> dict[str, object]:
        """`options` are those of `sacrebleu.corpus_bleu`."""
        rows = [[row] if isinstance(row, str) else row for row in references]
        if len({len(row) for row in rows}) != 1:
            raise ValueError("every prediction needs equally many references.")
        score = require("sacrebleu").corpus_bleu(predictions, [list(column) for column in zip(*rows)], **options)
        return {"bleu": score.score, "precisions": score.precisions, "brevity_penalty": score.bp}
