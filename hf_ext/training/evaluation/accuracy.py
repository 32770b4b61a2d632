"""Share of right labels; with `config_name="multilabel"`, of rows whose 0/1 labels are all right (scikit-learn)."""

import datasets
import evaluate

from hf_ext.training.metrics import accuracy


class Accuracy(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        if self.config_name == "multilabel":  # rows of 0 and 1
            label = datasets.Sequence(label)
        features = datasets.Features({"predictions": label, "references": label})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return {"accuracy": accuracy(predictions, references)}
