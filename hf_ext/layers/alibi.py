"""Attention with linear biases (ALiBi, Press et al., 2021, https://arxiv.org/abs/2108.12409).

    q k^T * scaling + slope * (index of the key)  =  [q, slope / scaling] [k, index]^T * scaling

The bias becomes a part of the dot product: a few coordinates appended to queries and keys carry it, and every kernel
works as it does without positions, in training too. A bias tensor of the size of the scores (what makes other
implementations slow: it is H x T x T, and rules out the fast kernels) does not exist.

Shapes: B batch, Q queries, K keys, H query heads, G key/value heads, D head width, E extra coordinates.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.positions import Columns

MULTIPLE = 8  # fast kernels want head widths that are multiples of it


def append(x: Tensor, columns: Tensor, width: int) -> Tensor:
    """x (B, heads, T, D) and columns broadcastable to (B, heads, T, E) -> (B, heads, T, width), zeros at the end."""
    columns = pad(columns, (0, width - x.shape[-1] - columns.shape[-1]))
    return torch.cat([x, columns.to(x.dtype).expand(*x.shape[:-1], -1)], dim=-1)


class AlibiAttentionCore(AttentionCore):
    """Self-attention that takes the biases of `hf_ext.layers.positions.Alibi`.

    A single query may have them in its mask instead (`AlibiDecoderModel.masks`). The cache holds plain keys.
    """

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, *, alibi: Columns | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, H, Q, D), key and value (B, G, K, D) -> (B, Q, H * D), weights.

        Args:
            alibi: coordinates to append to queries and keys, for all K keys; None where the mask has the bias.
        """
        if alibi is None:
            return super().mix(query, key, value, **kwargs)
        width = query.shape[-1] + alibi[0].shape[-1]
        width += -width % MULTIPLE
        query, key = append(query, alibi[0], width), append(key, alibi[1], width)
        # Kernels want values as wide as keys.
        out, weights = super().mix(query, key, pad(value, (0, width - value.shape[-1])), **kwargs)
        return out.view(*out.shape[:2], -1, width)[..., : self.head_dim].flatten(2), weights
