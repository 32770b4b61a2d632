"""The blocks of the textbook Transformer (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762): attention, and four
ways to wire it with a feed-forward.

Shapes: B batch, S encoder tokens, T tokens of either half, N real encoder tokens, K keys, H query heads, G key/value
heads, D head width, C model width.
"""

from collections.abc import Callable

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ext.layers.alibi import AlibiAttentionCore
from hf_ext.layers.attention import AttentionCore, CrossAttentionCore
from hf_ext.layers.norm_placement import PostNorm, PreNorm, SandwichNorm
from hf_ext.layers.packing import CrossPacking
from hf_ext.layers.relative import BiasedAttentionCore
from hf_ext.models.transformer.configuration_transformer import ExtTransformerConfig
from hf_ext.registry import FEEDFORWARDS, NORMS

Sublayer = Callable[[Tensor], Tensor]


class ExtTransformerProjections(AttentionCore):
    """What self- and cross-attention share: sizes and the four projections."""

    def __init__(self, config: ExtTransformerConfig, layer_idx: int, *, is_causal: bool) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            is_causal=is_causal,
            dropout=config.attention_dropout,
        )
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        groups = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, heads, bias=config.bias)
        self.k_proj = nn.Linear(width, groups, bias=config.bias)
        self.v_proj = nn.Linear(width, groups, bias=config.bias)
        self.o_proj = nn.Linear(heads, width, bias=config.bias)


class ExtTransformerAttention(ExtTransformerProjections, BiasedAttentionCore, AlibiAttentionCore):
    """Self-attention. What the position scheme has for it is an argument: `rotation`, `alibi` or `position_bias`."""

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, *, position_bias: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """As `BiasedAttentionCore.mix`, or without a tensor of biases as `AlibiAttentionCore.mix`."""
        if position_bias is None:
            return AlibiAttentionCore.mix(self, query, key, value, **kwargs)
        return super().mix(query, key, value, position_bias=position_bias, **kwargs)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        return self.o_proj(mixed), weights


class ExtTransformerCrossAttention(ExtTransformerProjections, CrossAttentionCore):
    """Attention of the decoder over the encoder's output, without positions."""

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_proj(encoder_hidden_states), self.v_proj(encoder_hidden_states)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), (B, S, C) -> (B, T, C), weights (B, H, T, S) or None"""
        mixed, weights = self.attend_encoder(self.q_proj(x), encoder_hidden_states, **kwargs)
        return self.o_proj(mixed), weights


class ExtTransformerBlock(GradientCheckpointingLayer):
    """Self-attention, cross-attention where there is an encoder, feed-forward. A subclass says how they are wired."""

    norms_its_output = False
    """Whether what leaves the block is normalised, so that no norm follows the last one."""

    def __init__(self, config: ExtTransformerConfig, layer_idx: int, *, is_causal: bool, has_encoder: bool) -> None:
        super().__init__()
        self.self_attn = ExtTransformerAttention(config, layer_idx, is_causal=is_causal)
        if has_encoder:
            self.cross_attn = ExtTransformerCrossAttention(config, layer_idx, is_causal=False)
        self.feed_forward = FEEDFORWARDS[config.feedforward](
            width=config.hidden_size,
            inner_width=config.intermediate_size,
            bias=config.bias,
            dropout=config.activation_dropout,
        )

    def forward(
        self,
        x: Tensor,
        position_bias: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        *,
        encoder_attention_mask: Tensor | None = None,
        encoder_packing: CrossPacking | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """(B, T, C), biases, encoder's output (B, S, C), or (1, N, C) with `encoder_packing` -> (B, T, C)"""

        def attend(x: Tensor) -> Tensor:
            return self.self_attn(x, position_bias=position_bias, past_key_values=past_key_values, **kwargs)[0]

        def attend_encoder(x: Tensor) -> Tensor:
            return self.cross_attn(
                x,
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                packing=encoder_packing,
                past_key_values=past_key_values,
            )[0]

        return self.wire(x, attend, None if encoder_hidden_states is None else attend_encoder)

    def wire(self, x: Tensor, attend: Sublayer, attend_encoder: Sublayer | None) -> Tensor:
        """(B, T, C) and functions (B, T, C) -> (B, T, C); `attend_encoder` is None without an encoder's output."""
        raise NotImplementedError


class ExtTransformerSerialBlock(ExtTransformerBlock):
    """One sub-layer after the other, each with a residual connection of its own."""

    residual_class: type[PostNorm]

    def __init__(self, config: ExtTransformerConfig, layer_idx: int, *, is_causal: bool, has_encoder: bool) -> None:
        super().__init__(config, layer_idx, is_causal=is_causal, has_encoder=has_encoder)
        for name in ("self_attn", *(("cross_attn",) if has_encoder else ()), "feed_forward"):
            residual = self.residual_class(make_norm=lambda: norm_of(config), dropout=config.dropout)
            self.add_module(f"{name}_residual", residual)

    def wire(self, x: Tensor, attend: Sublayer, attend_encoder: Sublayer | None) -> Tensor:
        x = self.self_attn_residual(x, attend)
        if attend_encoder is not None:
            x = self.cross_attn_residual(x, attend_encoder)
        return self.feed_forward_residual(x, self.feed_forward.__call__)  # no module: accelerate would move it


class ExtTransformerPostNormBlock(ExtTransformerSerialBlock):
    """norm(x + f(x)): the paper's."""

    residual_class = PostNorm
    norms_its_output = True


class ExtTransformerPreNormBlock(ExtTransformerSerialBlock):
    """x + f(norm(x))"""

    residual_class = PreNorm


class ExtTransformerSandwichBlock(ExtTransformerSerialBlock):
    """x + norm(f(norm(x)))"""

    residual_class = SandwichNorm


class ExtTransformerParallelBlock(ExtTransformerBlock):
    """x + attention(norm(x)) + feed_forward(norm(x)), all side by side (Wang and Komatsuzaki, 2021,
    https://github.com/kingoflolz/mesh-transformer-jax)."""

    def __init__(self, config: ExtTransformerConfig, layer_idx: int, *, is_causal: bool, has_encoder: bool) -> None:
        super().__init__(config, layer_idx, is_causal=is_causal, has_encoder=has_encoder)
        self.norm = norm_of(config)
        self.dropout = nn.Dropout(config.dropout)

    def wire(self, x: Tensor, attend: Sublayer, attend_encoder: Sublayer | None) -> Tensor:
        normed = self.norm(x)
        update = attend(normed) + self.feed_forward(normed)
        if attend_encoder is not None:
            update = update + attend_encoder(normed)
        return x + self.dropout(update)


BLOCKS: dict[str, type[ExtTransformerBlock]] = {
    "post": ExtTransformerPostNormBlock,
    "pre": ExtTransformerPreNormBlock,
    "both": ExtTransformerSandwichBlock,
    "parallel": ExtTransformerParallelBlock,
}


def norm_of(config: ExtTransformerConfig) -> nn.Module:
    """The norm of the configuration's choice, (..., C) -> (..., C)."""
    return NORMS[config.norm](config.hidden_size, eps=config.norm_eps)
