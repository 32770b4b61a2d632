"""LLaMA: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head


def llama_configs(seed: int = 0) -> dict[str, dict]:
    """Multi-head, grouped and multi-query attention; own head width; biases; tied or not; every rope type.

    The inputs of the tests have 9 tokens, more than the length from which dynamic and longrope change.
    """
    draw = random.Random(seed)
    eight = {"rope_theta": 10000.0}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0 + 0.1 * i for i in range(4)],
        "long_factor": [1.5 + 0.5 * i for i in range(4)],
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    rows = (
        # name, heads, key/value heads, head width, own width, fields
        ("grouped", 4, 2, 8, False, {"rope_parameters": {"rope_type": "default", **eight}}),
        (
            "linear-bias-multihead",
            3,
            3,
            12,
            True,
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **eight}, "attention_bias": True},
        ),
        (
            "dynamic-multiquery-tied",
            4,
            1,
            8,
            False,
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **eight},
                "max_position_embeddings": 6,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        (
            "yarn-tied",
            6,
            3,
            6,
            True,
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 12,
                    **eight,
                },
                "max_position_embeddings": 48,
                "tie_word_embeddings": True,
            },
        ),
        ("longrope", 4, 2, 8, False, {"rope_parameters": longrope, "max_position_embeddings": 32}),
        (
            "llama3-biases",
            2,
            1,
            16,
            True,
            {"rope_parameters": llama3, "attention_bias": True, "mlp_bias": True, "max_position_embeddings": 128},
        ),
        ("no-pad-relu", 4, 4, 8, False, {"rope_parameters": None, "hidden_act": "relu"}),
    )
    configs = {}
    for name, heads, kv_heads, width, own, fields in rows:
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width if not own else heads * draw.choice([4, 7, 9]),
            "intermediate_size": draw.randint(17, 50),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
        if own:
            configs[name]["head_dim"] = width
    return configs


def llama_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first files: the rotary frequencies of every layer were saved."""
    prefix = next((p for p in ("model.", "transformer.") if any(n.startswith(p) for n in tensors)), "")
    return {**tensors, f"{prefix}layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}


CASE = Case(
    is_decoder=True,
    heads={
        "ExtLlamaModel": Head("base"),
        "ExtLlamaForCausalLM": Head("causal"),
        "ExtLlamaForSequenceClassification": Head("row"),
        "ExtLlamaForTokenClassification": Head("token"),
        "ExtLlamaForQuestionAnswering": Head("span"),
    },
    configs=llama_configs(),
    dropout={"attention_dropout": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"attention_dropout": 2.0}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "Llama-2-7b": {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        "Llama-3.2-1B": {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        "old scaling": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000},
    },
    inexpressible=(
        ({"hidden_size": 26, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12}, "hidden_size"),
    ),
    legacy_keys=llama_legacy_keys,
    depends_on_length=("dynamic-multiquery-tied", "longrope"),
    wide={"hidden_size": 96, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
