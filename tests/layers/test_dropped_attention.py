"""Attention with dropout, with a known pattern of dropped weights, against its formula.

Shapes: B batch, H heads, Q queries, K keys, D head width.
"""

import pytest
import torch

from hf_ext.layers.dropped_attention import draw_kept, dropped_attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("at_once", [1 << 22, 1])
def test_formula(masked, at_once, monkeypatch):
    """Both rows at once, and one after the other."""
    monkeypatch.setattr("hf_ext.layers.dropped_attention.WEIGHTS_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64).requires_grad_() for n in (5, 7, 7))
    mask = torch.zeros(5, 7, dtype=torch.float64).masked_fill(torch.ones(5, 7).triu(3) > 0, -1e300) if masked else None
    torch.manual_seed(1)
    ours = dropped_attention(q, k, v, mask, dropout=0.3, scaling=0.4)
    torch.manual_seed(1)
    rows = 2 if at_once > 1 else 1
    drawn = [draw_kept(torch.Size((rows, 3, 5, 7)), 0.3, torch.device("cpu")) for _ in range(2 // rows)]
    kept, factor = torch.cat([kept for kept, _ in drawn]), drawn[0][1]
    scores = q @ k.transpose(2, 3) * 0.4
    reference = ((scores if mask is None else scores + mask).softmax(-1) * kept * factor) @ v
    torch.testing.assert_close(ours, reference)
    direction = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((ours * direction).sum(), (q, k, v)),
        torch.autograd.grad((reference * direction).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_share_that_is_kept(probability):
    torch.manual_seed(0)
    kept, factor = draw_kept(torch.Size((100, 4001)), probability, torch.device("cpu"))
    assert abs(kept.double().mean().item() - 1 + probability) < 4e-3
    assert abs(factor * (1 - probability) - 1) < 1e-3
    columns = kept.double().mean(0).view(-1)[:4000].view(-1, 4).mean(0)  # the four parts of a random number alike
    assert (columns - 1 + probability).abs().max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """A row that sees nothing is finite; the same numbers are dropped as in fp32."""
    q, k, v = (torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3))
    mask = torch.zeros(2, 1, 1, 9, dtype=dtype)
    mask[0] = torch.finfo(dtype).min
    results = []
    for kind in (dtype, torch.float32):
        inputs = [x.to(kind).requires_grad_() for x in (q, k, v)]
        torch.manual_seed(0)
        out = dropped_attention(*inputs, mask.to(kind), dropout=0.25, scaling=0.3)
        results.append([out, *torch.autograd.grad(out[1].sum(), inputs)])
    for half, full in zip(*results, strict=True):
        assert half.dtype == dtype and half.isfinite().all()
        torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.05)


def test_almost_all_dropped():
    kept, factor = draw_kept(torch.Size((4, 5)), 1 - 1e-9, torch.device("cpu"))
    assert factor == 1 << 16 and kept.shape == (4, 5)
