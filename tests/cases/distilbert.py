"""DistilBERT: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head


def distilbert_configs(seed: int = 0) -> dict[str, dict]:
    """Activations, tied or not, learned positions and sinusoids, odd widths, padding id zero or another."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, fields in (
        ("gelu", 3, {}),
        ("relu-untied", 2, {"activation": "relu", "tie_word_embeddings": False}),
        ("sinusoids-pad5", 3, {"sinusoidal_pos_embds": True, "pad_token_id": 5}),
        ("untied-sinusoids", 4, {"sinusoidal_pos_embds": True, "tie_word_embeddings": False, "pad_token_id": 3}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "max_position_embeddings": draw.randint(40, 60),
            "n_layers": 2,
            "n_heads": heads,
            "dim": heads * (8 if name == "gelu" else draw.choice([5, 7, 9])),
            "hidden_dim": draw.randint(17, 50),
            "pad_token_id": 0,
            "num_labels": 2 if name == "relu-untied" else 3,
            **fields,
        }
    return configs


def distilbert_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older files: with position_ids as a buffer."""
    prefix = "distilbert." if any(name.startswith("distilbert.") for name in tensors) else ""
    return {**tensors, f"{prefix}embeddings.position_ids": torch.arange(512)[None]}


CASE = Case(
    is_decoder=False,
    heads={
        "ExtDistilBertModel": Head("base"),
        "ExtDistilBertForMaskedLM": Head("masked"),
        "ExtDistilBertForSequenceClassification": Head("row"),
        "ExtDistilBertForTokenClassification": Head("token"),
        "ExtDistilBertForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
        "ExtDistilBertForMultipleChoice": Head("choice"),
    },
    configs=distilbert_configs(),
    dropout={"dropout": 0.1, "attention_dropout": 0.2, "qa_dropout": 0.3, "seq_classif_dropout": 0.25},
    nonsense=(
        ({"dim": 30, "n_heads": 4}, "dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"n_heads": 0}, "n_heads"),
        ({"n_layers": -1}, "n_layers"),
        ({"hidden_dim": 0}, "hidden_dim"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"dropout": 1.5}, "dropout"),
        ({"qa_dropout": 1.0}, "qa_dropout"),
        ({"seq_classif_dropout": -0.1}, "seq_classif_dropout"),
        ({"is_decoder": True}, "is_decoder"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "distilbert-base-uncased": {
            "activation": "gelu",
            "architectures": ["DistilBertForMaskedLM"],
            "attention_dropout": 0.1,
            "dim": 768,
            "dropout": 0.1,
            "hidden_dim": 3072,
            "initializer_range": 0.02,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "transformers_version": "4.10.0.dev0",
            "vocab_size": 30522,
        },
        "general names": {
            "model_type": "distilbert",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "integer zeros": {"model_type": "distilbert", "dropout": 0, "attention_dropout": 0, "is_decoder": False},
    },
    legacy_keys=distilbert_legacy_keys,
    adapter_targets=["q_lin", "v_lin"],
    wide={"dim": 96, "n_heads": 4, "hidden_dim": 128, "vocab_size": 211, "num_labels": 7},
)
