"""Word and character error rate of transcripts: edits by the words of the references (jiwer)."""

import datasets
import evaluate

from hf_ext.training.evaluation import require


class WordErrorRate(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        jiwer = require("jiwer")
        return {"wer": jiwer.wer(references, predictions), "cer": jiwer.cer(references, predictions)}
