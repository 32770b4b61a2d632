"""Two-sided sliding window with global tokens, in time and memory proportional to T * W instead of T * T.

Longformer (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150, section 3.1). A query sees the keys at most W / 2
places away, and the global tokens of its row wherever they stand. A global token sees the whole row, through
projections of its own.

    key    g 1 2 3 4 5 6 7 8 9      W = 4, the first token is global, blocks of S = 3 queries
    query
      g    o o o o o o o o o o      global queries: every key, with the *_global projections
      1    x x x x                  the first W / 2 queries meet W keys
      2    x x x x x
      3    x x x x x x .            the blocks: S queries meet S + W keys; which of them a query sees, the band (x and
      4    x . x x x x x            .), is the same in all blocks, and the global keys are appended to each block's own
      5    x . . x x x x x
      6    x       x x x x x
      7    x         x x x x x      the last queries: at least W / 2, and what the blocks leave over
      8    x           x x x x

All blocks are one call of torch's kernel. Their keys are overlapping views of one tensor where B is 1 and no token is
global, and else copies. A row of at most W tokens is one dense call.

The keys and values that few global queries meet are never projected. With the part W of a projection that is a head's,
a score is q (W_k x + b_k) = (q W_k) x + q b_k, and a mean of values W_v (sum of p x) + b_v (sum of p): instead of all
tokens, the queries and what they get are multiplied with W.

Shapes: B batch, T tokens, N packed tokens, H heads, D head width, C model width, W window, S queries of a block, J
blocks of a row, n rows of L places attended together (a bucket of `Packing`, or the batch), G global tokens of a row, M
of the batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.dropped_attention import dropped_attention
from hf_ext.layers.linear import is_plain_linear
from hf_ext.layers.packing import Bucket, Packing
from hf_ext.layers.patterns.sliding_window import LEAST_BLOCK, QUERIES_PER_WINDOW, overlapping


@dataclass
class Globals:
    """The global tokens of n rows: G slots a row, of which the last may be empty."""

    places: Tensor  # (n, G) place in the row; 0 in an empty slot
    numbers: Tensor | None  # (n, G) which of the M global tokens of the batch; any in an empty slot
    filled: Tensor  # (n, G) bool

    def pick(self, x: Tensor) -> Tensor:
        """What stands at the global places, (n, H, L, D) -> (n, H, G, D)"""
        return x.gather(2, self.places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


@dataclass
class Rows:
    """Rows that are attended together."""

    bucket: Bucket
    packed: bool  # False: the bucket is the batch as it stands
    is_global: Tensor | None  # (n, L) bool; None: no global token
    globals: Globals | None

    @property
    def real(self) -> Tensor | None:
        """(n, L) bool, False at padding; None where nothing is padded."""
        return self.bucket.real

    def tokens(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (n, L, ...)"""
        return self.bucket.rows(x.flatten(0, 1)) if self.packed else x

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, H, D) -> (n, H, L, D)"""
        return self.tokens(x).transpose(1, 2)

    def padding_mask(self, dtype: torch.dtype) -> Tensor | None:
        """(n, 1, 1, L) numbers to add to the scores of queries that see the whole row; None where nothing is padded."""
        if self.real is None:
            return None
        mask = torch.zeros_like(self.real, dtype=dtype).masked_fill(~self.real, torch.finfo(dtype).min)
        return mask[:, None, None]


@dataclass
class Projected:
    """What global queries meet: projected keys and values of all tokens."""

    query: Tensor  # (M, H, D); (B, T, H, D) when traced
    key: Tensor  # (B, T, H, D)
    value: Tensor  # (B, T, H, D)
    explicit: bool  # whether to spell the attention out

    def attend(self, rows: Rows, *, dropout: float, scaling: float) -> tuple[Tensor, Tensor | None]:
        """-> (n, G, H, D), and if `explicit` the weights (n, H, L, G)"""
        numbers = rows.globals.numbers
        query = (self.query if numbers is None else self.query[numbers]).transpose(1, 2)  # (n, H, G, D)
        key, value = rows.heads(self.key), rows.heads(self.value)
        attention = explicit_global if self.explicit else global_sdpa
        return attention(query, key, value, rows, dropout=dropout, scaling=scaling)


@dataclass
class Unprojected:
    """What few global queries meet: all tokens as they are."""

    query: Tensor  # (M, H, D)
    x: Tensor  # (B, T, C)
    key: nn.Linear
    value: nn.Linear

    def attend(self, rows: Rows, *, dropout: float, scaling: float) -> tuple[Tensor, None]:
        """-> (n, G, H, D)"""
        query = self.query[rows.globals.numbers].transpose(1, 2) * scaling  # (n, H, G, D)
        heads, slots, x = query.shape[1], query.shape[2], rows.tokens(self.x)  # (n, L, C)
        key, value = (layer.weight.unflatten(0, (heads, -1)) for layer in (self.key, self.value))  # (H, D, C)
        far = (query @ key).flatten(1, 2) @ x.transpose(1, 2)  # (n, H * G, L)
        shift = (query * self.key.bias.view(heads, 1, -1)).sum(-1, keepdim=True)  # of no weight, but of a gradient
        scores = far.unflatten(1, (heads, slots)) + shift
        if (mask := rows.padding_mask(scores.dtype)) is not None:
            scores = scores + mask
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(x.dtype)
        weights = nn.functional.dropout(weights, p=dropout)
        mean = (weights.flatten(1, 2) @ x).unflatten(1, (heads, slots))  # (n, H, G, C)
        bias = self.value.bias.view(heads, 1, -1) * weights.sum(-1, keepdim=True)
        return (mean @ value.transpose(1, 2) + bias).transpose(1, 2), None


class WindowGlobal:
    """What the layers of one forward pass share: the rows, their global tokens, and the masks of each window.

    Args:
        shape: (B, T); of packed tokens (1, N).
        dtype: of the hidden states.
        device: of the hidden states.
        real: (B, T) bool, False at padding, which may be left, right or in between; None where nothing is padded, and
            for packed tokens.
        is_global: (B, T) bool, True at global tokens, none of them padding; None where there are none.
        packing: sequence boundaries of packed tokens.
        explicit: whether to spell the attention out: slower, with weights, drawing dropout as the official class does.
        traced: whether a graph is being traced. It cannot depend on lengths and numbers of global tokens, so every row
            is attended densely, in time and memory proportional to T * T.
        block: S, default a quarter of the window.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        real: Tensor | None = None,
        is_global: Tensor | None = None,
        packing: Packing | None = None,
        explicit: bool = False,
        traced: bool = False,
        block: int | None = None,
    ) -> None:
        self.dtype, self.device, self.explicit, self.traced, self.block = dtype, device, explicit, traced, block
        batch, tokens = shape
        if not traced:
            real = None if real is None or real.all() else real
            is_global = None if is_global is None or not is_global.any() else is_global
        self.restore = None if packing is None else packing.restore
        whole = Bucket(0, batch, tokens, None, real, None, batch * tokens)
        self.rows: list[Rows] = []
        self.global_tokens: Tensor | None = None  # (M,) places among all tokens, in the order of the rows
        found: list[Tensor] = []
        for bucket in [whole] if packing is None else packing.buckets:
            marked = is_global
            if is_global is not None and packing is not None:
                marked = bucket.rows(is_global.flatten())
            if marked is not None and bucket.real is not None:
                marked = marked & bucket.real  # places without a token repeat one
            globals_ = None if marked is None else self.find_globals(bucket, marked, found)
            self.rows.append(Rows(bucket, packing is not None, None if globals_ is None else marked, globals_))
        self.has_globals = any(rows.globals is not None for rows in self.rows)
        if found:
            self.global_tokens = torch.cat(found)
        self.masks: dict[int, list] = {}  # by window: for each of the rows

    def find_globals(self, bucket: Bucket, marked: Tensor, found: list[Tensor]) -> Globals | None:
        """marked (n, L) -> the slots of these rows; their places among all tokens are added to `found`."""
        if self.traced:  # every token has a slot
            return Globals(torch.arange(bucket.length, device=self.device).expand(marked.shape), None, marked)
        tokens = bucket.gather
        if tokens is None:
            tokens = torch.arange(bucket.tokens, device=self.device) + bucket.start
        tokens = tokens.view(bucket.count, bucket.length)
        counts = marked.sum(1)
        slots = int(counts.max())
        if slots == 0:
            return None
        filled = torch.arange(slots, device=self.device) < counts[:, None]
        # The sort is stable: global places in their order, before all others.
        places = (~marked).to(torch.uint8).argsort(dim=1, stable=True)[:, :slots].masked_fill(~filled, 0)
        numbers = (filled.flatten().cumsum(0) - 1).view_as(filled).clamp(min=0) + sum(len(x) for x in found)
        found.append(tokens.gather(1, places)[filled])
        return Globals(places, numbers, filled)

    def has_few_globals(self, most: int) -> bool:
        """Whether no row has more than `most` global tokens. While a graph is traced nobody knows."""
        return not self.traced and all(x.globals is None or x.globals.places.shape[1] <= most for x in self.rows)

    # --- masks ----------------------------------------------------------------------------------------------------

    def masks_of(self, window: int) -> list:
        """For each of the rows, the masks of this window: one where the row is attended densely, else three."""
        if window not in self.masks:
            self.masks[window] = [self.make_masks(rows, window) for rows in self.rows]
        return self.masks[window]

    def band(self, queries: int, keys: int, offset: int, window: int) -> Tensor:
        """(queries, keys) numbers to add: 0 where key j is within W / 2 of query i, which stands at key i + offset."""
        distance = torch.arange(queries, device=self.device)[:, None] + (
            offset - torch.arange(keys, device=self.device)
        )
        # Finite, for queries that see nothing: they are padding, and what they get is thrown away.
        band = torch.zeros(distance.shape, dtype=self.dtype, device=self.device)
        return band.masked_fill(distance.abs() > window // 2, torch.finfo(self.dtype).min)

    def make_masks(self, rows: Rows, window: int) -> Tensor | list[Tensor] | None:
        least, length, half = torch.finfo(self.dtype).min, rows.bucket.length, window // 2
        hidden = None if rows.real is None else ~rows.real.to(self.device)
        if self.traced or length <= window:
            if not self.traced and length <= half + 1:  # the window holds the whole row
                if hidden is None:
                    return None
                return torch.zeros_like(hidden, dtype=self.dtype).masked_fill(hidden, least)[:, None, None]
            mask = self.band(length, length, 0, window)
            if rows.is_global is not None:
                mask = mask.masked_fill(rows.is_global[:, None, None], 0.0)
            if hidden is not None:
                mask = mask.masked_fill(hidden[:, None, None], least)
            return mask
        count, size = self.blocks(length, window)
        last = length - half - count * size
        masks = [
            self.band(half, window, 0, window),
            self.band(size, size + window, half, window),
            self.band(last, last + half, half, window),
        ]
        if rows.is_global is not None:  # seen through the appended keys, and not twice
            hidden = rows.is_global if hidden is None else hidden | rows.is_global
        if hidden is None:
            return masks
        hiddens = [
            hidden[:, :window],
            hidden[:, : window + count * size].unfold(1, size + window, size).flatten(0, 1),
            hidden[:, length - last - half :],
        ]
        masks = [mask.masked_fill(x[:, None, None], least) for mask, x in zip(masks, hiddens, strict=True)]
        if rows.globals is None:
            return masks
        empty = torch.zeros_like(rows.globals.filled, dtype=self.dtype).masked_fill(~rows.globals.filled, least)
        return [
            torch.cat([x, repeat(empty[:, None, None], len(x)).expand(-1, -1, x.shape[2], -1)], dim=-1) for x in masks
        ]

    def blocks(self, length: int, window: int) -> tuple[int, int]:
        """Number and size of the blocks of a row of `length` > W places: between the first W / 2 queries and the last
        W / 2 or more, all keys within the window exist."""
        most = self.block or max(math.ceil(window * QUERIES_PER_WINDOW), LEAST_BLOCK)
        count = math.ceil((length - window) / most)
        return count, (length - window) // count

    # --- attention ------------------------------------------------------------------------------------------------

    def attend(
        self,
        local: tuple[Tensor, Tensor, Tensor],
        whole: Projected | Unprojected | None,
        *,
        window: int,
        dropout: float,
        scaling: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention of all tokens.

        Args:
            local: queries, keys and values, (B, T, H, D) each.
            whole: what the global tokens meet, with the queries of `global_tokens`; None without any.

        Returns:
            (B, T, H, D), zero at padding that is computed. If `explicit` and not packed, the weights
            (B, H, T, G + W + 1) as the official class lays them out (first those of the global keys, then the window's;
            zero for queries that are global or padding), and those of global queries (B, H, T, G), None without any.
        """
        outputs, from_globals, weights, global_weights = [], [], None, None
        for rows, mask in zip(self.rows, self.masks_of(window), strict=True):
            query, key, value = (rows.heads(x) for x in local)  # (n, H, L, D)
            options = {"dropout": dropout, "scaling": scaling}
            if self.explicit:
                out, weights = explicit_window(query, key, value, rows, half=window // 2, **options)
            elif isinstance(mask, list):
                out = self.attend_blocks(query, key, value, mask, rows, window=window, **options)
            else:
                out = sdpa(query, key, value, mask, **options).transpose(1, 2)  # (n, L, H, D)
            if not self.explicit and rows.bucket.keep is None and rows.real is not None:
                out = out.masked_fill(~rows.real[..., None, None], 0.0)
            if rows.globals is not None:
                mixed, global_weights = whole.attend(rows, **options)
                if self.traced:
                    out = torch.where(rows.is_global[..., None, None], mixed, out)
                else:
                    from_globals.append(mixed[rows.globals.filled])
            if rows.packed:
                out = out.flatten(0, 1)
                out = out if rows.bucket.keep is None else out.index_select(0, rows.bucket.keep)
            outputs.append(out)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.restore is not None:
            out = out.index_select(0, self.restore.to(out.device))
        if from_globals:
            out = out.reshape(-1, *out.shape[-2:])
            out = out.index_copy(0, self.global_tokens, torch.cat(from_globals).to(out.dtype))
        return out.reshape(local[0].shape), weights, global_weights

    def attend_blocks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: list[Tensor],
        rows: Rows,
        *,
        window: int,
        dropout: float,
        scaling: float,
    ) -> Tensor:
        """(n, H, L, D) each, L > W -> (n, L, H, D)"""
        length, half = query.shape[2], window // 2
        count, size = self.blocks(length, window)
        start = half + count * size  # of the last queries
        pieces = [
            [query[:, :, :half], *(x[:, :, :window] for x in (key, value))],
            [
                overlapping(query[:, :, half:start], size, size),
                *(overlapping(x[:, :, : start + half], size + window, size) for x in (key, value)),
            ],
            [query[:, :, start:], *(x[:, :, start - half :] for x in (key, value))],
        ]
        if rows.globals is not None:
            far = [rows.globals.pick(x) for x in (key, value)]
            for piece in pieces:
                piece[1:] = [torch.cat([x, repeat(y, len(x))], dim=2) for x, y in zip(piece[1:], far, strict=True)]
        first, middle, last = (
            sdpa(*piece, mask, dropout=dropout, scaling=scaling).transpose(1, 2)
            for piece, mask in zip(pieces, masks, strict=True)
        )
        middle = middle.unflatten(0, (-1, count)).flatten(1, 2)  # (n, J * S, H, D)
        return torch.cat([first, middle, last], dim=1)


def repeat(x: Tensor, rows: int) -> Tensor:
    """(n, ...) -> (rows, ...): each row for each of its blocks."""
    return x if len(x) == rows else x.repeat_interleave(rows // len(x), 0)


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, scaling: float) -> Tensor:
    """torch's kernel. query (n, H, Q, D), key and value (n, H, K, D) -> (n, H, Q, D)"""
    if dropout > 0.0 and query.device.type == "cpu" and not is_tracing(query):
        return dropped_attention(query, key, value, mask, dropout=dropout, scaling=scaling)
    mask = None if mask is None else mask.to(query.dtype)
    return nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )


def global_sdpa(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, dropout: float, scaling: float
) -> tuple[Tensor, None]:
    """query (n, H, G, D), key and value (n, H, L, D) -> (n, G, H, D)"""
    mask = rows.padding_mask(query.dtype)
    return sdpa(query, key, value, mask, dropout=dropout, scaling=scaling).transpose(1, 2), None


def explicit_global(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, dropout: float, scaling: float
) -> tuple[Tensor, Tensor]:
    """query (n, H, G, D), key and value (n, H, L, D) -> (n, G, H, D) and weights (n, H, L, G)"""
    scores = query @ key.transpose(2, 3) * scaling
    least = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~rows.globals.filled[:, None, :, None], least)
    if rows.real is not None:
        scores = scores.masked_fill(~rows.real[:, None, None], least)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout)
    return (weights @ value).transpose(1, 2), weights.transpose(2, 3)


