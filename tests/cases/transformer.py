"""The textbook Transformer, which has no official type: configurations and heads. `tests/models/test_transformer.py`
compares what it computes with other programs, over many more combinations."""

import random

from cases.base import Case, Head, seq2seq_inputs


def transformer_configs(seed: int = 11) -> dict[str, dict]:
    """The paper's model; rotary with grouped queries, untied; biases by distance with one key head."""
    draw = random.Random(seed)
    configs = {}
    for name, choices in (
        ("paper", {}),
        (
            "rotary",
            {
                "norm_placement": "pre",
                "norm": "rmsnorm",
                "feedforward": "swiglu",
                "positions": "rotary",
                "num_key_value_heads": 2,
                "bias": False,
                "tie_word_embeddings": False,
                "scale_embedding": False,
            },
        ),
        (
            "relative",
            {
                "norm_placement": "both",
                "norm": "layernorm-no-bias",
                "feedforward": "geglu",
                "positions": "relative",
                "position_options": {"num_buckets": 8, "max_distance": 12},
                "num_key_value_heads": 1,
            },
        ),
    ):
        configs[name] = {
            "vocab_size": draw.randint(45, 99),
            "hidden_size": 4 * draw.choice([6, 10]),
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": draw.randint(17, 50),
            "max_position_embeddings": draw.randint(44, 60),
            **choices,
        }
    return configs


ENCODER = {"architecture": "encoder", "decoder_layers": None}
DECODER = {"architecture": "decoder", "decoder_layers": None, "is_decoder": True}

CASE = Case(
    is_decoder=False,
    inputs=seq2seq_inputs,
    heads={
        "ExtTransformerModel": Head("base"),
        "ExtTransformerForConditionalGeneration": Head("seq2seq"),
        "ExtTransformerForCausalLM": Head("causal", overrides=DECODER),
        "ExtTransformerForMaskedLM": Head("masked", overrides=ENCODER),
        "ExtTransformerForSequenceClassification": Head("row", overrides=ENCODER),
        "ExtTransformerForTokenClassification": Head("token", overrides=ENCODER),
    },
    configs=transformer_configs(),
    dropout={"dropout": 0.15, "attention_dropout": 0.2, "activation_dropout": 0.1},
    nonsense=(
        ({"architecture": "both"}, "encoder-decoder"),
        ({"norm_placement": "middle"}, "parallel"),
        ({"norm": "batchnorm"}, "rmsnorm"),
        ({"feedforward": "tanh"}, "swiglu"),
        ({"positions": "polar"}, "rotary"),
        ({"positions": "rotary", "position_options": {"base": 3}}, "theta"),
        ({"position_options": {"theta": 3}}, "sinusoidal"),
        ({"positions": "rotary", "hidden_size": 24}, "head_dim"),
        ({"positions": "relative", "position_options": {"num_buckets": 6}}, "num_buckets"),
        ({"positions": "relative", "position_options": {"max_distance": 16}}, "max_distance"),
        ({"hidden_size": 500}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"architecture": "decoder", "decoder_layers": 2}, "num_hidden_layers"),
        ({"decoder_layers": -1}, "decoder_layers"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"dropout": 1.0}, "dropout"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"model_type": "marian"}, "ext_transformer"),
    ),
    wide={"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 320},
    adapter_targets=["q_proj", "v_proj"],
    decoder_needs_input=True,
    beside_text=lambda kind, encoded: (
        {"decoder_input_ids": encoded["input_ids"]} if kind in ("base", "seq2seq") else {}
    ),
)
