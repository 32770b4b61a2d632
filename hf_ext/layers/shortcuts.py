"""When a chain of operations may be replaced by a shorter one that gives the same numbers.

A token of a small model is a few hundred operations on a few hundred numbers each, which take longer to call than to
compute.
"""

import torch
from torch import Tensor


def is_plain_inference(x: Tensor) -> bool:
    """Whether x is an ordinary fp32 tensor on CPU, and nobody looks on: neither gradients nor a graph that is traced.

    A tensor of another kind is distributed, or remembers what was done to it.
    """
    return (
        not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )
