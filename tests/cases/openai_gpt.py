"""GPT: configurations, heads, and what official files look like."""

import functools
import random

import torch
import transformers
from torch import Tensor

from cases.base import Case, Head
from cases.gpt2 import gpt2_inputs


def openai_gpt_configs(seed: int = 0) -> dict[str, dict]:
    """Every activation, tied or not, odd head widths, one head."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, fields in (
        ("gelu", 4, {}),
        ("relu-untied", 3, {"afn": "relu", "tie_word_embeddings": False}),
        ("silu-one-head", 1, {"afn": "silu"}),
        ("swish-untied", 2, {"afn": "swish", "tie_word_embeddings": False}),
        ("pad5", 3, {"pad_token_id": 5}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "n_positions": draw.randint(40, 60),
            "n_embd": heads * (8 if name == "gelu" else draw.choice([5, 7, 9])),
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


def openai_gpt_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the official file: the causal mask of every layer was saved, and some writers saved the positions."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    masks = {f"{prefix}h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
    return {**tensors, **masks, f"{prefix}position_ids": torch.arange(8)}


class OpenAIGPTDoubleHeadsModel(transformers.OpenAIGPTDoubleHeadsModel):
    """The stock class takes ids with choices, but fails on a mask with choices: it is given one of a row each."""

    @functools.wraps(transformers.OpenAIGPTDoubleHeadsModel.forward)
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object) -> object:
        if attention_mask is not None:
            attention_mask = attention_mask.flatten(0, -2)
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


CASE = Case(
    is_decoder=True,
    heads={
        "ExtOpenAIGPTModel": Head("base"),
        "ExtOpenAIGPTLMHeadModel": Head("causal"),
        "ExtOpenAIGPTDoubleHeadsModel": Head(
            "double",
            variants={"summary": {"summary_activation": "tanh", "summary_first_dropout": 0}},
            without_gradient=(r"multiple_choice_head\.summary\.(weight|bias)",),
        ),
        "ExtOpenAIGPTForSequenceClassification": Head("row"),
    },
    configs=openai_gpt_configs(),
    dropout={"resid_pdrop": 0.1, "embd_pdrop": 0.15, "attn_pdrop": 0.2, "summary_first_dropout": 0.3},
    nonsense=(
        ({"n_embd": 30, "n_head": 4}, "n_embd"),
        ({"hidden_size": 30, "n_head": 4}, "n_embd"),
        ({"n_head": 0}, "n_head"),
        ({"n_layer": -1}, "n_layer"),
        ({"n_positions": 0}, "n_positions"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"afn": "gelu_new"}, "afn"),
        ({"afn": "tanh"}, "afn"),
        ({"resid_pdrop": 1.5}, "resid_pdrop"),
        ({"embd_pdrop": -0.1}, "embd_pdrop"),
        ({"attn_pdrop": 2.0}, "attn_pdrop"),
        ({"summary_first_dropout": 1.0}, "summary_first_dropout"),
        ({"model_type": "gpt2"}, "gpt2"),
    ),
    official_files={
        "openai-gpt": {
            "afn": "gelu",
            "architectures": ["OpenAIGPTLMHeadModel"],
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "openai-gpt",
            "n_ctx": 512,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 512,
            "n_special": 0,
            "predict_special_tokens": True,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 40478,
        },
        "general names": {
            "model_type": "openai-gpt",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "with a cache": {"model_type": "openai-gpt", "use_cache": True},
        "integer zeros": {"model_type": "openai-gpt", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    },
    legacy_keys=openai_gpt_legacy_keys,
    stock_classes={"ExtOpenAIGPTDoubleHeadsModel": OpenAIGPTDoubleHeadsModel},
    stock_keeps_cache=False,
    own_padding={"all": ("left",)},
    adapter_targets=["c_attn"],
    wide={"n_embd": 96, "n_head": 4, "vocab_size": 211, "num_labels": 7},
    segments_are_words=True,
    inputs=gpt2_inputs,
)
