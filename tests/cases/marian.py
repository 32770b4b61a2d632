"""Marian: configurations, heads, and what official files look like."""

import random

from torch import Tensor

from cases.base import Case, Head, seq2seq_inputs


def marian_configs(seed: int = 7) -> dict[str, dict]:
    """One vocabulary as in OPUS-MT, whose last word is padding; one for each language; untied."""
    draw = random.Random(seed)
    configs = {}
    for name, act, share, tie in (
        ("opus", "swish", True, True),
        ("two-vocabularies", "relu", False, True),
        ("untied", "gelu", True, False),
    ):
        heads, vocabulary = draw.choice([2, 4]), draw.randint(45, 99)
        pad = vocabulary - 1 if name == "two-vocabularies" else 0
        configs[name] = {
            "vocab_size": vocabulary,
            "decoder_vocab_size": vocabulary if share else vocabulary + 6,
            "d_model": 4 * heads * draw.choice([2, 3]),
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": draw.randint(17, 50),
            "decoder_ffn_dim": draw.randint(17, 50),
            "activation_function": act,
            "max_position_embeddings": draw.randint(44, 60),
            "scale_embedding": name != "untied",
            "tie_word_embeddings": tie,
            "share_encoder_decoder_embeddings": share,
            "pad_token_id": pad,
            "decoder_start_token_id": pad,
            "eos_token_id": 2,
            "forced_eos_token_id": 2,
        }
    return configs


def marian_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As torch's own files, which hold a tied tensor under each of its names."""
    prefix = "model." if any(name.startswith("model.") for name in tensors) else ""
    words = next(x for name, x in tensors.items() if name.endswith(("shared.weight", "decoder.embed_tokens.weight")))
    copies = ["decoder.embed_tokens.weight"]
    if f"{prefix}shared.weight" in tensors:
        copies.append("encoder.embed_tokens.weight")
    old = {**tensors, **{f"{prefix}{name}": words.clone() for name in copies}}
    return {**old, "lm_head.weight": words.clone()} if prefix else old


FROZEN = (r"(model\.)?(encoder|decoder)\.embed_positions\.weight",)
UNUSED = (r"(model\.)?shared\.weight",)  # untied, each half has a table of its own

CASE = Case(
    blocks_of="bart",
    is_decoder=False,
    inputs=seq2seq_inputs,
    heads={
        "ExtMarianModel": Head("base", without_gradient=FROZEN, unused_when_untied=UNUSED),
        "ExtMarianMTModel": Head("seq2seq", without_gradient=FROZEN, unused_when_untied=UNUSED),
        "ExtMarianForCausalLM": Head(
            "aligned",
            # The stock class has a head for the words to read.
            overrides={"is_decoder": True, "is_encoder_decoder": False, "decoder_vocab_size": None},
            without_gradient=(r"model\.decoder\.layers\.\d+\.encoder_attn.*", *FROZEN),
            positions_count_padding=True,
        ),
    },
    configs=marian_configs(),
    dropout={"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.15},
    nonsense=(
        ({"d_model": 30, "encoder_attention_heads": 4}, "d_model"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"decoder_vocab_size": 7}, "decoder_vocab_size"),
        ({"decoder_attention_heads": 0}, "decoder_attention_heads"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"dropout": 1.5}, "dropout"),
    ),
    official_files={
        "Helsinki-NLP/opus-mt-en-de": {
            "_num_labels": 3,
            "activation_dropout": 0.0,
            "activation_function": "swish",
            "add_bias_logits": False,
            "add_final_layer_norm": False,
            "architectures": ["MarianMTModel"],
            "attention_dropout": 0.0,
            "bad_words_ids": [[58100]],
            "bos_token_id": 0,
            "classif_dropout": 0.0,
            "classifier_dropout": 0.0,
            "d_model": 512,
            "decoder_attention_heads": 8,
            "decoder_ffn_dim": 2048,
            "decoder_layerdrop": 0.0,
            "decoder_layers": 6,
            "decoder_start_token_id": 58100,
            "decoder_vocab_size": 58101,
            "dropout": 0.1,
            "encoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "encoder_layerdrop": 0.0,
            "encoder_layers": 6,
            "eos_token_id": 0,
            "extra_pos_embeddings": 58101,
            "forced_eos_token_id": 0,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
            "init_std": 0.02,
            "is_encoder_decoder": True,
            "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
            "max_length": 512,
            "max_position_embeddings": 512,
            "model_type": "marian",
            "normalize_before": False,
            "normalize_embedding": False,
            "num_beams": 6,
            "num_hidden_layers": 6,
            "pad_token_id": 58100,
            "scale_embedding": True,
            "share_encoder_decoder_embeddings": True,
            "static_position_embeddings": True,
            "transformers_version": "4.22.0.dev0",
            "use_cache": True,
            "vocab_size": 58101,
        },
    },  # fmt: skip
    legacy_keys=marian_legacy_keys,
    wide={
        "d_model": 64,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 96,
        "vocab_size": 320,
        "decoder_vocab_size": None,
    },
    adapter_targets=["q_proj", "v_proj"],
    decoder_needs_input=True,
    beside_text=lambda kind, encoded: {} if kind == "aligned" else {"decoder_input_ids": encoded["input_ids"]},
)
