"""Attention with learned biases (T5, Raffel et al., 2019, https://arxiv.org/abs/1910.10683, section 2.1).

The bias is a part of the mask: what a key is worth to a query, the smallest number where it is out of sight. It is made
once for all layers.

Shapes: B batch, Q queries, K keys, H query heads, G key/value heads, D head width.
"""

from torch import Tensor

from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.packing import Packing


class BiasedAttentionCore(AttentionCore):
    """Self-attention that takes the biases of `hf_ext.layers.positions.RelativeBuckets`."""

    def mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        position_bias: Tensor,
        packing: Packing | None = None,
        attention_mask: Tensor | None = None,
        bias_apart: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, H, Q, D), key and value (B, G, K, D) -> (B, Q, H * D), weights.

        Args:
            position_bias: (B or 1, H, Q, K), with the mask in it for "eager" and "sdpa"; for packed tokens as
                `Packing.bias_of_buckets` makes it.
            attention_mask: that of other implementations, which add the bias by themselves (`bias_apart`).
        """
        if packing is not None:
            kwargs["bucket_bias"] = position_bias
        elif bias_apart:
            kwargs["position_bias"] = position_bias
        else:
            attention_mask = position_bias
        return super().mix(query, key, value, packing=packing, attention_mask=attention_mask, **kwargs)
