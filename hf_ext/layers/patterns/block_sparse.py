"""Block-sparse attention: a window, global and random blocks, in time and memory proportional to T instead of T * T.

BigBird (Zaheer et al., 2020, https://arxiv.org/abs/2007.14062, section 2 and appendix D). Tokens stand in blocks of S.
The first and the last block of a row are global: they see every key, and every query sees them. The queries of a block
between them see that block, its two neighbours, and R blocks that are drawn at random for each head.

    block  0 1 2 3 4 5 6 7        R = 1
      0    o o o o o o o o        global queries, one dense call
      1    g x x . . r . g        g global, x window, r random: 5 + R blocks of keys, gathered for each block of
      2    g x x x . . r g        queries, and attended in one call of torch's kernel
      3    g r x x x . . g
      4    g . . x x x r g
      5    g . r . x x x g
      6    g . . r . x x g
      7    o o o o o o o o

The random blocks of official checkpoints come in two kinds. In training they are drawn from a generator that is seeded
with the layer's number: always the same ones. In evaluation the official class has every random block be block 0, whose
keys so count 1 + R times. What follows is one rule: a key is seen as often as its block is listed.

Shapes: B rows, T tokens, L = n * S places of a row, n blocks of a row, N blocks of all rows, S tokens of a block,
J blocks of queries between the global ones, M = 5 + R listed blocks, H heads, D head width.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.dropped_attention import gradients, parts_of
from hf_ext.layers.packing import Packing

HIDDEN = -10000.0  # added to the score of a key that is padding; finite, for queries that see nothing else
OLD_LENGTHS = (1024, 3072, 4096)  # of the paper, for which the official class draws in another way
OLD_REACH = 1024


# --- random blocks ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def random_blocks(blocks: int, *, size: int, count: int, heads: int, seed: int, old: bool = False) -> np.ndarray:
    """The random blocks of the official class in training; those of a shorter row are the first ones.

    Args:
        blocks: n of the longest row.
        size: S.
        count: R.
        heads: H.
        seed: the layer's number.
        old: whether for `OLD_LENGTHS`.

    Returns:
        (H, n - 2, R) blocks, for those between the first and the last.
    """
    generator = np.random.RandomState(seed)  # the official class seeds numpy's global generator
    between = range(1, blocks - 1)
    if old:
        drawn = [[draw_old(generator, block, blocks, size)[:count] for block in between] for _ in range(heads)]
        return np.array(drawn, dtype=int).reshape(heads, blocks - 2, count)
    reach = 2 * count + 5  # random blocks are among the first of a row
    drawn = [[draw(generator, block, reach)[:count] for _ in range(heads)] for block in between]
    return np.array(drawn, dtype=int).reshape(blocks - 2, heads, count).swapaxes(0, 1)


@torch.library.custom_op("hf_ext::draw_blocks", mutates_args=())
def draw_blocks(blocks: int, size: int, count: int, heads: int, seed: int, old: bool) -> Tensor:
    """`random_blocks` as an operator, which a graph that is traced can hold."""
    drawn = torch.tensor(random_blocks(blocks, size=size, count=count, heads=heads, seed=seed, old=old))
    return drawn.contiguous()  # as its outline says


@draw_blocks.register_fake
def _(blocks: int, size: int, count: int, heads: int, seed: int, old: bool) -> Tensor:
    return torch.empty(heads, blocks - 2, count, dtype=torch.long)


def draw(generator: np.random.RandomState, block: int, reach: int) -> np.ndarray:
    """Blocks below `reach` in random order, without the global ones and the neighbours of `block`."""
    order = generator.permutation(np.arange(reach))
    excluded = {block - 1, block, block + 1, 0, reach - 1}
    excluded |= {reach - 2} if block == 1 else set()
    excluded |= {1} if block == reach - 2 else set()
    return order[~np.isin(order, list(excluded))]


def draw_old(generator: np.random.RandomState, block: int, blocks: int, size: int) -> np.ndarray:
    """As `draw`, by the rule for `OLD_LENGTHS`: the last block of a row may be among them."""
    between = np.arange(1, blocks - 1)
    last = OLD_REACH // size - 1 if 2 * size < OLD_REACH else blocks - 1
    if block in (1, 2):
        allowed = between[block + 1 : last]
    elif block in (blocks - 3, blocks - 2) or block - 2 > last:
        allowed = between[:last]
    elif block + 1 == last:
        allowed = between[: block - 2]
    else:
        allowed = np.concatenate([between[: block - 2], between[block + 1 : last]])
    return generator.permutation(allowed)


@dataclass(frozen=True)
class Pattern:
    """What the configuration says.

    Args:
        size: S.
        random: R.
        positions: how many positions the model has: random blocks are drawn for all of them.
    """

    size: int
    random: int
    positions: int

    @property
    def longest_dense(self) -> int:
        """Rows of at most so many tokens are attended densely: the pattern would not be sparse."""
        return (5 + 2 * self.random) * self.size

    def blocks(self, tokens: int) -> int:
        """n of a row of `tokens`, which is filled up to whole blocks."""
        return math.ceil(tokens / self.size)

    def drawn(self, blocks: int, heads: int, seed: int) -> Tensor:
        """(H, n - 2, R), as `random_blocks` for rows of n blocks."""
        old = blocks * self.size in OLD_LENGTHS
        most = self.positions // self.size if old else self.blocks(self.positions)
        drawn = draw_blocks(max(most, blocks), self.size, self.random, heads, seed, old)
        return drawn[:, : blocks - 2]


# --- the plan -----------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """Rows of the same number of blocks, side by side."""

    first: int  # block of the N
    count: int  # rows
    blocks: int  # n
    dense: bool

    @property
    def where(self) -> slice:
        """Their blocks among the N."""
        return slice(self.first, self.first + self.count * self.blocks)


class BlockSparse:
    """What the layers of one forward pass share: where the tokens stand in the blocks, and which places are padding.

    Args:
        pattern: sizes of the pattern.
        shape: (B, T); of packed tokens (1, number of tokens).
        device: of the hidden states.
        real: (B, T) bool, False at padding, which may be left, right or in between; None where nothing is padded, and
            for packed tokens.
        packing: the plan of packed tokens. Padding that was left out keeps its places; sequences that came packed are
            rows of their own, those that are short enough dense.
        explicit: whether to spell the attention out instead of calling torch's kernel.
    """

    def __init__(
        self,
        pattern: Pattern,
        shape: tuple[int, int],
        *,
        device: torch.device,
        real: Tensor | None = None,
        packing: Packing | None = None,
        explicit: bool = False,
    ) -> None:
        self.pattern, self.device, self.explicit, self.weights = pattern, device, explicit, False
        if packing is None or packing.shape is not None:
            batch, tokens = shape if packing is None else packing.shape
            lengths = [tokens] * batch
        else:
            lengths = packing.lengths
        order = sorted(range(len(lengths)), key=lambda row: (lengths[row] > pattern.longest_dense, lengths[row]))
        self.rows: list[Rows] = []
        starts, total = [0] * len(lengths), 0
        for (dense, blocks), members in itertools.groupby(
            order, key=lambda row: (lengths[row] <= pattern.longest_dense, pattern.blocks(lengths[row]))
        ):
            members = list(members)
            for i, row in enumerate(members):
                starts[row] = (total + i * blocks) * pattern.size
            self.rows.append(Rows(total, len(members), blocks, dense))
            total += len(members) * blocks
        self.total = total
        # (tokens,) place of each token; None: tokens and places are the same.
        self.places = self.find_places(lengths, starts, packing)
        # (N, S) bool, False at places without a real token; None: all are real.
        self.real: Tensor | None = None
        if packing is not None or self.places is not None or (real is not None and not real.all()):
            there = torch.ones(sum(lengths) if packing is None else sum(packing.lengths), dtype=torch.bool)
            if packing is None and real is not None:
                there = real.flatten()
            self.real = self.blocked(there.to(device))

    def show_weights(self) -> None:
        """Return the weights too, (B, H, T, T); of rows that are not packed."""
        self.explicit = self.weights = True

    def find_places(self, lengths: list[int], starts: list[int], packing: Packing | None) -> Tensor | None:
        """Place of each token among the N * S."""
        if packing is None and lengths[0] % self.pattern.size == 0:
            return None
        if packing is not None and packing.shape is not None:
            tokens = packing.shape[1]
            row, place = packing.indices // tokens, packing.indices % tokens
            return (row * self.pattern.blocks(tokens) * self.pattern.size + place).to(self.device)
        counts = torch.tensor(lengths)
        shift = torch.tensor(starts) - (counts.cumsum(0) - counts)
        return (torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)).to(self.device)

    def blocked(self, x: Tensor) -> Tensor:
        """(tokens, ...) -> (N, S, ...), zero where there is no token."""
        if self.places is not None:
            x = x.new_zeros(self.total * self.pattern.size, *x.shape[1:]).index_copy(0, self.places, x)
        return x.unflatten(0, (self.total, self.pattern.size))

    # --- which blocks are listed ----------------------------------------------------------------------------------

    def listed(self, blocks: int, heads: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """The blocks that each block between the global ones sees.

        Args:
            blocks: n.
            heads: H.
            seed: of the random blocks; None in evaluation.

        Returns:
            (H or 1, n - 2, M) blocks of the row, and (n - 2, M) numbers to add to the scores of their keys. In
            evaluation block 0 is listed once, with the logarithm of how often it counts, unless the attention is
            spelled out.
        """
        middle, random = torch.arange(1, blocks - 1)[:, None], self.pattern.random
        index = torch.cat([0 * middle, middle - 1, middle, middle + 1, 0 * middle + blocks - 1], dim=1)[None]
        bias = torch.zeros(blocks - 2, 5)
        bias[0, 1] = bias[-1, 3] = -torch.inf  # neighbours that are global, and so listed already
        if seed is not None and random:
            index = torch.cat([index.expand(heads, -1, -1), self.pattern.drawn(blocks, heads, seed)], dim=2)
        elif self.explicit:
            index = nn.functional.pad(index, (0, random))
        else:
            bias[:, 0] = math.log1p(random)
        bias = nn.functional.pad(bias, (0, index.shape[2] - 5))
        return index.to(self.device), bias.to(self.device)

    # --- attention ------------------------------------------------------------------------------------------------

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, dropout: float, seed: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of all tokens.

        Args:
            query, key, value: (B, H, T, D) each.
            dropout: of the weights of rows that are attended densely; the official class has none elsewhere.
            seed: of the random blocks, the layer's number in training; None in evaluation.

        Returns:
            (B, T, H, D), zero at padding that is computed, and the weights (B, H, T, T) if they are asked for.
        """
        shape = (query.shape[0], query.shape[2], query.shape[1], query.shape[3])
        query, key, value = (self.blocked(x.transpose(1, 2).flatten(0, 1)) for x in (query, key, value))
        outputs, weights = [], None
        for rows in self.rows:
            blocks = [x[rows.where] for x in (query, key, value)]  # (N of these rows, S, H, D)
            if rows.dense:
                mixed, _ = self.attend_rows(blocks[0], *blocks, rows, scaling=scaling, dropout=dropout)
                outputs.append(mixed.transpose(1, 2))
            else:
                mixed, weights = self.attend_sparse(*blocks, rows, scaling=scaling, seed=seed)
                outputs.append(mixed)  # (rows, L, H, D)
        outputs = [x.flatten(0, 1) for x in outputs]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # (N * S, H, D)
        if self.real is not None:
            out = out.masked_fill(~self.real.view(-1, 1, 1), 0.0)
        if self.places is not None:
            out = out.index_select(0, self.places)
        if weights is not None:
            weights = weights[:, :, : shape[1], : shape[1]]
        return out.view(shape), weights

    def kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: float) -> tuple:
        """query (n, H, Q, D), key and value (n, H, K, D), mask to add -> (n, H, Q, D), and the weights if explicit."""
        mask = None if mask is None else mask.to(query.dtype)
        if self.explicit:
            return explicit_attention(query, key, value, mask, **options)
        dropout, scaling = options["dropout"], options["scaling"]
        return scaled_dot_product_attention(query, key, value, mask, dropout, scale=scaling), None

    def attend_rows(
        self, queries: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: Rows, **options: float
    ) -> tuple[Tensor, Tensor | None]:
        """Queries of whole rows: (rows * blocks of these queries, S, H, D), the others (rows * n, S, H, D) ->
        (rows, H, Q, D) and weights (rows, H, Q, L)."""
        mask = None
        if self.real is not None:
            mask = hide(self.real[rows.where].view(rows.count, 1, 1, -1))
        queries, key, value = (
            x.unflatten(0, (rows.count, -1)).flatten(1, 2).transpose(1, 2) for x in (queries, key, value)
        )
        return self.kernel(queries, key, value, mask, **options)

    def attend_sparse(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, *, scaling: float, seed: int | None
    ) -> tuple[Tensor, Tensor | None]:
        """(rows * n, S, H, D) each -> (rows, L, H, D) and weights (rows, H, L, L)."""
        size, heads = query.shape[1:3]
        options = {"scaling": scaling, "dropout": 0.0}
        first, between, last = query.unflatten(0, (rows.count, rows.blocks)).split((1, rows.blocks - 2, 1), dim=1)
        edges = torch.cat([first, last], dim=1).flatten(0, 1)
        edges, edge_weights = self.attend_rows(edges, query, key, value, rows, **options)
        first, last = edges.transpose(1, 2).chunk(2, dim=1)  # (rows, S, H, D)

        listed, bias = self.listed(rows.blocks, heads, seed)
        start = torch.arange(rows.count, device=self.device)[:, None, None, None] * rows.blocks
        index = (listed.transpose(0, 1) + start).flatten(0, 1)  # (J, H or 1, M) blocks of these rows
        bias = bias.repeat(rows.count, 1)  # (J, M)
        queries = between.flatten(0, 1)  # (J, S, H, D)
        mask = bias[:, None, None, :, None].expand(-1, -1, -1, -1, size)
        real, kept = self.real, None
        if real is not None:
            real = real[rows.where]
            mask = mask + hide(real)[index][:, :, None]  # (J, H or 1, 1, M, S)
            asking = real.unflatten(0, (rows.count, rows.blocks))[:, 1:-1].flatten(0, 1)  # (J, S)
            if self.explicit:
                mask = mask + self.hide_from_padding(asking, index.shape[2], rows)
            else:  # blocks of padding ask nothing
                kept = asking.any(1).nonzero().squeeze(1)
                queries, index, mask = queries[kept], index[kept], mask[kept]
        arguments = (queries, key, value, index, mask.flatten(3))
        # The keys and values of all listed blocks are M times as large as the keys and values: gathered again for the
        # backward pass.
        if query.device.type == "cpu" and not self.explicit:
            mixed, weights = listed_attention(*arguments, scaling=scaling), None
        elif torch.is_grad_enabled() and not self.explicit:
            mixed, weights = checkpoint(
                self.attend_listed, *arguments, use_reentrant=False, preserve_rng_state=False, **options
            )
        else:
            mixed, weights = self.attend_listed(*arguments, **options)
        if kept is not None:
            mixed = mixed.new_zeros(len(asking), *mixed.shape[1:]).index_copy(0, kept, mixed)
        mixed = mixed.unflatten(0, (rows.count, -1)).flatten(1, 2)  # (rows, L - 2 S, H, D)
        if self.weights:
            weights = spread(weights.unflatten(0, (rows.count, -1)), edge_weights, listed)
        return torch.cat([first, mixed, last], dim=1), weights

    def attend_listed(
        self, queries: Tensor, key: Tensor, value: Tensor, index: Tensor, mask: Tensor, **options: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attention to the listed blocks: queries (J, S, H, D), key and value (N, S, H, D), index (J, H or 1, M), mask
        (J, H or 1, 1 or S, M * S) -> (J, S, H, D) and weights (J, H, S, M * S)."""
        index = by_head(index, queries.shape[2])
        key, value = (gather(x.transpose(1, 2).flatten(0, 1), index) for x in (key, value))
        mixed, weights = self.kernel(queries.transpose(1, 2), key, value, mask, **options)
        return mixed.transpose(1, 2), weights

    def hide_from_padding(self, asking: Tensor, listed: int, rows: Rows) -> Tensor:
        """What the official class hides from queries that are padding, which only shows in their weights: random
        blocks, and the neighbours where none is global. asking (J, S) -> numbers to add, (J, 1, S, M, 1)."""
        hidden = torch.zeros(rows.blocks - 2, listed, device=self.device)
        hidden[:, 5:] = 1.0
        hidden[1:-1, 1:4] = 1.0
        return (hide(asking)[..., None] * hidden.repeat(rows.count, 1)[:, None])[:, None, ..., None]


def by_head(index: Tensor, heads: int) -> Tensor:
    """index (J, H or 1, M) of N blocks -> (J, H, M) of the N * H blocks of all heads"""
    return index * heads + torch.arange(heads, device=index.device)[:, None]


def gather(x: Tensor, index: Tensor) -> Tensor:
    """x (N * H, S, D), index (J, H, M) -> (J, H, M * S, D)"""
    return x.index_select(0, index.flatten()).view(*index.shape[:2], -1, x.shape[2])


class ListedAttention(torch.autograd.Function):
    """query (J, S, H, D), key and value (N * H, S, D), index (J, H, M), mask to add (J, H or 1, 1 or S, M * S), scaling
    -> (J, S, H, D). For CPU: a few blocks of queries at a time, whose keys, values and weights stay in the cache."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: Tensor,
        mask: Tensor,
        scaling: float,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for part in parts_of(query.transpose(1, 2), mask.shape[-1]):
            inputs = query[part].transpose(1, 2), gather(key, index[part]), gather(value, index[part])
            out[part] = scaled_dot_product_attention(*inputs, mask[part], scale=scaling).transpose(1, 2)
        ctx.scaling = scaling
        ctx.save_for_backward(query, key, value, index, mask, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, index, mask, out = ctx.saved_tensors
        grad_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for part in parts_of(query.transpose(1, 2), mask.shape[-1]):
            asked, queries = (x[part].transpose(1, 2).contiguous() for x in (grad, query))
            inputs = queries * ctx.scaling, gather(key, index[part]), gather(value, index[part]), mask[part]
            found, *pieces = gradients(asked, out[part].transpose(1, 2), *inputs, scaling=ctx.scaling)
            grad_query[part] = found.transpose(1, 2)
            for whole, piece in zip((grad_key, grad_value), pieces, strict=True):
                whole.index_add_(0, index[part].flatten(), piece.view(-1, *key.shape[1:]))
        return grad_query, grad_key, grad_value, None, None, None


def listed_attention(
    queries: Tensor, key: Tensor, value: Tensor, index: Tensor, mask: Tensor, *, scaling: float
) -> Tensor:
    """As `BlockSparse.attend_listed`; (J, S, H, D)"""
    key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
    return ListedAttention.apply(queries, key, value, by_head(index, queries.shape[2]), mask.to(queries.dtype), scaling)


def hide(real: Tensor) -> Tensor:
    """bool, False at padding -> numbers to add to scores, of the same shape."""
    return torch.zeros(real.shape, device=real.device).masked_fill(~real, HIDDEN)


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, scaling: float
) -> tuple[Tensor, Tensor]:
    """query (n, H, Q, D), key and value (n, H, K, D) -> (n, H, Q, D) and weights (n, H, Q, K)."""
    scores = query @ key.transpose(2, 3) * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout)
    return weights @ value, weights


