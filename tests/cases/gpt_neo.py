"""GPT-Neo: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head, text_inputs


def gpt_neo_configs(seed: int = 0) -> dict[str, dict]:
    """Alternating, all local, all global, the local layer first; windows smaller and longer than the 9 tokens of the
    tests; own inner width or not; tied or not."""
    draw = random.Random(seed)
    configs = {}
    for name, types, window, fields in (
        ("alternating", [[["global", "local"], 1]], 4, {}),
        ("local-window2-untied", [[["local"], 2]], 2, {"tie_word_embeddings": False, "activation_function": "relu"}),
        ("global", [[["global"], 2]], 3, {"intermediate_size": None}),
        ("local-first-window5", [[["local"], 1], [["global", "local"], 1]], 5, {"activation_function": "gelu"}),
        ("window-longer", [[["global", "local"], 1]], 256, {}),
    ):
        heads = draw.choice([2, 3, 4])
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "max_position_embeddings": draw.randint(40, 60),
            "hidden_size": heads * draw.choice([5, 7, 8]) if name != "alternating" else heads * 8,
            "num_layers": sum(len(kinds) * repeats for kinds, repeats in types),
            "attention_types": types,
            "num_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "window_size": window,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def gpt_neo_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the official files: the mask of every layer was saved."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    masks = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), "masked_bias": torch.tensor(-1e9)}
    return {
        **tensors,
        **{f"{prefix}h.{i}.attn.attention.{name}": x.clone() for i in range(2) for name, x in masks.items()},
    }


def gpt_neo_inputs(kind: str, config: object, padding: str = "none", **kwargs: object) -> dict[str, Tensor]:
    """Segments are words."""
    inputs = text_inputs(kind, config, padding, **kwargs)
    generator = torch.Generator().manual_seed(inputs["input_ids"].shape[-1])
    inputs["token_type_ids"] = torch.randint(7, inputs["input_ids"].shape, generator=generator)
    return inputs


CASE = Case(
    is_decoder=True,
    heads={
        "ExtGPTNeoModel": Head("base"),
        "ExtGPTNeoForCausalLM": Head("causal"),
        "ExtGPTNeoForSequenceClassification": Head("row"),
        "ExtGPTNeoForTokenClassification": Head("token"),
        "ExtGPTNeoForQuestionAnswering": Head("span"),
    },
    configs=gpt_neo_configs(),
    dropout={"resid_dropout": 0.1, "embed_dropout": 0.15, "attention_dropout": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": 3, "attention_types": [[["global", "local"], 1]]}, "attention_types"),
        ({"num_layers": 2, "attention_types": [[["global", "sparse"], 1]]}, "sparse"),
        ({"num_layers": 2, "attention_types": ["global", "local"]}, "attention_types"),
        (
            {"num_layers": 2, "attention_types": [[["global"], 2]], "attention_layers": ["local", "local"]},
            "attention_layers",
        ),
        ({"window_size": 0}, "window_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"resid_dropout": 1.5}, "resid_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"model_type": "gpt_neox"}, "gpt_neox"),
    ),
    official_files={
        "gpt-neo-125m": {
            "activation_function": "gelu_new",
            "architectures": ["GPTNeoForCausalLM"],
            "attention_dropout": 0,
            "attention_layers": ["global", "local"] * 6,
            "attention_types": [[["global", "local"], 6]],
            "bos_token_id": 50256,
            "embed_dropout": 0,
            "eos_token_id": 50256,
            "gradient_checkpointing": False,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neo",
            "num_heads": 12,
            "num_layers": 12,
            "resid_dropout": 0,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "transformers_version": "4.9.0.dev0",
            "use_cache": True,
            "vocab_size": 50257,
            "window_size": 256,
        },
        "general names": {
            "model_type": "gpt_neo",
            "hidden_size": 64,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
        },
    },
    legacy_keys=gpt_neo_legacy_keys,
    segments_are_words=True,
    own_padding={"all": ("left", "right", "holes")},
    wrong_in_stock=("static",),
    reordered_dropout=dict.fromkeys(
        ("alternating", "local-window2-untied", "local-first-window5"), ("attention_dropout",)
    ),
    wide={"hidden_size": 96, "num_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
    inputs=gpt_neo_inputs,
)
