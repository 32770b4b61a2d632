"""Mistral: configurations, heads, and what official files look like."""

import random

from cases.base import Case, Head
from cases.llama import llama_legacy_keys


def mistral_configs(seed: int = 0) -> dict[str, dict]:
    """Windows smaller than, as long as, and longer than the 9 tokens of the tests, and none; grouped, multi-query and
    multi-head attention; own head width; tied or not; rope types. Smaller windows are computed block by block."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, kv_heads, width, window, fields in (
        ("grouped", 4, 2, 8, 4, {}),
        ("window2-multiquery-tied", 3, 1, 6, 2, {"tie_word_embeddings": True}),
        ("full", 4, 4, 8, None, {"hidden_act": "gelu_new"}),
        ("window-longer", 2, 1, 8, 64, {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}}),
        ("window9-own-width", 4, 2, 6, 9, {"head_dim": 6, "hidden_size": 20}),
        (
            "window5-yarn",
            6,
            2,
            4,
            5,
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "intermediate_size": draw.randint(17, 50),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": draw.choice([1e-6, 1e-5]),
            "sliding_window": window,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


CASE = Case(
    is_decoder=True,
    heads={
        "ExtMistralModel": Head("base"),
        "ExtMistralForCausalLM": Head("causal"),
        "ExtMistralForSequenceClassification": Head("row"),
        "ExtMistralForTokenClassification": Head("token"),
        "ExtMistralForQuestionAnswering": Head("span"),
    },
    configs=mistral_configs(),
    dropout={"attention_dropout": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": -3}, "sliding_window"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"attention_dropout": 2.0}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"model_type": "llama"}, "llama"),
    ),
    official_files={
        "Mistral-7B-v0.1": {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        "Mistral-Nemo-Base-2407": {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 128000,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 131072,
        },
    },
    legacy_keys=llama_legacy_keys,
    reordered_dropout=dict.fromkeys(("grouped", "window2-multiquery-tied", "window5-yarn"), ("attention_dropout",)),
    wide={"hidden_size": 96, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)
