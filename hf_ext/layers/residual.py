"""What happens to a residual branch, and to the stream that it joins.

Shapes: B batch.
"""

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth (Huang et al., 2016, https://arxiv.org/abs/1603.09382): in training, leaves a branch out for
    some of the rows, and makes up for it in the others.

    Args:
        probability: of leaving it out.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) -> (B, ...)"""
        if self.probability == 0.0 or not self.training:
            return x
        kept = 1.0 - self.probability
        rows = x.shape[0], *(1,) * (x.dim() - 1)
        return x / kept * (torch.rand(rows, dtype=x.dtype, device=x.device) + kept).floor()

    def extra_repr(self) -> str:
        return f"probability={self.probability}"


def cut_infinite(x: Tensor) -> Tensor:
    """(...) -> (...): fp16 that has overflowed is cut off a little below its largest number, as the official T5 does;
    anything else is left as it is."""
    if x.dtype != torch.float16:
        return x
    largest = torch.finfo(x.dtype).max
    limit = torch.where(x.isinf().any(), largest - 1000, largest)
    return x.clamp(-limit, limit)
