"""mT5: T5 1.1 with a head of its own."""

import dataclasses

import transformers

from cases.t5 import CASE as T5
from cases.t5 import OfTheLibrary, ReadingTwice


class MT5Model(ReadingTwice, transformers.MT5Model):
    """mT5's bare model."""


class MT5EncoderModel(OfTheLibrary, transformers.MT5EncoderModel):
    """Passes over the decoder of a file in silence, as `T5EncoderModel` does."""

    _keys_to_ignore_on_load_unexpected = ["decoder"]


class MT5ForTokenClassification(OfTheLibrary, transformers.MT5ForTokenClassification):
    """As `MT5EncoderModel`."""

    _keys_to_ignore_on_load_unexpected = ["decoder"]


CASE = dataclasses.replace(
    T5,
    blocks_of="t5",
    heads={name.replace("T5", "MT5"): head for name, head in T5.heads.items()},
    configs={
        "gated": {
            "vocab_size": 61,
            "d_model": 24,
            "d_kv": 7,
            "d_ff": 40,
            "num_layers": 2,
            "num_heads": 2,
            "eos_token_id": 2,
        }
    },
    stock_classes={
        "ExtMT5Model": MT5Model,
        "ExtMT5EncoderModel": MT5EncoderModel,
        "ExtMT5ForTokenClassification": MT5ForTokenClassification,
    },
    stock_always_ties=True,
    nonsense=(
        ({"feed_forward_proj": "gate-gelu"}, "feed_forward_proj"),
        ({"d_kv": 0}, "d_kv"),
    ),
    official_files={
        "google/mt5-small": {
            "architectures": ["MT5ForConditionalGeneration"],
            "d_ff": 1024,
            "d_kv": 64,
            "d_model": 512,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.1,
            "eos_token_id": 1,
            "feed_forward_proj": "gated-gelu",
            "initializer_factor": 1.0,
            "is_encoder_decoder": True,
            "layer_norm_epsilon": 1e-06,
            "model_type": "mt5",
            "num_decoder_layers": 8,
            "num_heads": 6,
            "num_layers": 8,
            "pad_token_id": 0,
            "relative_attention_num_buckets": 32,
            "tie_word_embeddings": False,
            "tokenizer_class": "T5Tokenizer",
            "vocab_size": 250112,
        },
    },
)
