"""BLOOM: configurations, heads, and what official files look like."""

import random

from torch import Tensor

from cases.base import Case, Head


def bloom_configs(seed: int = 0) -> dict[str, dict]:
    """Numbers of heads that are a power of two and not, residuals before and behind the norm, tied or not."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, width, fields in (
        ("four-heads", 4, 8, {}),
        ("three-heads-untied", 3, 7, {"tie_word_embeddings": False}),
        ("post-layernorm", 2, 10, {"apply_residual_connection_post_layernorm": True}),
        ("six-heads-split", 6, 4, {"pretraining_tp": 2}),
        ("one-head-wide", 1, 24, {"apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "n_layer": draw.choice([2, 3]),
            "n_head": heads,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the files of a bare base model: without the prefix, or with it for the base model itself."""
    if any(name.startswith("transformer.") for name in tensors):
        return {name.removeprefix("transformer."): x for name, x in tensors.items()}
    return {f"transformer.{name}": x for name, x in tensors.items()}


CASE = Case(
    is_decoder=True,
    heads={
        "ExtBloomModel": Head("base"),
        "ExtBloomForCausalLM": Head("causal"),
        "ExtBloomForSequenceClassification": Head("row"),
        "ExtBloomForTokenClassification": Head("token"),
        "ExtBloomForQuestionAnswering": Head("span"),
    },
    configs=bloom_configs(),
    dropout={"attention_dropout": 0.2, "hidden_dropout": 0.1, "classifier_dropout": 0.3},
    nonsense=(
        ({"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ({"hidden_size": 30, "n_head": 4}, "hidden_size"),
        ({"n_embed": 30, "n_head": 4}, "hidden_size"),
        ({"n_head": 0}, "n_head"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"n_layer": -1}, "n_layer"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"model_type": "mpt"}, "mpt"),
    ),
    official_files={
        "bloom-560m": {
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
            "unk_token_id": 0,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "model_type": "bloom",
            "n_embed": 1024,
            "n_inner": None,
            "n_layer": 24,
            "num_attention_heads": 16,
            "offset_alibi": 100,
            "pretraining_tp": 1,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "transformers_version": "4.20.0",
            "use_cache": True,
            "vocab_size": 250880,
        },
        "bloom": {
            "architectures": ["BloomForCausalLM"],
            "hidden_size": 14336,
            "model_type": "bloom",
            "n_head": 112,
            "n_layer": 70,
            "pretraining_tp": 4,
            "slow_but_exact": False,
            "attention_dropout": 0,
            "hidden_dropout": 0,
        },
    },
    legacy_keys=without_prefix,
    stock_attention={"all": "eager"},
    wide={"hidden_size": 96, "n_head": 4, "vocab_size": 211, "num_labels": 7},
)
