"""Configuration of the textbook Transformer (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762).

There is no official type of this name and no stock class: files are ours only.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig
from hf_ext.registry import FEEDFORWARDS, NORMS, POSITIONS

ARCHITECTURES = ("encoder", "decoder", "encoder-decoder")
NORM_PLACEMENTS = ("post", "pre", "both", "parallel")

# Sizes and choices of papers; `ExtTransformerConfig.preset`. The defaults are transformer-base.
PRESETS: dict[str, dict[str, Any]] = {
    "transformer-base": {"label_smoothing": 0.1},
    "transformer-big": {
        "label_smoothing": 0.1,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "dropout": 0.3,
    },
    "gpt-3-small": {  # Brown et al., 2020, https://arxiv.org/abs/2005.14165, table 2.1, without sparse attention
        "architecture": "decoder",
        "norm_placement": "pre",
        "feedforward": "gelu",
        "positions": "learned",
        "scale_embedding": False,
        "vocab_size": 50257,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "pad_token_id": None,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    # The choices of Chowdhery et al., 2022, https://arxiv.org/abs/2204.02311, in the size of GPT-3 small.
    "palm-style": {
        "architecture": "decoder",
        "norm_placement": "parallel",
        "norm": "layernorm-no-bias",
        "feedforward": "swiglu",
        "positions": "rotary",
        "bias": False,
        "dropout": 0.0,
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    },
}


@strict
class ExtTransformerConfig(ExtConfig):
    """Every choice of a Transformer as a field; the defaults are the base model of the paper.

    Args:
        architecture: "encoder", "decoder" or "encoder-decoder"; `is_encoder_decoder` and `is_decoder` follow from it.
        norm_placement: "post" (the paper's), "pre", "both" (before and after each sub-layer), or "parallel" (one norm,
            then attention and feed-forward side by side).
        norm, feedforward, positions: names in `hf_ext.registry`: NORMS, FEEDFORWARDS, POSITIONS.
        position_options: further arguments of the position scheme.
        num_hidden_layers: of the encoder, or of the only half.
        decoder_layers: of the decoder beside an encoder, default as many.
        num_key_value_heads: G, default all heads; 1 is multi-query, between is grouped-query attention.
        head_dim: D, default C / H.
        bias: whether linear layers have biases; those of norms are a choice of `norm`.
        tie_word_embeddings: one table for the encoder, the decoder and the head.
        scale_embedding: whether words are multiplied by the root of the width (section 3.4).
        dropout: on embeddings and on each sub-layer's output: the paper's.
        attention_dropout, activation_dropout: on attention weights, and inside feed-forwards.
        label_smoothing: of the language models' loss in training; in evaluation the loss is plain.
        classifier_dropout: before a classifier, default `dropout`.
    """

    model_type = "ext_transformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        f"{half}.{name}": style
        for half, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "cross_attn")))
        for name, style in (
            ("embed_tokens", "embedding_rowwise"),
            *((f"layers.*.{attention}.{x}_proj", "colwise") for attention in attentions for x in "qkv"),
            *((f"layers.*.{attention}.o_proj", "rowwise") for attention in attentions),
            ("layers.*.feed_forward.gate_proj", "colwise"),
            ("layers.*.feed_forward.up_proj", "colwise"),
            ("layers.*.feed_forward.down_proj", "rowwise"),
        )
    }
    base_model_fsdp_plan = {
        f"{half}.{name}": "free_full_weight" for half in ("encoder", "decoder") for name in ("embed_tokens", "layers.*")
    }

    architecture: str = "encoder-decoder"
    norm_placement: str = "post"
    norm: str = "layernorm"
    feedforward: str = "relu"
    positions: str = "sinusoidal"
    position_options: dict[str, Any] | None = None
    vocab_size: int = 37000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    decoder_layers: int | None = None
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 512
    bias: bool = True
    tie_word_embeddings: bool = True
    scale_embedding: bool = True
    norm_eps: float | int = 1e-5
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    label_smoothing: float | int = 0.0
    classifier_dropout: float | int | None = None
    initializer_range: float | int = 0.02
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = None
    is_decoder: bool = False

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "ExtTransformerConfig":
        """The configuration of a paper, with some fields changed.

        Args:
            name: transformer-base, transformer-big, gpt-3-small or palm-style.

        Raises:
            ValueError: there is no such preset, or the changed fields contradict the others.
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}.")
        return cls(**{**PRESETS[name], **changes})

    def __post_init__(self, **kwargs: Any) -> None:
        self.require_choice("architecture", ARCHITECTURES)
        self.is_encoder_decoder = self.architecture == "encoder-decoder"
        self.is_decoder = self.architecture == "decoder"
        if self.is_encoder_decoder:
            self.decoder_layers = self.num_hidden_layers if self.decoder_layers is None else self.decoder_layers
            if self.decoder_start_token_id is None:
                self.decoder_start_token_id = self.bos_token_id
        self.require_at_least("num_attention_heads", 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_attention_heads")
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    def require_choice(self, field: str, choices: tuple[str, ...]) -> None:
        """Raise ValueError unless the field is one of the choices."""
        if getattr(self, field) not in choices:
            raise ValueError(f"{field} must be one of {', '.join(choices)}, got {getattr(self, field)!r}.")

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self.require_choice("architecture", ARCHITECTURES)
        self.require_choice("norm_placement", NORM_PLACEMENTS)
        for field in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"):
            self.require_at_least(field, 1)
        for field in ("num_attention_heads", "num_key_value_heads", "head_dim"):
            self.require_at_least(field, 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("num_attention_heads", "num_key_value_heads")
        if self.is_encoder_decoder:
            self.require_at_least("decoder_layers", 0)
        elif self.decoder_layers is not None:
            raise ValueError(
                f"decoder_layers ({self.decoder_layers}) is for a decoder beside an encoder; with architecture="
                f"{self.architecture!r} set num_hidden_layers."
            )
        for field in ("dropout", "attention_dropout", "activation_dropout", "label_smoothing", "classifier_dropout"):
            self.require_probability(field)
        NORMS.check(self)
        FEEDFORWARDS.check(self)
        POSITIONS.check(self, self.position_options)
