"""ROUGE-1, -2, -L and -Lsum (F-measure, mean over rows; rouge_score)."""

import datasets
import evaluate

from hf_ext.training.evaluation import require


class Rouge(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions: list[str], references: list[str], use_stemmer: bool = False) -> dict[str, float]:
        kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
        scorer = require("rouge_score.rouge_scorer").RougeScorer(kinds, use_stemmer=use_stemmer)
        scores = [scorer.score(reference, found) for reference, found in zip(references, predictions, strict=True)]
        return {kind: sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}
