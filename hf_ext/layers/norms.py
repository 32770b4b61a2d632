"""Normalisation. LayerNorm is torch's own."""

import functools
import math

import torch
from torch import Tensor, nn

from hf_ext.layers.shortcuts import is_plain_inference


@functools.cache
def cpu_scalar(value: float) -> Tensor:
    """A number as a tensor: operations take it faster than a Python number."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def length_of_one(x: Tensor) -> float | None:
    """Euclidean norm of a single token, (..., C) of C numbers; None for more, and where it has to stay a tensor."""
    if x.numel() != x.shape[-1]:
        return None
    try:
        return torch.linalg.vector_norm(x).item()
    except RuntimeError:  # inside `torch.vmap` there are many
        return None


def rms_norm_on_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`torch.rms_norm` for inference: on CPU that is a chain of nine operations, and this one of five, or of two.

    Args:
        x: (..., C); weight: (C,), fp32 both.

    Returns:
        (..., C)
    """
    if length := length_of_one(x):  # a product with a number takes no operation of its own
        return torch.addcmul(cpu_scalar(0.0), x, weight, value=1 / math.sqrt(length * length / x.shape[-1] + eps))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * weight * torch.addcmul(cpu_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


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
            # Not in training, where a block may run a second time with gradients and has to give the same.
            if not self.training and is_plain_inference(x):
                return rms_norm_on_cpu(x, weight, self.eps)
            return torch.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNormWithoutBias(nn.LayerNorm):
    """torch's LayerNorm with a weight and no bias, as PaLM has it (Chowdhery et al., 2022,
    https://arxiv.org/abs/2204.02311, section 2).

    Args:
        width: C.
        eps: added to the variance.
    """

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__(width, eps=eps, bias=False)


def keep_finite(x: Tensor) -> Tensor:
    """In fp16 large activations overflow; the official encoders of BART and Whisper cut them off a little below the
    largest number. Any shape -> the same."""
    if x.dtype != torch.float16:
        return x
    limit = torch.finfo(x.dtype).max - 1000
    return x.clamp(-limit, limit)
