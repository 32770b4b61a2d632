"""Patches and positions on a grid."""

import pytest
import torch
from torch import nn

from hf_ext.layers.patches import PatchEmbedding, interpolate_positions, mask_patches


def test_patches_are_cut_out_row_by_row():
    """A token is the linear map of its own patch's pixels, and what is beyond the last whole patch is not read."""
    torch.manual_seed(0)
    embedding = PatchEmbedding(channels=2, width=5, patch_size=(2, 3))
    images = torch.randn(2, 2, 5, 7)
    tokens = embedding(images)
    assert tokens.shape == (2, 4, 5)
    assert embedding.grid_of(images) == (2, 2)
    weight, bias = embedding.projection.weight.flatten(1), embedding.projection.bias
    for n, (row, column) in enumerate(((0, 0), (0, 3), (2, 0), (2, 3))):
        patch = images[:, :, row : row + 2, column : column + 3].flatten(1)
        torch.testing.assert_close(tokens[:, n], nn.functional.linear(patch, weight, bias))
    images[:, :, 4:] = images[:, :, :, 6:] = float("nan")
    assert embedding(images).isfinite().all()


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_positions_at_the_native_size_are_the_table_itself(prefix):
    table = torch.randn(1, prefix + 12, 4)
    assert interpolate_positions(table, (3, 4), (3, 4), prefix=prefix) is table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positions_of_every_size(dtype):
    """No size is off by a row, the tokens before the patches keep theirs, and the arithmetic is that of fp32."""
    torch.manual_seed(0)
    table = torch.randn(1, 2 + 16 * 8, 3, dtype=dtype)
    for rows in range(14, 31):
        for columns in range(14, 31):
            found = interpolate_positions(table, (16, 8), (rows, columns), prefix=2)
            assert found.shape == (1, 2 + rows * columns, 3)
            assert found.dtype == dtype
            assert torch.equal(found[:, :2], table[:, :2])
            exact = interpolate_positions(table.float(), (16, 8), (rows, columns), prefix=2)
            assert torch.equal(found, exact.to(dtype))


def test_rows_and_columns_are_not_swapped():
    """Positions that depend on the row alone go on doing so, in the same order."""
    ramp = torch.arange(6.0)[:, None].expand(6, 3).reshape(1, 18, 1)
    found = interpolate_positions(ramp, (6, 3), (12, 9)).view(12, 9)
    torch.testing.assert_close(found, found[:, :1].expand(12, 9))
    rows = found[:, 0]
    assert (rows.diff() > 0).all()
    torch.testing.assert_close(rows + rows.flip(0), torch.full((12,), 5.0))


def test_gradients_reach_the_table():
    table = torch.randn(1, 1 + 6, 2, requires_grad=True)
    interpolate_positions(table, (2, 3), (4, 5), prefix=1).sum().backward()
    assert (table.grad != 0).all()


def test_masked_patches_are_the_token():
    x, token = torch.randn(2, 3, 4), torch.randn(1, 1, 4)
    mask = torch.tensor([[True, False, False], [False, True, True]])
    found = mask_patches(x, mask, token)
    assert torch.equal(found[~mask], x[~mask])
    assert torch.equal(found[mask], token[0].expand(3, 4))
    assert mask_patches(x, None, None) is x
