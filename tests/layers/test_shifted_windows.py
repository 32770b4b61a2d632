"""Windows on a grid: what each token sees, against a count one by one."""

import pytest
import torch

from hf_ext.layers.patterns.shifted_windows import SortedWindows, Windows, relative_index
from hf_ext.layers.residual import DropPath


def windows(grid, side, shift, table_side=None):
    return Windows(
        grid, side=side, shift=shift, table_side=table_side or side, device=torch.device("cpu"), dtype=torch.float32
    )


@pytest.mark.parametrize("grid", [(4, 4), (8, 4), (5, 7), (1, 3), (9, 2)])
@pytest.mark.parametrize(("side", "shift"), [(4, 0), (4, 2), (3, 1), (2, 1), (1, 0)])
def test_merging_undoes_the_partition(grid, side, shift):
    plan = windows(grid, side, shift)
    x = torch.randn(2, grid[0] * grid[1], 3)
    parts = plan.partition(x)
    assert parts.shape == (2 * plan.count, side * side, 3)
    assert torch.equal(plan.merge(parts), x)


@pytest.mark.parametrize(("grid", "side", "shift"), [((4, 8), 4, 2), ((6, 3), 3, 1), ((4, 4), 2, 0)])
def test_sorted_windows_are_the_same(grid, side, shift):
    """Parts, and the gradient of what becomes of them."""
    arguments = {"side": side, "table_side": side, "device": torch.device("cpu"), "dtype": torch.float32}
    plan = SortedWindows(grid, shift=shift, **arguments)
    x = torch.randn(2, grid[0] * grid[1], 3, requires_grad=True)
    parts = plan.partition(plan.sort(x))
    assert torch.equal(parts, windows(grid, side, shift).partition(x))
    back = plan.unsort(plan.merge(parts))
    assert torch.equal(back, x)
    grad = torch.randn(x.shape)
    back.backward(grad)
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("grid", [(4, 8), (8, 4), (5, 7), (6, 6)])
@pytest.mark.parametrize(("side", "shift"), [(4, 0), (4, 2), (3, 1)])
def test_who_sees_whom(grid, side, shift):
    """Two tokens see each other if, after the cut is moved by the shift, they lie in one window."""
    plan = windows(grid, side, shift)
    places = plan.partition(1 + torch.arange(grid[0] * grid[1]).view(1, -1, 1))[..., 0]  # 0 is what was appended
    mask = torch.zeros(plan.count, side * side, side * side) if plan.mask is None else plan.mask
    seen = {
        (places[m, q].item() - 1, places[m, k].item() - 1)
        for m in range(plan.count)
        for q in range(side * side)
        for k in range(side * side)
        if places[m, q] and places[m, k] and mask[m, q, k] == 0
    }

    def window(place: int) -> tuple[int, ...]:
        # The first `shift` rows of the padded grid are a window of their own, cut off at the border.
        return tuple((at + side - shift) // side if shift else at // side for at in divmod(place, grid[1]))

    every = range(grid[0] * grid[1])
    assert seen == {(a, b) for a in every for b in every if window(a) == window(b)}


@pytest.mark.parametrize(("side", "table_side"), [(3, 3), (2, 4), (1, 3)])
def test_bias_of_each_distance(side, table_side):
    """The row of the table is that of the distance, in smaller windows too."""
    index = relative_index(side, table_side, torch.device("cpu"))
    for q in range(side * side):
        for k in range(side * side):
            rows, columns = (a - b for a, b in zip(divmod(q, side), divmod(k, side), strict=True))
            assert index[q, k] == (rows + table_side - 1) * (2 * table_side - 1) + columns + table_side - 1


def test_drop_path():
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    kept = drop(x).mean((1, 2))
    assert set(kept.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert (kept > 0).float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert drop.eval()(x) is x
