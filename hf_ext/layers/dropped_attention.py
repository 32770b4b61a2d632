"""Attention with dropout on the weights, where torch's own kernel has none: on CPU it would keep three tensors of all
weights for the backward pass and draw each number apart.

    out = dropout(softmax(q k^T * scaling + mask)) v

Remembered for the backward pass is which weights were kept, one byte each; the weights are computed again, as in
FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135), and a part of the batch at a time in both passes:
a dozen operations then find them in the cache, and large tensors would be pages that are asked of the system each time.

Shapes: B batch, H heads, Q queries, K keys, D head width.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEVELS = 1 << 16
WEIGHTS_AT_ONCE = 1 << 20


def draw_kept(shape: torch.Size, probability: float, device: torch.device) -> tuple[Tensor, float]:
    """Which weights are kept, bool, and the factor that makes up for the others. Four are drawn from one random number
    of 64 bits, so that the probability is rounded to a multiple of 1 / 65536, below 1."""
    level = min(round(probability * LEVELS), LEVELS - 1)
    drawn = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64, device=device).random_(-(1 << 63), None)
    kept = drawn.view(torch.int16)[: shape.numel()].view(shape) >= level - LEVELS // 2
    return kept, LEVELS / (LEVELS - level)


def parts_of(query: Tensor, keys: int) -> list[slice]:
    """Rows of the batch (B, H, Q, D) whose weights for K keys are computed together."""
    rows = max(1, WEIGHTS_AT_ONCE // (query.shape[1] * query.shape[2] * keys))
    return [slice(first, first + rows) for first in range(0, len(query), rows)]


def weights_of(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """(B, H, Q, K), in fp32 at least; scaling is applied to the queries before"""
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return (scores if mask is None else scores.add_(mask)).softmax(-1)


def mask_of(part: slice, mask: Tensor | None) -> Tensor | None:
    """The mask of these rows; it may be the same for all."""
    return mask if mask is None or mask.dim() < 4 or len(mask) == 1 else mask[part]


def gradients(
    grad: Tensor,
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    kept: Tensor | None = None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward pass of attention whose weights are computed again.

    Args:
        grad: of the output `out`, (B, H, Q, D).
        query: (B, H, Q, D), times `scaling`; key and value: (B, H, K, D).
        kept: (B, H, Q, K) bool, weights that were not dropped, and `factor`, what made up for the others.

    Returns:
        The gradients of the query before it was scaled, of key and value.
    """
    shares = (grad * out).sum(-1, keepdim=True)
    grad = grad if kept is None else grad * factor
    weights = weights_of(query, key, mask)
    slopes = (grad @ value.transpose(2, 3)).to(weights.dtype)
    slopes = slopes if kept is None else slopes.mul_(kept)
    slopes = slopes.sub_(shares).mul_(weights).to(query.dtype)
    weights = weights if kept is None else weights.mul_(kept)
    grad_value = weights.to(value.dtype).transpose(2, 3) @ grad
    return (slopes @ key).mul_(scaling), slopes.transpose(2, 3) @ query, grad_value


class DroppedAttention(torch.autograd.Function):
    """query (B, H, Q, D), key and value (B, H, K, D), mask to add or None, dropout, scaling -> (B, H, Q, D)"""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        scaling: float,
    ) -> Tensor:
        out, all_kept = torch.empty(query.shape, dtype=value.dtype, device=value.device), []
        for part in parts_of(query, key.shape[2]):
            weights = weights_of(query[part] * scaling, key[part], mask_of(part, mask))
            kept, factor = draw_kept(weights.shape, dropout, weights.device)
            torch.mul(weights.mul_(kept).to(value.dtype) @ value[part], factor, out=out[part])
            all_kept.append(kept)
        ctx.factor, ctx.scaling = factor, scaling
        ctx.save_for_backward(query, key, value, mask, out, *all_kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, *all_kept = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
        for part, kept in zip(parts_of(query, key.shape[2]), all_kept, strict=True):
            inputs = grad[part], out[part], query[part] * ctx.scaling, key[part], value[part]
            options = {"scaling": ctx.scaling, "kept": kept, "factor": ctx.factor}
            for whole, piece in zip(grads, gradients(*inputs, mask_of(part, mask), **options), strict=True):
                whole[part] = piece
        return *grads, None, None, None


def dropped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, scaling: float
) -> Tensor:
    """Attention with dropout on the weights.

    Args:
        query: (B, H, Q, D); key and value: (B, H, K, D).
        mask: numbers to add to the scores, broadcastable to (B, H, Q, K); finite somewhere in each row.
        dropout: probability of dropping a weight.
        scaling: factor on the scores.

    Returns:
        (B, H, Q, D)
    """
    return DroppedAttention.apply(query, key, value, mask, dropout, scaling)
