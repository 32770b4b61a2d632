"""BART: configurations, heads, and what official files look like."""

import random

import torch
from torch import Tensor

from cases.base import Case, Head, seq2seq_inputs


def bart_configs(seed: int = 5) -> dict[str, dict]:
    """Activations, scaled embeddings, tied or not, halves of unequal depth and width, other special ids."""
    draw = random.Random(seed)
    configs = {}
    for name, act, scale, tie, special in (
        ("gelu", "gelu", False, True, {}),
        ("relu-scaled", "relu", True, True, {"pad_token_id": 0, "bos_token_id": 3, "decoder_start_token_id": 4}),
        ("untied", "gelu_new", True, False, {}),
    ):
        heads = draw.choice([2, 4])
        configs[name] = {
            "vocab_size": draw.randint(45, 99),
            "d_model": 4 * heads * draw.choice([2, 3]),
            "encoder_layers": 2,
            "decoder_layers": 3 if name == "relu-scaled" else 2,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": draw.randint(17, 50),
            "decoder_ffn_dim": draw.randint(17, 50),
            "activation_function": act,
            "max_position_embeddings": draw.randint(44, 60),
            "scale_embedding": scale,
            "tie_word_embeddings": tie,
            "num_labels": 4 if name == "relu-scaled" else 3,
            **special,
        }
    return configs


def bart_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As early files: fairseq's marks of the format's version."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    marks = {f"{prefix}{half}.version": torch.tensor([3.0]) for half in ("encoder", "decoder")}
    return {**tensors, **marks}


UNUSED = (r"(model\.)?shared\.weight",)  # untied, each half has a table of its own

CASE = Case(
    is_decoder=False,
    inputs=seq2seq_inputs,
    heads={
        "ExtBartModel": Head("base", unused_when_untied=UNUSED),
        "ExtBartForConditionalGeneration": Head("seq2seq", unused_when_untied=UNUSED),
        "ExtBartForCausalLM": Head(
            "aligned",
            # The stock class makes a cache with as many layers as the encoder has.
            overrides={"is_decoder": True, "is_encoder_decoder": False, "decoder_layers": 2},
            variants={"cross": {"add_cross_attention": True}},
            without_gradient=(r"model\.decoder\.layers\.\d+\.encoder_attn.*",),
            positions_count_padding=True,
        ),
        "ExtBartForSequenceClassification": Head("row", unused_when_untied=UNUSED),
        "ExtBartForQuestionAnswering": Head("span", overrides={"num_labels": 2}, unused_when_untied=UNUSED),
    },
    configs=bart_configs(),
    dropout={"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.15, "classifier_dropout": 0.3},
    nonsense=(
        ({"d_model": 30, "encoder_attention_heads": 4}, "d_model"),
        ({"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 5}, "decoder_attention_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"encoder_attention_heads": 0}, "encoder_attention_heads"),
        ({"decoder_layers": -1}, "decoder_layers"),
        ({"encoder_ffn_dim": 0}, "encoder_ffn_dim"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"decoder_layerdrop": 1.0}, "decoder_layerdrop"),
    ),
    official_files={
        "facebook/bart-base": {
            "_name_or_path": "bart-base",
            "activation_dropout": 0.1,
            "activation_function": "gelu",
            "add_bias_logits": False,
            "add_final_layer_norm": False,
            "architectures": ["BartModel"],
            "attention_dropout": 0.1,
            "bos_token_id": 0,
            "classif_dropout": 0.1,
            "classifier_dropout": 0.0,
            "d_model": 768,
            "decoder_attention_heads": 12,
            "decoder_ffn_dim": 3072,
            "decoder_layerdrop": 0.0,
            "decoder_layers": 6,
            "decoder_start_token_id": 2,
            "dropout": 0.1,
            "early_stopping": True,
            "encoder_attention_heads": 12,
            "encoder_ffn_dim": 3072,
            "encoder_layerdrop": 0.0,
            "encoder_layers": 6,
            "eos_token_id": 2,
            "forced_bos_token_id": 0,
            "forced_eos_token_id": 2,
            "gradient_checkpointing": False,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
            "init_std": 0.02,
            "is_encoder_decoder": True,
            "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
            "max_position_embeddings": 1024,
            "model_type": "bart",
            "no_repeat_ngram_size": 3,
            "normalize_before": False,
            "normalize_embedding": True,
            "num_beams": 4,
            "num_hidden_layers": 6,
            "pad_token_id": 1,
            "scale_embedding": False,
            "task_specific_params": {"summarization": {"length_penalty": 1.0, "max_length": 128}},
            "torch_dtype": "float32",
            "transformers_version": "4.12.0.dev0",
            "use_cache": True,
            "vocab_size": 50265,
        },
        "facebook/bart-large-cnn": {
            "_num_labels": 3,
            "activation_dropout": 0.0,
            "activation_function": "gelu",
            "architectures": ["BartForConditionalGeneration"],
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "classifier_dropout": 0.0,
            "d_model": 1024,
            "decoder_attention_heads": 16,
            "decoder_ffn_dim": 4096,
            "decoder_layers": 12,
            "decoder_start_token_id": 2,
            "dropout": 0.1,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "encoder_layers": 12,
            "eos_token_id": 2,
            "extra_pos_embeddings": 2,
            "force_bos_token_to_be_generated": True,
            "forced_bos_token_id": 0,
            "length_penalty": 2.0,
            "max_length": 142,
            "max_position_embeddings": 1024,
            "min_length": 56,
            "model_type": "bart",
            "no_repeat_ngram_size": 3,
            "num_beams": 4,
            "pad_token_id": 1,
            "prefix": " ",
            "static_position_embeddings": False,
            "vocab_size": 50264,
        },
    },  # fmt: skip
    legacy_keys=bart_legacy_keys,
    wide={
        "d_model": 64,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 96,
        "vocab_size": 320,
    },
)
