"""Normalisation. LayerNorm is torch's own."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm without mean or bias (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).

    Computed in fp32; the result is cast back before the weight is applied, as the official LLaMA does.

    Args:
        width: C.
        eps: added to the mean square.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        weight = self.weight
        if x.dtype == weight.dtype == torch.float32:  # the same numbers in one operation
            return torch.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
