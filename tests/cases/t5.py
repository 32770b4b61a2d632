"""T5: configurations, heads, and what official files look like."""

import random

import transformers
from torch import Tensor

from cases.base import Case, Head, seq2seq_inputs

ENCODER = {"is_encoder_decoder": False, "use_cache": False}


class OfTheLibrary:
    """The library initialises classes of other packages differently, these as its own."""

    @classmethod
    def is_custom_code(cls) -> bool:
        return False


class T5ForConditionalGeneration(OfTheLibrary, transformers.T5ForConditionalGeneration):
    """T5 1.1 as it is on the Hub: with a head of its own. The stock class takes one from a file, and warns, but makes
    none: its configuration turns `tie_word_embeddings: false` into true."""

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        tied = super().get_expanded_tied_weights_keys(all_submodels)
        if not self.config.scale_decoder_outputs:
            tied.pop("lm_head.weight", None)
        return tied


class ReadingTwice(OfTheLibrary):
    """Without an input of its own the decoder reads the encoder's, as under the stock heads for classification."""

    def forward(self, input_ids=None, attention_mask=None, decoder_input_ids=None, **kwargs):
        if decoder_input_ids is None and kwargs.get("decoder_inputs_embeds") is None:
            decoder_input_ids = self._shift_right(input_ids)
        return super().forward(input_ids, attention_mask, decoder_input_ids, **kwargs)


class T5Model(ReadingTwice, transformers.T5Model):
    """T5's bare model."""


def t5_configs(seed: int = 9) -> dict[str, dict]:
    """T5 1.0; 1.1 with its gated feed-forward and its own head; heads of odd width, few buckets, a deep decoder."""
    draw = random.Random(seed)
    configs = {}
    for name, width, fields in (
        ("relu", 8, {"eos_token_id": 2}),
        ("gated-untied", 6, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        (
            "odd-heads",
            5,
            {
                "feed_forward_proj": "gated-silu",
                "relative_attention_num_buckets": 6,
                "relative_attention_max_distance": 7,
                "initializer_factor": 0.5,
            },
        ),
    ):
        configs[name] = {
            "vocab_size": draw.randint(45, 99),
            "d_model": 4 * draw.randint(4, 7),
            "d_kv": width,
            "d_ff": draw.randint(17, 50),
            "num_layers": 2,
            "num_decoder_layers": 3 if name == "odd-heads" else 2,
            "num_heads": draw.choice([2, 3]),
            "decoder_start_token_id": 0,
            **fields,
        }
    return configs


def t5_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As early files: a copy of the words for each half, and a table in cross-attention that was never used."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    words = tensors[f"{prefix}shared.weight"]
    old = {f"{prefix}encoder.embed_tokens.weight": words.clone()}
    biases = f"{prefix}decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    if biases in tensors:
        old[f"{prefix}decoder.embed_tokens.weight"] = words.clone()
        unused = biases.replace("0.SelfAttention", "1.EncDecAttention")
        old[unused] = tensors[biases].clone()
    return {**tensors, **old}


CASE = Case(
    is_decoder=False,
    inputs=seq2seq_inputs,
    heads={
        "ExtT5Model": Head("base"),
        "ExtT5ForConditionalGeneration": Head("seq2seq"),
        "ExtT5EncoderModel": Head("base", overrides=ENCODER),
        "ExtT5ForSequenceClassification": Head("row"),
        "ExtT5ForTokenClassification": Head("token", overrides=ENCODER),
        "ExtT5ForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
    },
    configs=t5_configs(),
    stock_classes={"ExtT5Model": T5Model, "ExtT5ForConditionalGeneration": T5ForConditionalGeneration},
    beside_text=lambda kind, encoded: {"decoder_input_ids": encoded["input_ids"]} if kind == "seq2seq" else {},
    dropout={"dropout_rate": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"vocab_size": 0}, "vocab_size"),
        ({"d_model": 0}, "d_model"),
        ({"d_kv": 0}, "d_kv"),
        ({"d_ff": -3}, "d_ff"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_decoder_layers": -1}, "num_decoder_layers"),
        ({"feed_forward_proj": "double-gated-gelu"}, "feed_forward_proj"),
        ({"feed_forward_proj": "gate-gelu"}, "feed_forward_proj"),
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "relu"}, "dense_act_fn"),
        ({"feed_forward_proj": "relu", "is_gated_act": True}, "is_gated_act"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance"),
        ({"dropout_rate": 1.0}, "dropout_rate"),
        ({"classifier_dropout": -0.1}, "classifier_dropout"),
    ),
    official_files={
        "google-t5/t5-small": {
            "architectures": ["T5ForConditionalGeneration"],
            "d_ff": 2048,
            "d_kv": 64,
            "d_model": 512,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.1,
            "eos_token_id": 1,
            "initializer_factor": 1.0,
            "is_encoder_decoder": True,
            "layer_norm_epsilon": 1e-06,
            "model_type": "t5",
            "n_positions": 512,
            "num_heads": 8,
            "num_layers": 6,
            "output_past": True,
            "pad_token_id": 0,
            "relative_attention_num_buckets": 32,
            "task_specific_params": {"summarization": {"early_stopping": True, "prefix": "summarize: "}},
            "vocab_size": 32128,
        },
        "google/flan-t5-base": {
            "architectures": ["T5ForConditionalGeneration"],
            "classifier_dropout": 0.0,
            "d_ff": 2048,
            "d_kv": 64,
            "d_model": 768,
            "decoder_start_token_id": 0,
            "dense_act_fn": "gelu_new",
            "dropout_rate": 0.1,
            "eos_token_id": 1,
            "feed_forward_proj": "gated-gelu",
            "initializer_factor": 1.0,
            "is_encoder_decoder": True,
            "is_gated_act": True,
            "layer_norm_epsilon": 1e-06,
            "model_type": "t5",
            "n_positions": 512,
            "num_decoder_layers": 12,
            "num_heads": 12,
            "num_layers": 12,
            "output_past": True,
            "pad_token_id": 0,
            "relative_attention_max_distance": 128,
            "relative_attention_num_buckets": 32,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "transformers_version": "4.23.1",
            "use_cache": True,
            "vocab_size": 32128,
        },
    },
    read_as_written=("tie_word_embeddings",),
    always_tied=(r".*embed_tokens\.weight",),
    legacy_keys=t5_legacy_keys,
    wide={"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": 320},
)
