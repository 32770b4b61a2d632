"""Configuration of T5 (Raffel et al., 2019, https://arxiv.org/abs/1910.10683).

Official checkpoints: google-t5/t5-small, google/t5-v1_1-base, google/flan-t5-xl, and every `model_type: t5` file.
"""

import copy
from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig

# Placements for tensor parallelism and FSDP. Self-attention stays whole: its heads share one table of biases.
TP_PLAN = {
    "shared": "embedding_rowwise",
    "encoder.embed_tokens": "embedding_rowwise",
    "decoder.embed_tokens": "embedding_rowwise",
    **{f"decoder.block.*.layer.*.EncDecAttention.{name}": "colwise" for name in "qkv"},
    "decoder.block.*.layer.*.EncDecAttention.o": "rowwise",
    **{
        f"{half}.block.*.layer.*.DenseReluDense.{name}": style
        for half in ("encoder", "decoder")
        for name, style in (("wi", "colwise"), ("wi_0", "colwise"), ("wi_1", "colwise"), ("wo", "rowwise"))
    },
}
FSDP_PLAN = {
    "shared": "free_full_weight",
    **{
        f"{half}.{name}": "free_full_weight"
        for half in ("encoder", "decoder")
        for name in ("block.*", "block.*.layer.*.SelfAttention.relative_attention_bias")
    },
}


@strict
class ExtT5Config(ExtConfig):
    """Fields and defaults of the official `t5` configuration; the defaults are T5-small.

    Args:
        num_decoder_layers: default `num_layers`.
        feed_forward_proj: an activation of the library, or `gated-` and one. `gated-gelu` is GELU's tanh form.
        tie_word_embeddings: whether the head shares the table of words (T5 1.0), or has a matrix of its own (1.1). The
            halves share theirs in any case.

    `scale_decoder_outputs`, whether the hidden states are scaled before the head, follows from `tie_word_embeddings`
    unless it is given; `dense_act_fn` and `is_gated_act` follow from `feed_forward_proj`. Files hold all three.
    """

    model_type = "ext_t5"
    official_model_type = "t5"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }
    base_model_tp_plan = TP_PLAN
    base_model_fsdp_plan = FSDP_PLAN

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float | int = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float | int = 1.0
    feed_forward_proj: str = "relu"
    is_encoder_decoder: bool = True
    use_cache: bool = True
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    classifier_dropout: float | int = 0.0
    is_decoder: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_layers
        first, *last = self.feed_forward_proj.split("-")
        if last and (first != "gated" or len(last) > 1):
            raise ValueError(
                f"feed_forward_proj must be an activation or gated-<activation>, such as 'relu' or 'gated-gelu', got "
                f"{self.feed_forward_proj!r}."
            )
        self.is_gated_act = bool(last)
        self.dense_act_fn = "gelu_new" if last == ["gelu"] else [first, *last][-1]
        for field in ("is_gated_act", "dense_act_fn"):
            given = kwargs.pop(field, None)
            if given not in (None, getattr(self, field)):
                raise ValueError(
                    f"{field} is {given!r}, but feed_forward_proj={self.feed_forward_proj!r} means "
                    f"{getattr(self, field)!r}; leave {field} out, or correct one of the two."
                )
        self.derive_scaling(kwargs)
        super().__post_init__(**kwargs)

    def derive_scaling(self, kwargs: dict[str, Any]) -> None:
        """Set `scale_decoder_outputs`; `kwargs` are the fields of the file that are not declared."""
        given = kwargs.pop("scale_decoder_outputs", None)
        self.scale_decoder_outputs = self.tie_word_embeddings if given is None else given

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> "ExtT5Config":
        """As the library's, by which caches are made: a decoder has the decoder's layers."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if decoder and not encoder:
            config = copy.copy(config)
            config.num_layers = self.num_decoder_layers
        return config

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads"):
            self.require_at_least(field, 1)
        for field in ("num_layers", "num_decoder_layers"):
            self.require_at_least(field, 0)
        # A quarter of the buckets, for one direction of an encoder, is for near keys: each has its own.
        self.require_at_least("relative_attention_num_buckets", 4)
        exact = self.relative_attention_num_buckets // 2
        if self.relative_attention_max_distance <= exact:
            raise ValueError(
                f"relative_attention_max_distance ({self.relative_attention_max_distance}) must be larger than half "
                f"of relative_attention_num_buckets ({self.relative_attention_num_buckets}): the buckets beyond are "
                f"for distances from {exact} to it. Raise the one or lower the other."
            )
        for field in ("dropout_rate", "classifier_dropout"):
            self.require_probability(field)
