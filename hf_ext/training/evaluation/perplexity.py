"""Perplexity of texts under a causal language model: that of all tokens together, and of each text.

Shapes: B texts, T tokens, V vocabulary.
"""

import datasets
import evaluate
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ext  # noqa: F401  # registers our model types
from hf_ext.training.metrics import perplexity


class Perplexity(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Value("string")})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=features)

    @torch.no_grad()
    def _compute(
        self, predictions: list[str], model_id: str, batch_size: int = 8, max_length: int = 512
    ) -> dict[str, object]:
        """`model_id` is a folder or Hub id. A text's first token has no prediction, and is not counted."""
        model = AutoModelForCausalLM.from_pretrained(model_id).eval()
        tokenizer = AutoTokenizer.from_pretrained(model_id, padding_side="right")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        losses, counts = [], []
        for start in range(0, len(predictions), batch_size):
            texts = predictions[start : start + batch_size]
            batch = tokenizer(texts, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits  # (B, T, V)
            token_losses = cross_entropy(logits[:, :-1].mT, batch["input_ids"][:, 1:], reduction="none")  # (B, T - 1)
            counted = batch["attention_mask"][:, 1:]
            losses += (token_losses * counted).sum(1).tolist()
            counts += counted.sum(1).tolist()
        short = [number for number, count in enumerate(counts, start=1) if not count]
        if short:
            raise ValueError(f"text {short[0]} has fewer than two tokens; there is nothing to predict in it.")
        each = [perplexity(loss / count) for loss, count in zip(losses, counts, strict=True)]
        return {
            "perplexity": perplexity(sum(losses) / sum(counts)),
            "mean_perplexity": sum(each) / len(each),
            "perplexities": each,
        }