def spread(middle: Tensor, edges: Tensor, listed: Tensor) -> Tensor:
    """Weights as one matrix; of a block that is listed several times, the weights that it has once, and for queries
    that are padding those of the random blocks.

    Args:
        middle: (rows, n - 2, H, S, M * S) for the listed blocks.
        edges: (rows, H, 2 S, L) of the first and the last block's queries.
        listed: (H or 1, n - 2, M).

    Returns:
        (rows, H, L, L)
    """
    rows, between, heads, size, _ = middle.shape
    middle = middle.unflatten(-1, (-1, size)).transpose(1, 2)  # (rows, H, n - 2, S, M, S)
    index = listed[None, :, :, None, :, None].expand(middle.shape)
    full = middle.new_zeros(rows, heads, between, size, between + 2, size)
    # A neighbour that is listed in vain has weights of zero.
    full = full.scatter_reduce(4, index[..., :5, :], middle[..., :5, :], "amax")
    full = full.scatter(4, index[..., 5:, :], middle[..., 5:, :])
    full = full.flatten(4).flatten(2, 3)
    return torch.cat([edges[:, :, :size], full, edges[:, :, size:]], dim=2)


# --- the same, densely --------------------------------------------------------------------------------------------


class DenseBlockSparse:
    """The same attention with a mask, in time and memory proportional to T * T: while a graph is traced, which cannot
    depend on the length.

    Args:
        pattern: as `BlockSparse`.
        tokens: T; unknown to the graph in evaluation.
        device: of the hidden states.
        real: (B, T) bool, or None where nothing is padded.
    """

    def __init__(self, pattern: Pattern, tokens: int, *, device: torch.device, real: Tensor | None = None) -> None:
        self.pattern, self.tokens, self.device, self.real = pattern, tokens, device, real

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, dropout: float, seed: int | None
    ) -> tuple[Tensor, None]:
        """As `BlockSparse.attend`; (B, T, H, D) and no weights."""
        times, dense = self.times_seen(query.shape[1], seed)
        mask = times.log().clamp(min=HIDDEN)
        if self.real is not None:
            mask = mask + hide(self.real)[:, None, None]
        if seed is not None and self.tokens > self.pattern.longest_dense:
            dropout = 0.0
        out = scaled_dot_product_attention(query, key, value, mask.to(query.dtype), dropout, scale=scaling)
        if self.real is not None:
            out = out.masked_fill(~(self.real[:, None, :, None] | dense), 0.0)
        return out.transpose(1, 2), None

    def times_seen(self, heads: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """How often each query sees each key, (1, H or 1, T, T), and whether the row is too short to be sparse."""
        place = torch.arange(self.tokens, device=self.device)
        block = place // self.pattern.size
        last = block[-1]
        dense = place[-1] < self.pattern.longest_dense
        asking, asked = block[:, None], block[None]
        edge = (asking == 0) | (asking == last) | dense
        seen = edge | (asked == 0) | (asked == last) | ((asking - asked).abs() <= 1)
        times = seen[None, None].float()
        if seed is None:
            return times + self.pattern.random * (~edge & (asked == 0)), dense
        if self.tokens > self.pattern.longest_dense and self.pattern.random:
            blocks = self.pattern.blocks(self.tokens)
            drawn = self.pattern.drawn(blocks, heads, seed).to(self.device)
            drawn = (drawn[..., None] == torch.arange(blocks, device=self.device)).sum(2)  # (H, n - 2, n)
            drawn = nn.functional.pad(drawn, (0, 0, 1, 1))  # (H, n, n)
            for dim in (1, 2):  # of blocks to of tokens; inductor compiles no look-up by `block`
                drawn = drawn.repeat_interleave(self.pattern.size, dim).narrow(dim, 0, self.tokens)
            times = times + drawn  # (H, T, T)
        return times, dense


class BlockSparseAttentionCore(AttentionCore):
    """An attention core that goes by blocks where the mask is a plan for it, and is an ordinary one otherwise."""

    def mix(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_mask: Tensor | BlockSparse | DenseBlockSparse | None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(attention_mask, (BlockSparse, DenseBlockSparse)):
            return super().mix(query, key, value, attention_mask=attention_mask, **kwargs)
        out, weights = attention_mask.attend(
            query,
            key,
            value,
            scaling=self.scaling,
            dropout=self.attention_dropout if self.training else 0.0,
            seed=self.layer_idx if self.training else None,
        )
        return out.flatten(2), weights
