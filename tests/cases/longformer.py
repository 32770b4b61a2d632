"""Longformer: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head, text_inputs


def longformer_configs(seed: int = 0) -> dict[str, dict]:
    """One window or one per layer, narrower and wider than the inputs, padding id one or another, tied or not.

    The inputs of the tests have 12 tokens (`longformer_inputs`): a multiple of every window, as the official class pads
    its input to one and draws dropout for that padding too.
    """
    draw = random.Random(seed)
    configs = {}
    for name, window, act, tie, pad, segments in (
        ("window4", 4, "gelu", True, 1, 2),
        ("windows4-12", [4, 12], "gelu", True, 1, 1),
        ("window12-untied", 12, "relu", False, 3, 2),
        ("windows12-6-4", [12, 6, 4], "gelu_new", True, 0, 1),
    ):
        heads = draw.choice([2, 3, 4])
        head_width = draw.choice([5, 7, 8]) if name != "window4" else 8
        configs[name] = {
            "attention_window": window,
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * head_width,
            "num_hidden_layers": len(window) if isinstance(window, list) else 2,
            "num_attention_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "hidden_act": act,
            "max_position_embeddings": draw.randint(50, 60),
            "type_vocab_size": segments,
            "layer_norm_eps": draw.choice([1e-12, 1e-6, 1e-5]),
            "pad_token_id": pad,
            "tie_word_embeddings": tie,
            "num_labels": 2 if name == "window12-untied" else 3,
        }
    return configs


def longformer_inputs(
    kind: str, config: object, padding: str = "none", *, tokens: int = 12, seed: int = 0, **kwargs: int
) -> dict[str, Tensor]:
    """Text inputs with none to two global tokens in a row, on padding too. Row heads choose their own, the first token,
    but for one pattern: what only that token's own projections reach would never be trained."""
    inputs = text_inputs(kind, config, padding, tokens=tokens, seed=seed, **kwargs)
    if kind != "row" or padding == "right":
        chosen = torch.zeros_like(inputs["input_ids"])
        for row, places in enumerate(chosen.view(-1, tokens)):
            places[[[0, tokens - 2], [2 % tokens, tokens - 1], [], [0]][row % 4]] = 1
        inputs["global_attention_mask"] = chosen
    if padding == "holes":
        # Else embeddings in place of ids would have other positions: holes cannot be told from them.
        places = torch.arange(tokens) + config.pad_token_id + 1
        inputs["position_ids"] = places.expand_as(inputs["input_ids"]).clone()
    return inputs


def longformer_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older files: position_ids as a buffer."""
    prefix = "longformer." if any(name.startswith("longformer.") for name in tensors) else ""
    return {**tensors, f"{prefix}embeddings.position_ids": torch.arange(512)[None]}


CASE = Case(
    is_decoder=False,
    heads={
        "ExtLongformerModel": Head("base"),
        "ExtLongformerForMaskedLM": Head("masked", unused_when_untied=(r"lm_head\.bias",)),
        "ExtLongformerForSequenceClassification": Head("row"),
        "ExtLongformerForTokenClassification": Head("token"),
        "ExtLongformerForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
        "ExtLongformerForMultipleChoice": Head("choice"),
    },
    configs=longformer_configs(),
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    reordered_dropout=dict.fromkeys(longformer_configs(), ("attention_probs_dropout_prob",)),
    adapter_targets=["query", "value"],  # PEFT knows none for this type
    inputs=longformer_inputs,
    beside_text=lambda kind, encoded: (
        {"global_attention_mask": torch.zeros_like(encoded["input_ids"])} if kind in ("span", "choice") else {}
    ),
    nonsense=(
        ({"attention_window": 3}, "attention_window"),
        ({"attention_window": 0}, "attention_window"),
        ({"attention_window": -2}, "attention_window"),
        ({"attention_window": [4, 5], "num_hidden_layers": 2}, "attention_window"),
        ({"attention_window": [4, 4], "num_hidden_layers": 3}, "attention_window"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 2}, "max_position_embeddings"),
        ({"pad_token_id": None}, "pad_token_id"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob"),
        ({"model_type": "roberta"}, "roberta"),
    ),
    official_files={
        "longformer-base-4096": {
            "attention_mode": "longformer",
            "attention_probs_dropout_prob": 0.1,
            "attention_window": [512] * 12,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "gradient_checkpointing": False,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "ignore_attention_mask": False,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4098,
            "model_type": "longformer",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 1,
            "sep_token_id": 2,
            "type_vocab_size": 1,
            "vocab_size": 50265,
        },
        "integer zeros": {"model_type": "longformer", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    },
    legacy_keys=longformer_legacy_keys,
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
