"""Configuration of Whisper (Radford et al., 2022, https://arxiv.org/abs/2212.04356).

Official checkpoints: openai/whisper-tiny, openai/whisper-large-v3, and every `model_type: whisper` file.
"""

import copy

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig

TP_PLAN = {
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


@strict
class ExtWhisperConfig(ExtConfig):
    """Fields and defaults of the official `whisper` configuration; the defaults are Whisper tiny.

    `hidden_size`, `num_attention_heads` and `num_hidden_layers` are other names for `d_model` and the encoder's sizes.
    `scale_embedding` is a field of the official files that no official class acts on.
    """

    model_type = "ext_whisper"
    official_model_type = "whisper"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "num_key_value_heads": "encoder_attention_heads",
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }
    base_model_tp_plan = TP_PLAN
    base_model_fsdp_plan = {"encoder.layers.*": "free_full_weight", "decoder.layers.*": "free_full_weight"}

    vocab_size: int = 51865
    num_mel_bins: int = 80
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    decoder_layers: int = 4
    decoder_attention_heads: int = 6
    decoder_ffn_dim: int = 1536
    encoder_ffn_dim: int = 1536
    encoder_layerdrop: float | int = 0.0
    decoder_layerdrop: float | int = 0.0
    decoder_start_token_id: int = 50257
    use_cache: bool = True
    is_encoder_decoder: bool = True
    activation_function: str = "gelu"
    d_model: int = 384
    dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    init_std: float | int = 0.02
    scale_embedding: bool = False
    max_source_positions: int = 1500
    max_target_positions: int = 448
    pad_token_id: int | None = 50256
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    suppress_tokens: list | None = None
    begin_suppress_tokens: list[int] | tuple[int, ...] | None = (220, 50256)
    use_weighted_layer_sum: bool = False
    classifier_proj_size: int = 256
    apply_spec_augment: bool = False
    mask_time_prob: float | int = 0.05
    mask_time_length: int = 10
    mask_time_min_masks: int = 2
    mask_feature_prob: float | int = 0.0
    mask_feature_length: int = 10
    mask_feature_min_masks: int = 0
    median_filter_width: int = 7
    tie_word_embeddings: bool = True

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ExtWhisperConfig":
        """As the library's, by which caches are made: a decoder on its own has the decoder's layers and heads."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and not self.is_encoder_decoder:
            config = copy.copy(config)
            config.encoder_layers, config.encoder_attention_heads = self.decoder_layers, self.decoder_attention_heads
        return config

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "num_mel_bins", "max_source_positions", "max_target_positions"):
            self.require_at_least(field, 1)
        self.require_at_least("d_model", 4)
        if self.d_model % 2:
            raise ValueError(
                f"d_model must be even, got {self.d_model}: half of the encoder's positions are sines, half cosines."
            )
        for field in ("encoder_ffn_dim", "decoder_ffn_dim", "classifier_proj_size"):
            self.require_at_least(field, 1)
        for field in ("mask_time_length", "mask_feature_length"):
            self.require_at_least(field, 1)
        for half in ("encoder", "decoder"):
            self.require_at_least(f"{half}_layers", 0)
            self.require_at_least(f"{half}_attention_heads", 1)
            self.require_divisible("d_model", f"{half}_attention_heads")
            self.require_probability(f"{half}_layerdrop")
        for field in ("dropout", "attention_dropout", "activation_dropout"):
            self.require_probability(field)
        for axis, places in (("time", 2 * self.max_source_positions), ("feature", self.num_mel_bins)):
            share, span = getattr(self, f"mask_{axis}_prob"), getattr(self, f"mask_{axis}_length")
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"mask_{axis}_prob is a share and must lie in [0, 1], got {share}.")
            if self.apply_spec_augment and share > 0 and span > places:
                raise ValueError(f"mask_{axis}_length must be at most {places}, the places on that axis, got {span}.")
        if self.median_filter_width < 1 or self.median_filter_width % 2 == 0:
            raise ValueError(f"median_filter_width must be an odd number, got {self.median_filter_width}.")
