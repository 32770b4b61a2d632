"""Falcon: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head
from cases.bloom import without_prefix


def falcon_configs(seed: int = 0) -> dict[str, dict]:
    """One, grouped and all key/value heads; rotary positions and linear biases; parallel blocks with one norm and two,
    sequential ones; biases; tied or not."""
    draw = random.Random(seed)
    new = {"new_decoder_architecture": True}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    configs = {}
    for name, heads, width, fields in (
        ("multi-query", 4, 8, {}),
        ("grouped-two-norms-untied", 6, 6, {**new, "num_kv_heads": 3, "tie_word_embeddings": False}),
        (
            "grouped-one-norm-bias",
            4,
            10,
            {**new, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True, "rope_parameters": rope},
        ),
        ("sequential-multi-head", 3, 8, {"multi_query": False, "parallel_attn": False, "activation": "relu"}),
        ("alibi", 3, 10, {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
        ("alibi-multi-query", 4, 8, {"alibi": True, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
        ("alibi-grouped", 6, 4, {**new, "alibi": True, "num_kv_heads": 2, "activation": "gelu_new"}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "ffn_hidden_size": draw.choice([17, 33, 50]),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "max_position_embeddings": 64,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def falcon_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Prefix or not, and the rotary frequencies of every layer, as they were once saved."""
    tensors = without_prefix(tensors)
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    return {**tensors, f"{prefix}h.0.self_attention.rotary.inv_freq": torch.rand(4)}


_FALCON_ALIBI = ("alibi", "alibi-multi-query", "alibi-grouped")

CASE = Case(
    is_decoder=True,
    heads={
        "ExtFalconModel": Head("base"),
        "ExtFalconForCausalLM": Head("causal"),
        "ExtFalconForSequenceClassification": Head("row"),
        "ExtFalconForTokenClassification": Head("token"),
        "ExtFalconForQuestionAnswering": Head("span"),
    },
    configs=falcon_configs(),
    dropout={"attention_dropout": 0.2, "hidden_dropout": 0.3, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"n_embed": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": 28, "num_attention_heads": 4}, "hidden_size"),
        ({"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 3, "new_decoder_architecture": True}, "num_kv"),
        ({"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "multi_query": False}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ({"num_ln_in_parallel_attn": 2}, "new_decoder_architecture"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"model_type": "bloom"}, "bloom"),
    ),
    official_files={
        "falcon-7b": {
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["FalconForCausalLM"],
            "attention_dropout": 0.0,
            "bias": False,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "hidden_dropout": 0.0,
            "hidden_size": 4544,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "falcon",
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.27.4",
            "use_cache": True,
            "vocab_size": 65024,
        },
        "falcon-40b": {
            "model_type": "falcon",
            "alibi": False,
            "bias": False,
            "hidden_size": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "parallel_attn": True,
            "vocab_size": 65024,
        },
        "falcon-11B": {
            "model_type": "falcon",
            "ff_factor": 4,
            "ffn_hidden_size": 16384,
            "hidden_size": 4096,
            "max_position_embeddings": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 32,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "num_ln_in_parallel_attn": 1,
            "rope_scaling": None,
            "rope_theta": 500042.0,
            "tie_word_embeddings": False,
        },
        "falcon-rw-1b": {
            "model_type": "falcon",
            "alibi": True,
            "bias": True,
            "hidden_size": 2048,
            "multi_query": False,
            "new_decoder_architecture": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "parallel_attn": False,
            "vocab_size": 50304,
        },
        "old name, integer zeros": {
            "model_type": "falcon",
            "n_embed": 64,
            "num_attention_heads": 4,
            "hidden_dropout": 0,
        },
    },
    legacy_keys=falcon_legacy_keys,
    # With "eager" the stock class adds linear biases twice.
    stock_attention=dict.fromkeys(_FALCON_ALIBI, "sdpa"),
    own_padding=dict.fromkeys(_FALCON_ALIBI, ("left",)),
    stock_quantises=False,  # its layers are of a class of their own
    wide={"hidden_size": 96, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": 211, "num_labels": 7},
)
