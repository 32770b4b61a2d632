"""BERT: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head


def bert_configs(seed: int = 0) -> dict[str, dict]:
    """Activations, tied or not, one to three segments, padding id zero or another, odd head widths."""
    draw = random.Random(seed)
    configs = {}
    for name, act, tie, pad, segments in (
        ("gelu", "gelu", True, 0, 2),
        ("relu-untied", "relu", False, 3, 1),
        ("gelu_new-pad5", "gelu_new", True, 5, 3),
        ("untied", "gelu", False, 0, 2),
    ):
        heads = draw.choice([2, 3, 4])
        head_width = draw.choice([5, 7, 8]) if name != "gelu" else 8
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * head_width,
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "hidden_act": act,
            "max_position_embeddings": draw.randint(40, 60),
            "type_vocab_size": segments,
            "layer_norm_eps": draw.choice([1e-12, 1e-6, 1e-5]),
            "pad_token_id": pad,
            "tie_word_embeddings": tie,
            "num_labels": 2 if name == "relu-untied" else 3,
        }
    return configs


def bert_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As TensorFlow-era files: LayerNorm.gamma and beta, and position_ids as a buffer."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    prefix = "bert." if any(name.startswith("bert.") for name in old) else ""
    old[f"{prefix}embeddings.position_ids"] = torch.arange(512)[None]
    return old


_UNTIED_BIAS = (r"cls\.predictions\.bias",)

CASE = Case(
    is_decoder=False,
    heads={
        "ExtBertModel": Head(
            "base",
            variants={"decoder": {"is_decoder": True}, "cross": {"is_decoder": True, "add_cross_attention": True}},
        ),
        "ExtBertForPreTraining": Head("pretraining", unused_when_untied=_UNTIED_BIAS),
        "ExtBertForMaskedLM": Head("masked", unused_when_untied=_UNTIED_BIAS),
        "ExtBertLMHeadModel": Head(
            "causal",
            overrides={"is_decoder": True, "bos_token_id": 1, "eos_token_id": 2},
            variants={"cross": {"add_cross_attention": True}},
            unused_when_untied=_UNTIED_BIAS,
        ),
        "ExtBertForNextSentencePrediction": Head("next_sentence"),
        "ExtBertForSequenceClassification": Head("row"),
        "ExtBertForTokenClassification": Head("token"),
        "ExtBertForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
        "ExtBertForMultipleChoice": Head("choice"),
    },
    configs=bert_configs(),
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob"),
        ({"add_cross_attention": True}, "is_decoder"),
        ({"model_type": "llama"}, "llama"),
    ),
    official_files={
        "bert-base-uncased": {
            "architectures": ["BertForMaskedLM"],
            "attention_probs_dropout_prob": 0.1,
            "gradient_checkpointing": False,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "model_type": "bert",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "transformers_version": "4.6.0.dev0",
            "type_vocab_size": 2,
            "use_cache": True,
            "vocab_size": 30522,
        },
        "integer zeros": {"model_type": "bert", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    },
    legacy_keys=bert_legacy_keys,
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
