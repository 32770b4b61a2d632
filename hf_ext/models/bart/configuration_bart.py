"""Configuration of BART (Lewis et al., 2019, https://arxiv.org/abs/1910.13461).

Official checkpoints: facebook/bart-base, facebook/bart-large-cnn, and every `model_type: bart` file.
"""

import copy
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig

# Placements of both halves, for tensor and pipeline parallelism and FSDP, and for those of the same names.
TP_PLAN = {
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "decoder.embed_tokens": "embedding_rowwise",
    **{
        f"{half}.layers.*.{name}": style
        for half, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn")))
        for name, style in (
            *((f"{attention}.{x}_proj", "colwise") for attention in attentions for x in "qkv"),
            *((f"{attention}.out_proj", "rowwise") for attention in attentions),
            ("fc1", "colwise"),
            ("fc2", "rowwise"),
        )
    },
}
FSDP_PLAN = {
    "shared": "free_full_weight",
    "encoder.layers.*": "free_full_weight",
    "decoder.layers.*": "free_full_weight",
}


@strict
class BartFamilyConfig(ExtConfig):
    """What the configurations of BART, mBART and Marian have in common; the defaults are BART-large.

    `hidden_size`, `num_attention_heads` and `num_hidden_layers` are other names for `d_model` and the encoder's sizes.
    """

    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }
    base_model_tp_plan = TP_PLAN
    base_model_fsdp_plan = FSDP_PLAN

    vocab_size: int = 50265
    max_position_embeddings: int = 1024
    encoder_layers: int = 12
    encoder_ffn_dim: int = 4096
    encoder_attention_heads: int = 16
    decoder_layers: int = 12
    decoder_ffn_dim: int = 4096
    decoder_attention_heads: int = 16
    encoder_layerdrop: float | int = 0.0
    decoder_layerdrop: float | int = 0.0
    activation_function: str = "gelu"
    d_model: int = 1024
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    init_std: float | int = 0.02
    scale_embedding: bool = False
    use_cache: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    is_encoder_decoder: bool = True
    decoder_start_token_id: int | None = 2
    forced_eos_token_id: int | list[int] | None = 2
    is_decoder: bool = False
    tie_word_embeddings: bool = True

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "BartFamilyConfig":
        """As the library's, by which caches are made: a decoder on its own has the decoder's layers and heads."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and not self.is_encoder_decoder:
            config = copy.copy(config)
            config.encoder_layers, config.encoder_attention_heads = self.decoder_layers, self.decoder_attention_heads
        return config

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "max_position_embeddings", "d_model", "encoder_ffn_dim", "decoder_ffn_dim"):
            self.require_at_least(field, 1)
        for half in ("encoder", "decoder"):
            self.require_at_least(f"{half}_layers", 0)
            self.require_at_least(f"{half}_attention_heads", 1)
            self.require_divisible("d_model", f"{half}_attention_heads")
            self.require_probability(f"{half}_layerdrop")
        for field in ("dropout", "attention_dropout", "activation_dropout"):
            self.require_probability(field)


@strict
class ExtBartConfig(BartFamilyConfig):
    """Fields and defaults of the official `bart` configuration."""

    model_type = "ext_bart"
    official_model_type = "bart"
    default_num_labels: ClassVar[int] = 3  # the classifiers were trained on sentence pairs

    classifier_dropout: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.id2label is None:
            self.num_labels = kwargs.pop("num_labels", self.default_num_labels)
        super().__post_init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """As the library's, which leaves two labels out because they are its own default."""
        content = super().to_diff_dict()
        if self.num_labels == 2 != self.default_num_labels:
            content |= {"id2label": self.id2label, "label2id": self.label2id}
        return content

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self.require_probability("classifier_dropout")
