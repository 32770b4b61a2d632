"""The attention core: heads, rotation, key/value cache, kernel dispatch, packed sequences.

Scaled dot-product attention (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762):

    softmax(q k^T * scaling + mask) v

An architecture's attention class inherits the core, names its projections as its checkpoints do, and calls `attend`.

Shapes: B batch, Q queries, K keys, H query heads, G key/value heads (H = G: multi-head, G = 1: multi-query, between:
grouped-query, Ainslie et al., 2023, https://arxiv.org/abs/2305.13245), D head width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Cache, EncoderDecoderCache, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ext.layers.packing import Packing
from hf_ext.layers.positions import Rotation


def mask_scores(scores: Tensor, attention_mask: Tensor | None) -> Tensor:
    """scores (B, H, Q, K) with a mask as `eager_attention` takes it -> the same shape."""
    if attention_mask is None:
        return scores
    if attention_mask.dtype == torch.bool:
        # The smallest number and not -inf: a row that sees nothing must stay finite.
        return scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    return scores + attention_mask


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Attention spelled out, for the implementation "eager" and wherever the weights are asked for.

    Args:
        query: (B, H, Q, D); key and value: (B, G, K, D).
        attention_mask: broadcastable to (B, H, Q, K); bool, True where attended, or float, added to the scores.

    Returns:
        (B, Q, H, D) and the weights (B, H, Q, K).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    scores = mask_scores(scores, attention_mask)
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def upcast_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """As `eager_attention`, with scores and softmax in fp32 whatever the precision, under autocast too."""
    with torch.autocast(query.device.type, enabled=False):
        scores = torch.matmul(query.float() * scaling, key.float().transpose(2, 3))
        weights = mask_scores(scores, attention_mask).softmax(-1).to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


# What else the library's function looks at.
SPECIAL = frozenset(("cache", "position_bias", "softcap", "output_attentions"))


def sdpa_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The library's function for "sdpa", with a short way for one query with keys for each head, or without a mask: the
    step of decoding, where telling all the cases apart takes as long as the attention itself.

    Args:
        query: (B, H, Q, D); key and value: (B, G, K, D).
        attention_mask: as the library's mask functions make it.

    Returns:
        (B, Q, H, D) and None.
    """
    one_query = not torch.compiler.is_compiling() and query.is_cpu and query.shape[2] == 1
    grouped = query.shape[1] != key.shape[1]
    if not one_query or (grouped and attention_mask is not None) or not SPECIAL.isdisjoint(kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2), None


