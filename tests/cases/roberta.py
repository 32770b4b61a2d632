"""RoBERTa: configurations, heads, and what official files look like."""

import random

import torch
import transformers
from torch import Tensor

from cases.base import Case, Head


def roberta_configs(seed: int = 0) -> dict[str, dict]:
    """Activations, tied or not, one to three segments, padding ids at and above zero, odd head widths."""
    draw = random.Random(seed)
    configs = {}
    for name, act, tie, pad, segments in (
        ("gelu", "gelu", True, 1, 1),
        ("relu-untied-pad0", "relu", False, 0, 2),
        ("gelu_new-pad3", "gelu_new", True, 3, 3),
        ("untied", "gelu", False, 1, 2),
    ):
        heads = draw.choice([2, 3, 4])
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * (8 if name == "gelu" else draw.choice([5, 7, 9])),
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "hidden_act": act,
            "max_position_embeddings": draw.randint(44, 60),
            "type_vocab_size": segments,
            "layer_norm_eps": draw.choice([1e-12, 1e-6, 1e-5]),
            "pad_token_id": pad,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "tie_word_embeddings": tie,
            "num_labels": 2 if name == "untied" else 3,
        }
    return configs


class RobertaForCausalLM(transformers.RobertaForCausalLM):
    """The stock class, generating with the positions that its own forward takes: it has those from 0 on, which are the
    row of padding and the ones around it."""

    def _prepare_position_ids_for_generation(self, *args: object) -> Tensor:
        return super()._prepare_position_ids_for_generation(*args) + self.config.pad_token_id + 1


def roberta_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older files: with position_ids as a buffer."""
    prefix = "roberta." if any(name.startswith("roberta.") for name in tensors) else ""
    return {**tensors, f"{prefix}embeddings.position_ids": torch.arange(514)[None]}


_UNTIED_BIAS = (r"lm_head\.bias",)


def roberta_heads(stock: str) -> dict[str, Head]:
    """Heads of the classes whose stock names begin with `stock`."""
    return {
        f"Ext{stock}Model": Head(
            "base",
            variants={"decoder": {"is_decoder": True}, "cross": {"is_decoder": True, "add_cross_attention": True}},
        ),
        f"Ext{stock}ForMaskedLM": Head("masked", unused_when_untied=_UNTIED_BIAS),
        f"Ext{stock}ForCausalLM": Head(
            "causal",
            overrides={"is_decoder": True},
            variants={"cross": {"add_cross_attention": True}},
            unused_when_untied=_UNTIED_BIAS,
        ),
        f"Ext{stock}ForSequenceClassification": Head("row"),
        f"Ext{stock}ForMultipleChoice": Head("choice"),
        f"Ext{stock}ForTokenClassification": Head("token"),
        f"Ext{stock}ForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
    }


ROBERTA_BASE = {
    "architectures": ["RobertaForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}

CASE = Case(
    is_decoder=False,
    heads=roberta_heads("Roberta"),
    configs=roberta_configs(),
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"pad_token_id": None}, "pad_token_id must be at least 0"),
        ({"pad_token_id": -1}, "pad_token_id must be at least 0"),
        ({"max_position_embeddings": 2}, "pad_token_id + 2 (3)"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
        ({"add_cross_attention": True}, "is_decoder"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "roberta-base": ROBERTA_BASE,
        "integer zeros": {"model_type": "roberta", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
        "a decoder": {**ROBERTA_BASE, "is_decoder": True, "position_embedding_type": "absolute", "use_cache": True},
    },
    legacy_keys=roberta_legacy_keys,
    stock_classes={"ExtRobertaForCausalLM": RobertaForCausalLM},
    positions_from_ids=True,
    first_position=lambda config: config.pad_token_id + 1,
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