def explicit_window(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, half: int, dropout: float, scaling: float
) -> tuple[Tensor, Tensor]:
    """The window and the global keys, spelled out with blocks of W / 2 queries.

    Args:
        query, key, value: (n, H, L, D) each.
        half: W / 2.

    Returns:
        (n, L, H, D) and weights (n, H, L, G + W + 1).
    """
    length, count, slots = query.shape[2], math.ceil(query.shape[2] / half), 0
    missing, least = count * half - length, torch.finfo(query.dtype).min
    index = torch.arange(half, device=query.device)[:, None] + torch.arange(2 * half + 1, device=query.device)
    index = index.expand(*query.shape[:2], count, -1, -1)  # (n, H, J, W / 2, W + 1) of the 3 W / 2 keys of a block

    def blocks(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, 0, 0, missing)).unflatten(2, (count, half))

    def pieces(x: Tensor) -> Tensor:  # (n, H, J, D, 3 W / 2)
        return nn.functional.pad(x, (0, 0, half, half + missing)).unfold(2, 3 * half, half)

    scores = (blocks(query) @ pieces(key) * scaling).gather(-1, index)
    scores = scores.flatten(2, 3)[:, :, :length]  # (n, H, L, W + 1)
    seen = torch.ones(len(query), length, dtype=torch.bool, device=query.device) if rows.real is None else rows.real
    if rows.is_global is not None:
        seen = seen & ~rows.is_global
    seen = nn.functional.pad(seen, (half, half)).unfold(1, 2 * half + 1, 1)  # (n, L, W + 1)
    scores = scores.masked_fill(~seen[:, None], least)
    if rows.globals is not None:
        slots = rows.globals.places.shape[1]
        far = query @ rows.globals.pick(key).transpose(2, 3) * scaling
        scores = torch.cat([far.masked_fill(~rows.globals.filled[:, None, None], least), scores], dim=-1)
    # The official class has the heads after the tokens; dropout is drawn in that order.
    scores = scores.transpose(1, 2).contiguous()
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    if rows.real is not None:
        weights = weights.masked_fill(~rows.real[..., None, None], 0.0)
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout).transpose(1, 2)
    near = blocks(weights[..., slots:])
    near = near.new_zeros(*near.shape[:-1], 3 * half).scatter(-1, index, near)
    out = (near @ pieces(value).transpose(3, 4)).flatten(2, 3)[:, :, :length]
    if rows.globals is not None:
        out = out + weights[..., :slots] @ rows.globals.pick(value)
        weights = weights.masked_fill(rows.is_global[:, None, :, None], 0.0)
    return out.transpose(1, 2), weights


