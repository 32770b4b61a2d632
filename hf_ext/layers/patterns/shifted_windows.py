"""Attention inside windows of a grid, shifted in every other layer (Liu et al., 2021, https://arxiv.org/abs/2103.14030,
section 3.2).

The grid is cut into windows, and a token sees those of its own window. A shift by half a window joins what the last
layer kept apart: the grid is rolled, so that the windows stay a regular cut, and where a window then holds pieces of
opposite borders, a mask keeps these apart. All windows of all images are one call of the attention function.

Scores have a learned bias for each distance in rows and columns.

Shapes: B batch, h and w rows and columns of the grid, M windows, W side of a window, Q = W * W tokens of a window, H
heads, D head width, C model width.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hf_ext.layers.attention import AttentionCore

Size = tuple[int, int]  # rows and columns


class Windows:
    """How one grid is cut into windows: made once for all layers that cut it the same way.

    Args:
        grid: h and w. Where W does not divide them, zeros are appended below and on the right, before the shift;
            they take part in the attention, as they did in training.
        side: W.
        shift: rows and columns that the grid is rolled by, 0 for none.
        table_side: side of the windows that the biases were learned for, at least W.
        device, dtype: of the tokens.
    """

    def __init__(
        self, grid: Size, *, side: int, shift: int, table_side: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.grid, self.side, self.shift = grid, side, shift
        self.missing = tuple(-size % side for size in grid)
        self.padded = tuple(size + missing for size, missing in zip(grid, self.missing))
        self.count = self.padded[0] // side * (self.padded[1] // side)  # M
        self.index = relative_index(side, table_side, device)
        self.mask = self.shift_mask(device, dtype) if shift else None

    def sort(self, x: Tensor) -> Tensor:
        """(B, T, C), row by row -> in the order in which `partition` takes tokens: the same"""
        return x

    def unsort(self, x: Tensor) -> Tensor:
        """(B, T, C), `sort` undone"""
        return x

    def cut(self, x: Tensor) -> Tensor:
        """(B, h, w, C), multiples of W -> (B * M, Q, C)"""
        batch, rows, columns, width = x.shape
        x = x.view(batch, rows // self.side, self.side, columns // self.side, self.side, width)
        return x.transpose(2, 3).reshape(-1, self.side * self.side, width)

    def partition(self, x: Tensor) -> Tensor:
        """(B, h * w, C) -> (B * M, Q, C)"""
        x = x.unflatten(1, self.grid)
        if any(self.missing):
            x = nn.functional.pad(x, (0, 0, 0, self.missing[1], 0, self.missing[0]))
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        return self.cut(x)

    def join(self, x: Tensor) -> Tensor:
        """(B * M, Q, C) -> (B, padded h, padded w, C): `cut` undone"""
        rows, columns = (size // self.side for size in self.padded)
        x = x.view(-1, rows, columns, self.side, self.side, x.shape[-1]).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(B * M, Q, C) -> (B, h * w, C)"""
        x = self.join(x)
        if self.shift:
            x = x.roll((self.shift, self.shift), dims=(1, 2))
        return x[:, : self.grid[0], : self.grid[1]].flatten(1, 2)

    def shift_mask(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """(M, Q, Q), -100 where two tokens of a window come from opposite borders, else 0."""
        # After the roll, the last `shift` rows are from the upper border: only they are foreign in the last windows.
        rows, columns = (torch.arange(size, device=device) >= size - self.shift for size in self.padded)
        region = rows[:, None] * 2 + columns.int()  # (padded h, padded w)
        region = self.cut(region[None, ..., None])[..., 0]  # (M, Q)
        apart = region[:, :, None] != region[:, None, :]
        return torch.zeros(apart.shape, device=device, dtype=dtype).masked_fill(apart, -100.0)


class Reorder(torch.autograd.Function):
    """x (B, T, C), a permutation (T,) and its inverse (T,) -> x[:, permutation]. Backwards it is the inverse that is
    looked up; torch would add token by token, as if some came twice."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(1, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(1, ctx.saved_tensors[0]), None, None


class SortedWindows(Windows):
    """The same for tokens that lie window by window, in the order of a cut without a shift. All but the attention
    works on each token alone, so that a stage keeps them in this order, and only shifted windows move any.

    Arguments as `Windows`; W divides the grid.
    """

    def __init__(self, grid: Size, **arguments: object) -> None:
        super().__init__(grid, **arguments)
        assert not any(self.missing)
        if self.shift:
            tokens = torch.arange(grid[0] * grid[1], device=self.index.device)[None, :, None]
            place_of = self.sort(tokens).flatten().argsort()
            self.order = place_of[super().partition(tokens).flatten()]
            self.inverse = self.order.argsort()

    def sort(self, x: Tensor) -> Tensor:
        """(B, T, C), row by row -> window by window"""
        return self.cut(x.unflatten(1, self.grid)).view(x.shape)

    def unsort(self, x: Tensor) -> Tensor:
        """(B, T, C), window by window -> row by row"""
        return self.join(x).flatten(1, 2)

    def partition(self, x: Tensor) -> Tensor:
        if self.shift:
            x = Reorder.apply(x, self.order, self.inverse)
        return x.view(-1, self.side * self.side, x.shape[-1])

    def merge(self, x: Tensor) -> Tensor:
        x = x.view(-1, self.grid[0] * self.grid[1], x.shape[-1])
        return Reorder.apply(x, self.inverse, self.order) if self.shift else x


def relative_index(side: int, table_side: int, device: torch.device) -> Tensor:
    """(Q, Q) row of the bias table for each query and key of a window.

    A table for windows of side S has (2S - 1)^2 rows, one for each distance in rows and columns; smaller windows use
    the distances that they have.
    """
    place = torch.arange(side, device=device)
    distance = place[:, None] - place[None] + table_side - 1  # (W, W), of one axis
    rows = distance[:, None, :, None] * (2 * table_side - 1)
    return (rows + distance[None, :, None, :]).flatten(2, 3).flatten(0, 1)


class ShiftedWindowAttentionCore(AttentionCore):
    """Attention inside windows with a bias for each distance.

    A subclass names its projections. The module holds `relative_position_bias_table`, as checkpoints do.

    Args:
        window_side: side of the windows that the biases are learned for.
        num_heads: H.
        core: as `AttentionCore`.
    """

    def __init__(self, *, window_side: int, num_heads: int, **core: object) -> None:
        super().__init__(num_heads=num_heads, is_causal=False, **core)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window_side - 1) ** 2, num_heads))

    def attend_windows(
        self, query: Tensor, key: Tensor, value: Tensor, windows: Windows, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """query, key, value (B * M, Q, H * D) -> (B * M, Q, H * D), and the weights (B * M, H, Q, Q) where the
        implementation has them."""
        bias = self.relative_position_bias_table[windows.index].permute(2, 0, 1)[None]  # (1, H, Q, Q)
        query, key, value = (self.heads(x) for x in (query, key, value))  # (B * M, H, Q, D)
        if windows.mask is not None:  # not the same for all windows: (B * M, H, Q, Q)
            images = query.shape[0] // windows.count
            bias = (bias + windows.mask[:, None]).expand(images, -1, -1, -1, -1).flatten(0, 1)
        return self.mix(query, key, value, attention_mask=bias.to(query.dtype), **kwargs)
