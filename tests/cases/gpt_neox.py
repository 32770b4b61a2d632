"""GPT-NeoX: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head


def gpt_neox_configs(seed: int = 0) -> dict[str, dict]:
    """Parallel and sequential blocks, a part of each head or all of it rotated, biases, tied or not, linear rope."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, width, share, fields in (
        ("parallel", 4, 8, 0.25, {}),
        ("sequential-tied", 2, 10, 0.4, {"use_parallel_residual": False, "tie_word_embeddings": True}),
        ("whole-head-no-bias", 3, 6, 1.0, {"attention_bias": False, "hidden_act": "gelu_new"}),
        ("odd-share-linear", 2, 12, 0.25, {"rope": {"rope_type": "linear", "factor": 2.0}, "hidden_act": "relu"}),
    ):
        rope = {"rope_type": "default", "rope_theta": 10000.0, **fields.pop("rope", {})}
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "intermediate_size": draw.randint(17, 50),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "max_position_embeddings": 64,
            "layer_norm_eps": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            "rope_parameters": {**rope, "partial_rotary_factor": share},
            **fields,
        }
    return configs


def gpt_neox_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first files: causal masks and frequencies of every layer were saved."""
    prefix = "gpt_neox." if any(name.startswith("gpt_neox.") for name in tensors) else ""
    layer = f"{prefix}layers.0.attention"
    return {
        **tensors,
        f"{layer}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        f"{layer}.masked_bias": torch.tensor(-1e9),
        f"{layer}.rotary_emb.inv_freq": torch.rand(4),
    }


CASE = Case(
    is_decoder=True,
    heads={
        "ExtGPTNeoXModel": Head("base"),
        "ExtGPTNeoXForCausalLM": Head("causal"),
        "ExtGPTNeoXForSequenceClassification": Head("row"),
        "ExtGPTNeoXForTokenClassification": Head("token"),
        "ExtGPTNeoXForQuestionAnswering": Head("span"),
    },
    configs=gpt_neox_configs(),
    dropout={"attention_dropout": 0.2, "hidden_dropout": 0.1, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.0}}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ({"model_type": "llama"}, "llama"),
    ),
    official_files={
        "pythia-70m": {
            "architectures": ["GPTNeoXForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "hidden_size": 512,
            "initializer_range": 0.02,
            "intermediate_size": 2048,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 8,
            "num_hidden_layers": 6,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.24.0",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    },
    legacy_keys=gpt_neox_legacy_keys,
    stock_name=lambda name: name.replace("lm_head.", "embed_out."),
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