class AttentionCore(nn.Module):
    """What all attention layers share.

    Args:
        config: only its runtime field `_attn_implementation` is read (it changes with `set_attn_implementation`); the
            library's kernels look for it under this name.
        layer_idx: the layer's place in the cache.
        num_heads: H.
        num_kv_heads: G, default H.
        head_dim: D.
        is_causal: whether a query sees only keys at or before its own place.
        dropout: probability of dropping an attention weight in training.
        scaling: factor on the scores, default D ** -0.5.
    """

    def __init__(
        self,
        *,
        config: PreTrainedConfig,
        layer_idx: int,
        num_heads: int,
        head_dim: int,
        is_causal: bool,
        num_kv_heads: int | None = None,
        dropout: float | None = 0.0,
        scaling: float | None = None,
    ) -> None:
        super().__init__()
        self.eager_attention: Callable = eager_attention  # a subclass may spell it out differently
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = head_dim
        # Of the whole layer, by the usual names of their fields; a process of several may hold a part of them.
        self.head_counts = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads or num_heads}
        self.num_key_value_groups = num_heads // (num_kv_heads or num_heads)  # the library's kernels read this name
        self.is_causal = is_causal
        self.attention_dropout = dropout or 0.0
        self.scaling = head_dim**-0.5 if scaling is None else scaling

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, heads * D) -> (B, heads, T, D). The number of heads follows from the width: tensor parallelism
        leaves a part of them on each rank."""
        batch, tokens, width = x.shape
        if tokens == 1:  # the step of decoding, where each operation counts
            return x.view(batch, width // self.head_dim, 1, self.head_dim)
        return x.view(batch, tokens, width // self.head_dim, self.head_dim).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Attention over projected tokens: `attend_heads` after the heads are taken apart.

        Args:
            query: (B, Q, H * D); key and value: (B, Q, G * D).
        """
        return self.attend_heads(self.heads(query), self.heads(key), self.heads(value), **kwargs)

    def attend_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_mask: Tensor | None = None,
        rotation: tuple[Tensor, Tensor] | None = None,
        past_key_values: Cache | None = None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention with positions, cache and packed rows.

        Args:
            query: (B, H, Q, D); key and value: (B, G, Q, D).
            attention_mask: as the library's mask functions make it for the implementation in use.
            rotation: cos and sin of the tokens' positions, (B or 1, 1, Q, R) each, applied to queries and keys.
            past_key_values: cache; the new keys and values are added to it and all its keys are attended to.
            packing: sequence boundaries of packed tokens; replaces the mask.

        Returns:
            (B, Q, H * D), and the weights (B, H, Q, K) where the implementation has them.
        """
        if rotation is not None:
            if not isinstance(rotation, Rotation):  # a caller's own
                rotation = Rotation(*rotation)
            query, key = rotation.turn(query), rotation.turn(key)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)
        return self.mix(query, key, value, attention_mask=attention_mask, packing=packing, **kwargs)

    def mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_mask: Tensor | None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, H, Q, D), key and value (B, G, K, D) -> (B, Q, H * D), weights."""
        implementation = self.config._attn_implementation
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, self.eager_attention)
        if attention is sdpa_attention_forward:  # a user may have registered another one under this name
            attention = sdpa_attention
        dropout = self.attention_dropout if self.training else 0.0
        if packing is not None:
            is_causal = kwargs.pop("is_causal", None)
            out, weights = (
                packing.attend(
                    attention,
                    self,
                    query,
                    key,
                    value,
                    implementation=implementation,
                    is_causal=self.is_causal if is_causal is None else is_causal,
                    dropout=dropout,
                    scaling=self.scaling,
                    **kwargs,
                ),
                None,
            )
        else:
            out, weights = attention(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        return out.reshape(*out.shape[:2], -1), weights


class CrossAttentionCore(AttentionCore):
    """Queries from the decoder, keys and values from the encoder, projected once per generation.

    A subclass gives the names of its projections.
    """

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(B, K, C) -> keys and values, (B, K, G * D) each."""
        raise NotImplementedError

    def attend_encoder(
        self,
        query: Tensor,
        encoder_hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over the encoder's output, or over what the cache holds of it.

        Args:
            query: (B * n, Q, H * D): n rows, one after the other, for each of the encoder's, as in beam search.
            encoder_hidden_states: (B, K, C)
            attention_mask: as the library's mask functions make it for B rows.

        Returns:
            (B * n, Q, H * D), weights (B * n, H, Q, K).
        """
        cache = past_key_values if isinstance(past_key_values, EncoderDecoderCache) else None
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            key, value = (self.heads(x) for x in self.project_encoder(encoder_hidden_states))
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
        query = self.heads(query)
        if query.shape[0] == key.shape[0] or kwargs.get("packing") is not None:
            return self.mix(query, key, value, attention_mask=attention_mask, **kwargs)
        return self.attend_together(query, key, value, attention_mask=attention_mask, **kwargs)

    def attend_together(
        self, query: Tensor, key: Tensor, value: Tensor, *, attention_mask: Tensor | None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """The n rows that read the same text are more queries of one row: no key is repeated, and each is read once.

        Args:
            query: (B * n, H, Q, D); key and value: (B, G, K, D).
            attention_mask: (B, 1 or H, 1 or Q, K), as "sdpa" and "eager" have it.

        Returns:
            (B * n, Q, H * D), weights (B * n, H, Q, K).
        """
        rows, (together, heads, queries, width) = key.shape[0], query.shape
        query = query.unflatten(0, (rows, -1)).transpose(1, 2).reshape(rows, heads, -1, width)
        if attention_mask is not None and attention_mask.shape[2] > 1:
            attention_mask = attention_mask.repeat(1, 1, together // rows, 1)
        mixed, weights = self.mix(query, key, value, attention_mask=attention_mask, **kwargs)
        if weights is not None:
            weights = weights.unflatten(2, (-1, queries)).transpose(1, 2).reshape(together, heads, queries, -1)
        return mixed.reshape(together, queries, -1), weights
