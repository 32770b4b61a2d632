"""Whisper: configurations, heads, and what official files look like."""

import random

from cases.base import Case, Head, speech_inputs


def whisper_configs(seed: int = 8) -> dict[str, dict]:
    """Activations, tied or not, halves of unequal depth and heads, layers summed for classification, other ids."""
    draw = random.Random(seed)
    configs = {}
    for name, act, tie, weighted in (
        ("gelu", "gelu", True, False),
        ("deep-decoder", "relu", True, True),
        ("untied", "gelu_new", False, False),
    ):
        heads = draw.choice([2, 4])
        configs[name] = {
            "vocab_size": draw.randint(45, 99),
            "num_mel_bins": draw.randint(5, 9),
            "d_model": 4 * heads * draw.choice([2, 3]),
            "encoder_layers": 2,
            "decoder_layers": 3 if name == "deep-decoder" else 2,
            "encoder_attention_heads": heads,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": draw.randint(17, 50),
            "decoder_ffn_dim": draw.randint(17, 50),
            "activation_function": act,
            "max_source_positions": draw.randint(9, 14),
            "max_target_positions": draw.randint(44, 60),
            "scale_embedding": weighted,  # which no class acts on
            "tie_word_embeddings": tie,
            "use_weighted_layer_sum": weighted,
            "classifier_proj_size": draw.randint(9, 15),
            "num_labels": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
            "begin_suppress_tokens": None,
        }
    return configs


POSITIONS = (r"(model\.)?encoder\.embed_positions\.weight",)  # sinusoids, which are not trained
OFFICIAL = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "d_model": 384,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 4,
    "dropout": 0.0,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 4,
    "eos_token_id": 50257,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 448,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "model_type": "whisper",
    "num_hidden_layers": 4,
    "num_mel_bins": 80,
    "pad_token_id": 50257,
    "scale_embedding": False,
    "torch_dtype": "float32",
    "transformers_version": "4.27.0.dev0",
    "use_cache": True,
}

CASE = Case(
    is_decoder=False,
    inputs=speech_inputs,
    heads={
        "ExtWhisperModel": Head("speech", without_gradient=POSITIONS),
        "ExtWhisperForConditionalGeneration": Head("seq2seq", without_gradient=POSITIONS),
        "ExtWhisperForCausalLM": Head(
            "aligned",
            # The stock class makes a cache with as many layers and heads as the encoder has.
            overrides={
                "is_decoder": True,
                "is_encoder_decoder": False,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
            },
            without_gradient=(r"model\.decoder\.layers\.\d+\.encoder_attn.*",),
            positions_count_padding=True,
        ),
        "ExtWhisperForAudioClassification": Head(
            "speech_row", variants={"weighted": {"use_weighted_layer_sum": True}}, without_gradient=POSITIONS
        ),
    },
    adapter_targets=["q_proj", "v_proj"],  # PEFT has no default for the type
    configs=whisper_configs(),
    dropout={"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.15},
    nonsense=(
        ({"d_model": 30, "encoder_attention_heads": 4}, "d_model"),
        ({"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 5}, "decoder_attention_heads"),
        ({"d_model": 27, "encoder_attention_heads": 3, "decoder_attention_heads": 3}, "d_model"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_mel_bins": 0}, "num_mel_bins"),
        ({"encoder_attention_heads": 0}, "encoder_attention_heads"),
        ({"decoder_layers": -1}, "decoder_layers"),
        ({"encoder_ffn_dim": 0}, "encoder_ffn_dim"),
        ({"max_source_positions": 0}, "max_source_positions"),
        ({"max_target_positions": 0}, "max_target_positions"),
        ({"classifier_proj_size": 0}, "classifier_proj_size"),
        ({"dropout": 1.5}, "dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"decoder_layerdrop": 1.0}, "decoder_layerdrop"),
        ({"mask_time_prob": 1.5}, "mask_time_prob"),
        ({"mask_feature_length": 0}, "mask_feature_length"),
        ({"apply_spec_augment": True, "mask_time_length": 3001}, "mask_time_length"),
        ({"median_filter_width": 6}, "median_filter_width"),
    ),
    official_files={
        "openai/whisper-tiny": {
            **OFFICIAL,
            "begin_suppress_tokens": [220, 50257],
            "bos_token_id": 50257,
            "decoder_start_token_id": 50258,
            "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]],
            "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, 50254, 50258, 50360, 50361, 50362],
            "vocab_size": 51865,
        },
        "openai/whisper-tiny.en": {
            **OFFICIAL,
            "apply_spec_augment": False,
            "begin_suppress_tokens": [220, 50256],
            "bos_token_id": 50257,
            "classifier_proj_size": 256,
            "decoder_start_token_id": 50257,
            "eos_token_id": 50256,
            "forced_decoder_ids": [[1, 50362]],
            "mask_feature_length": 10,
            "mask_feature_min_masks": 0,
            "mask_feature_prob": 0.0,
            "mask_time_length": 10,
            "mask_time_min_masks": 2,
            "mask_time_prob": 0.05,
            "median_filter_width": 7,
            "pad_token_id": 50256,
            "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, 50253, 50257, 50357, 50358, 50359, 50360, 50361],
            "use_weighted_layer_sum": False,
            "vocab_size": 51864,
        },
    },
    wide={
        "d_model": 64,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 96,
        "vocab_size": 320,
        "classifier_proj_size": 48,
    },
)
