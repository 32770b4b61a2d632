"""GPT-2: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head, text_inputs


def gpt2_configs(seed: int = 0) -> dict[str, dict]:
    """Activations, own inner width or not, every way to scale the scores, tied or not."""
    draw = random.Random(seed)
    rows = (
        # name, fields
        ("default", {"n_inner": None}),
        ("relu-untied-inverse", {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}),
        ("gelu-upcast", {"activation_function": "gelu", "reorder_and_upcast_attn": True, "n_inner": None}),
        ("unscaled", {"scale_attn_weights": False, "tie_word_embeddings": False}),
        (
            "upcast-inverse-unscaled",
            {
                "scale_attn_weights": False,
                "scale_attn_by_inverse_layer_idx": True,
                "reorder_and_upcast_attn": True,
                "tie_word_embeddings": True,
            },
        ),
    )
    configs = {}
    for name, fields in rows:
        heads = draw.choice([2, 3, 4])
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "n_positions": draw.randint(40, 60),
            "n_embd": heads * (8 if name == "default" else draw.choice([5, 7, 8])),
            "n_layer": draw.choice([2, 3]),
            "n_head": heads,
            "n_inner": 2 * draw.randint(8, 25) + 1,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "tie_word_embeddings": "untied" not in name,
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def gpt2_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first files: the causal mask of every layer was saved."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    masks = {"bias": torch.ones(1, 1, 8, 8).tril(), "masked_bias": torch.tensor(-1e4)}
    return {**tensors, **{f"{prefix}h.{i}.attn.{name}": x.clone() for i in range(2) for name, x in masks.items()}}


def gpt2_inputs(kind: str, config: object, padding: str = "none", **kwargs: object) -> dict[str, Tensor]:
    """Segments are words; the double heads are told which token to choose by."""
    inputs = text_inputs(kind, config, padding, **kwargs)
    ids = inputs["input_ids"]
    generator = torch.Generator().manual_seed(ids.shape[-1])
    inputs["token_type_ids"] = torch.randint(7, ids.shape, generator=generator)
    if kind == "double":
        chosen = torch.rand(ids.shape, generator=generator)
        if "attention_mask" in inputs:
            chosen = chosen * (inputs["attention_mask"] + 1e-6)  # a real token, where there is one
        inputs["mc_token_ids"] = chosen.argmax(-1)
    return inputs


_CROSS = {"cross": {"add_cross_attention": True}, "cross-upcast": {"add_cross_attention": True}}
_CROSS["cross-upcast"] |= {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}
_CROSS["cross-upcast"] |= {"n_embd": 28, "n_head": 4}  # heads that two processes can share

CASE = Case(
    is_decoder=True,
    heads={
        "ExtGPT2Model": Head("base", variants=_CROSS),
        "ExtGPT2LMHeadModel": Head("causal", variants=_CROSS),
        "ExtGPT2DoubleHeadsModel": Head(
            "double",
            variants={"summary": {"summary_activation": "tanh", "summary_first_dropout": 0}},
            without_gradient=(r"multiple_choice_head\.summary\.(weight|bias)",),
        ),
        "ExtGPT2ForSequenceClassification": Head("row"),
        "ExtGPT2ForTokenClassification": Head("token"),
        "ExtGPT2ForQuestionAnswering": Head("span"),
    },
    configs=gpt2_configs(),
    dropout={
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.15,
        "attn_pdrop": 0.2,
        "summary_first_dropout": 0.3,
        "classifier_dropout": 0.3,
    },
    nonsense=(
        ({"n_embd": 30, "n_head": 4}, "n_embd"),
        ({"hidden_size": 30, "n_head": 4}, "n_embd"),
        ({"n_head": 0}, "n_head"),
        ({"n_layer": -1}, "n_layer"),
        ({"n_inner": 0}, "n_inner"),
        ({"n_positions": 0}, "n_positions"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"resid_pdrop": 1.5}, "resid_pdrop"),
        ({"embd_pdrop": -0.1}, "embd_pdrop"),
        ({"attn_pdrop": 2.0}, "attn_pdrop"),
        ({"summary_first_dropout": 1.0}, "summary_first_dropout"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "gpt2": {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        "general names": {"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "integer zeros": {"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    },
    legacy_keys=gpt2_legacy_keys,
    wide={"n_embd": 96, "n_head": 4, "n_inner": 128, "vocab_size": 211, "num_labels": 7},
    segments_are_words=True,
    inputs=gpt2_inputs,
)
