"""Attention with dropout on the weights, where torch's own kernel has none: on CPU it would keep three tensors of all
weights for the backward pass and draw each number apart.

    out = dropout(softmax(q k^T * scaling + mask)) v

Kept for the backward pass are which weights were dropped, one byte each, and a number for each query; the weights are
computed again, as in FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135).

Shapes: B batch, H heads, Q queries, K keys, D head width.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEVELS = 1 << 16


def draw_dropped(shape: torch.Size, probability: float, device: torch.device) -> tuple[Tensor, float]:
    """Which weights are dropped, bool, and the factor that makes up for them. Four are drawn from one random number of
    64 bits, so that the probability is rounded to a multiple of 1 / 65536, below 1."""
    level = min(round(probability * LEVELS), LEVELS - 1)
    drawn = torch.empty((shape.numel() + 3) // 4, dtype=torch.int64, device=device).random_(-(1 << 63), None)
    dropped = drawn.view(torch.int16)[: shape.numel()].view(shape) < level - LEVELS // 2
    return dropped, LEVELS / (LEVELS - level)


def scores_of(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """(B, H, Q, K), in fp32 at least; all factors are applied to the smaller tensors around it"""
    scores = query @ key.transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if mask is None else scores.add_(mask)


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
        weights = scores_of(query * scaling, key, mask)
        level = weights.amax(-1, keepdim=True)
        total = weights.sub_(level).exp_().sum(-1, keepdim=True)
        level += total.log()
        dropped, factor = draw_dropped(weights.shape, dropout, weights.device)
        out = weights.masked_fill_(dropped, 0.0).to(value.dtype) @ value
        out = out.mul_((factor / total).to(out.dtype))
        ctx.factor, ctx.scaling = factor, scaling
        ctx.save_for_backward(query, key, value, mask, level, dropped, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, level, dropped, out = ctx.saved_tensors
        query = query * ctx.scaling
        weights = scores_of(query, key, mask).sub_(level).exp_()
        shares = (grad * out).sum(-1, keepdim=True)
        grad = grad * ctx.factor
        # Not in place: the weights before dropout are needed below.
        grad_value = weights.masked_fill(dropped, 0.0).to(value.dtype).transpose(2, 3) @ grad
        slopes = (grad @ value.transpose(2, 3)).to(weights.dtype).masked_fill_(dropped, 0.0)
        slopes = slopes.sub_(shares).mul_(weights).to(query.dtype)
        return (slopes @ key).mul_(ctx.scaling), slopes.transpose(2, 3) @ query, grad_value, None, None, None


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
