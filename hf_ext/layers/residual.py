"""What happens to the residual stream between layers."""

import torch
from torch import Tensor


def cut_infinite(x: Tensor) -> Tensor:
    """(...) -> (...): fp16 that has overflowed is cut off a little below its largest number, as the official T5 does;
    anything else is left as it is."""
    if x.dtype != torch.float16:
        return x
    largest = torch.finfo(x.dtype).max
    limit = torch.where(x.isinf().any(), largest - 1000, largest)
    return x.clamp(-limit, limit)
