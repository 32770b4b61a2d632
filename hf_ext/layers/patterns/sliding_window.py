"""Causal sliding-window attention, in time and memory proportional to T * W instead of T * T.

A query sees the last W keys, its own included: 0 <= i - j < W (Mistral, Jiang et al., 2023,
https://arxiv.org/abs/2310.06825; the local layers of GPT-Neo; Longformer, Beltagy et al., 2020,
https://arxiv.org/abs/2004.05150, made the pattern known).

    key    0 1 2 3 4 5 6 7           W = 4, blocks of S = 2 queries
    query
      0    x
      1    x x                       the first W queries: causal attention, which needs no mask
      2    x x x
      3    x x x x
      4      x x x x .               the others: a block of S queries meets the S + W - 1 keys that end with its last
      5      . x x x x               one; which of them a query sees, the band (x and .), is the same in all blocks
      6          x x x x .
      7          . x x x x

All blocks are one call of torch's kernel. Their keys are overlapping views of one tensor where B is 1, and else copies,
(S + W) / S times as large as the keys. Where the window holds everything (T <= W) the causal call is all there is.

Shapes: B batch, T tokens, H heads, G key/value heads, D head width, W window, S queries of a block, N blocks of a row,
K = S + W - 1 keys of a block.
"""

import functools
import math

import torch
from torch import Tensor, nn

from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.packing import Packing

# A block of W / 4 queries meets a quarter more keys than each of them sees. Measured on CPU, W / 8 to W / 2 are within
# a fifth of each other and W takes half as long again; fewer than 32 queries do not fill the kernel's tiles.
QUERIES_PER_WINDOW = 0.25
LEAST_BLOCK = 32


class SlidingWindow:
    """What the layers of one forward pass share: the window, its band, and which keys are padding.

    Args:
        window: W.
        dtype: of the queries.
        device: of the queries.
        real: (B, T) bool, False at padding; None where nothing is padded. Padding may be left, right or in between.
        block: S, default `QUERIES_PER_WINDOW` of the window.
    """

    def __init__(
        self,
        window: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        real: Tensor | None = None,
        block: int | None = None,
    ) -> None:
        self.window = window
        self.block = block or max(math.ceil(window * QUERIES_PER_WINDOW), LEAST_BLOCK)
        distance = torch.arange(self.block, device=device)[:, None] - torch.arange(
            1 - window, self.block, device=device
        )
        # Numbers to add and not booleans: the kernel would turn those into numbers again in every layer.
        self.band = torch.zeros(distance.shape, dtype=dtype, device=device)  # (S, K)
        self.band.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
        self.first: Tensor | None = None  # (B, 1, W, W) for the first queries; None: causal
        self.others: Tensor | None = None  # (B * N, 1, S, K) for the blocks; None: the band
        if real is not None:
            causal = torch.full((window, window), -torch.inf, dtype=dtype, device=device).triu(1)
            self.first = causal.masked_fill(~real[:, None, None, :window], -torch.inf)
            count, size = self.blocks(real.shape[1])
            real = nn.functional.pad(real[:, 1:], (0, window + count * size - real.shape[1]))
            real = real.unfold(1, size + window - 1, size).flatten(0, 1)  # (B * N, K)
            self.others = self.band_of(size).masked_fill(~real[:, None, None, :], -torch.inf)

    def blocks(self, tokens: int) -> tuple[int, int]:
        """Number and size of the blocks behind the first W of `tokens` > W queries: of equal size, so that the last one
        is filled up by few queries."""
        count = math.ceil((tokens - self.window) / self.block)
        return count, math.ceil((tokens - self.window) / count)

    def band_of(self, size: int) -> Tensor:
        """The band of blocks with `size` <= S queries."""
        return self.band[:size, : size + self.window - 1]

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        *,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: object,
    ) -> tuple[Tensor, None]:
        """Attention within the window, with the signature of the library's attention functions.

        Args:
            query: (B, H, T, D); key and value: (B, G, T or more, D), the further ones being unused room of a cache.

        Returns:
            (B, T, H, D) and no weights. A query that sees nothing gets zeros.
        """
        tokens, window = query.shape[2], self.window
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and query.device.type != "cpu":  # with a mask, CUDA has no kernel for fewer key/value heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        attend = functools.partial(
            nn.functional.scaled_dot_product_attention,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        first = attend(
            *(x[:, :, :window] for x in (query, key, value)),
            attn_mask=None if self.first is None else self.first.to(query),
            is_causal=self.first is None,
        ).transpose(1, 2)  # (B, W, H, D)
        if tokens <= window:
            return first, None
        count, size = self.blocks(tokens)
        missing = window + count * size - tokens  # places that fill up the last block
        mask = self.band_of(size) if self.others is None else self.others
        others = attend(
            overlapping(query[:, :, window:], size, size, missing),
            overlapping(key[:, :, 1:], size + window - 1, size, missing),
            overlapping(value[:, :, 1:], size + window - 1, size, missing),
            attn_mask=mask.to(query),
        )  # (B * N, H, S, D)
        others = others.unflatten(0, (-1, count)).transpose(2, 3).flatten(1, 2)  # (B, N * S, H, D)
        return torch.cat([first, others[:, : tokens - window]], dim=1), None


def overlapping(x: Tensor, length: int, step: int, missing: int = 0) -> Tensor:
    """(B, H, T, D) -> (B * N, H, length, D): pieces that begin `step` apart, after `missing` zeros at the end."""
    if missing:
        x = nn.functional.pad(x, (0, 0, 0, missing))
    return x.unfold(2, length, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


class WindowAttentionCore(AttentionCore):
    """An attention core whose queries see the last `sliding_window` keys, all earlier ones where it is None.

    The architecture sets `sliding_window`; the skeleton's `sliding_mask` gives the mask. Where that is a
    `SlidingWindow`, the attention goes block by block; otherwise it is the library's mask, or none where the window
    holds everything or the implementation takes the window as an argument.
    """

    sliding_window: int | None = None

    def mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_mask: Tensor | SlidingWindow | None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, SlidingWindow):
            dropout = self.attention_dropout if self.training else 0.0
            options = {"dropout": dropout, "scaling": self.scaling}
            if packing is None:
                mixed, _ = attention_mask.attention(self, query, key, value, **options)
            else:
                mixed = packing.attend(
                    attention_mask.attention,
                    self,
                    query,
                    key,
                    value,
                    implementation="sdpa",
                    is_causal=True,
                    sliding_window=self.sliding_window,
                    **options,
                )
            return mixed.flatten(2), None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4 and self.sliding_window == 1:
            # The library's cache means to keep W - 1 = 0 keys and keeps them all; the mask knows better.
            key, value = (x[:, :, x.shape[2] - attention_mask.shape[-1] :] for x in (key, value))
        return super().mix(
            query,
            key,
            value,
            attention_mask=attention_mask,
            packing=packing,
            sliding_window=self.sliding_window,
            **kwargs,
        )