class WindowGlobalAttentionCore(AttentionCore):
    """An attention core with a two-sided window and global tokens.

    Args:
        window: W, the number of keys that a query sees besides its own, half of them on each side.
    """

    def __init__(self, *, window: int, **kwargs: object) -> None:
        super().__init__(is_causal=False, **kwargs)
        self.window = window

    def attend_window(
        self,
        x: Tensor,
        near: tuple[nn.Module, nn.Module, nn.Module],
        far: tuple[nn.Module, nn.Module, nn.Module],
        windows: WindowGlobal,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attention within the window and to global tokens, and of these to the whole row.

        Args:
            x: (B, T, C).
            near: projections of queries, keys and values, C -> H * D.
            far: those for global tokens.
            windows: the plan of this forward pass.

        Returns:
            (B, T, H * D), and the weights as `WindowGlobal.attend`.
        """

        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim))

        whole = None
        if windows.has_globals:
            query, key, value = far
            query = heads(query(x if windows.traced else x.flatten(0, 1)[windows.global_tokens]))
            # Of G queries and H heads, G * H products with the tokens take the place of C.
            few = windows.has_few_globals(self.head_dim // 2) and not windows.explicit
            if few and is_plain_linear(key) and is_plain_linear(value):
                whole = Unprojected(query, x, key, value)
            else:
                whole = Projected(query, heads(key(x)), heads(value(x)), windows.explicit)
        out, weights, global_weights = windows.attend(
            tuple(heads(projection(x)) for projection in near),
            whole,
            window=self.window,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
        )
        return out.flatten(2), weights, global_weights
