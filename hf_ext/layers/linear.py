"""Linear layers that are used without being called, and a few rows times a large matrix.

Shapes: C width of the input, V of the output.
"""

import torch
from torch import Tensor, nn

from hf_ext.layers.shortcuts import is_plain_inference

FEW_ROWS = range(4, 16)  # fewer are read at the memory's speed by both libraries; with more they hardly differ
LARGE = 1 << 22  # weights; of smaller matrices the calls cost more than is gained


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer computes no more than its weight and bias say, so that these may be used without calling it.

    Adapters, quantised layers, hooks (offloading, FSDP), a replaced `forward` and distributed tensors need the call.
    """
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
    )


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """(..., C) -> (..., V), what the layer computes.

    A step of decoding several rows or beams on CPU reads the matrix of the vocabulary for a handful of rows. From four
    rows on, the library that torch has `Linear` from (MKL) does so at half of the memory's speed and less, oneDNN at
    two thirds: torch has its product as an operator, for the graphs that it compiles.
    """
    if by_onednn(layer, x):
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), layer.weight, layer.bias, "none", [], "")
    return layer(x)


def by_onednn(layer: nn.Module, x: Tensor) -> bool:
    """Whether it is a case for oneDNN: few rows, a large plain matrix, fp32 on CPU without gradients."""
    return (
        is_plain_inference(x)
        and x.numel() // x.shape[-1] in FEW_ROWS
        and is_plain_linear(layer)
        and layer.weight.numel() >= LARGE
        and layer.weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
