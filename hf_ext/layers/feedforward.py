"""Position-wise feed-forward layers."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_ext.layers.shortcuts import is_plain_inference

# Spellings of GELU's tanh form in elementary steps, which take seven passes over the widest tensor of a block and keep
# most of them for the backward pass. torch has the formula as one kernel.
_TANH_GELU = ("gelu_new", "gelu_fast", "gelu_accurate")


def make_activation(name: str) -> nn.Module:
    """The activation of that name in the library's table, in its fastest form.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in ACT2FN:
        raise ValueError(f"there is no activation function {name!r}; there are {', '.join(sorted(ACT2FN))}.")
    if name == "gelu":
        return GELU()
    return ACT2FN["gelu_pytorch_tanh" if name in _TANH_GELU else name]


class GELU(nn.GELU):
    """x * (1 + erf(x / 2 ** 0.5)) / 2 (Hendrycks and Gimpel, 2016, https://arxiv.org/abs/1606.08415).

    On CPU torch hands it to oneDNN, whose set-up takes several times as long as the numbers of a single token.
    """

    FEW = 1 << 14  # numbers

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same"""
        if not self.training and is_plain_inference(x) and x.numel() <= self.FEW:
            half = x * 0.5
            return torch.addcmul(half, half, (x * 0.5**0.5).erf_())
        return super().forward(x)


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) * up(x)); with SiLU this is SwiGLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202).

    Args:
        width: C.
        inner_width: width between the projections.
        activation: name in the library's table of activations.
        bias: whether the projections have biases.
    """

    def __init__(self, *, width: int, inner_width: int, activation: str, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=bias)
        self.up_proj = nn.Linear(width, inner_width, bias=bias)
        self.down_proj = nn.Linear(inner_width, width, bias=bias)
        self.act_fn = make_activation(activation)

    def inner(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., inner_width)"""
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.down_proj(self.inner(x))


# --- choices of a configuration (`hf_ext.registry.FEEDFORWARDS`) --------------------------------------------------


class PlainFeedForward(nn.Module):
    """down(dropout(act(up(x)))) (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, section 3.3). A subclass says
    with which activation.

    Args:
        width: C.
        inner_width: width between the projections.
        bias: whether the projections have biases.
        dropout: probability of dropping a number between the projections in training.
    """

    activation: str

    def __init__(self, *, width: int, inner_width: int, bias: bool, dropout: float) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, inner_width, bias=bias)
        self.down_proj = nn.Linear(inner_width, width, bias=bias)
        self.act_fn = make_activation(self.activation)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.down_proj(self.dropout(self.act_fn(self.up_proj(x))))


class ReluFeedForward(PlainFeedForward):
    """With ReLU: the paper's."""

    activation = "relu"


class GeluFeedForward(PlainFeedForward):
    """With GELU (Hendrycks and Gimpel, 2016)."""

    activation = "gelu"


class DroppedGatedFeedForward(GatedFeedForward):
    """down(dropout(act(gate(x)) * up(x))). A subclass says with which activation; arguments as `PlainFeedForward`."""

    activation: str

    def __init__(self, *, width: int, inner_width: int, bias: bool, dropout: float) -> None:
        super().__init__(width=width, inner_width=inner_width, activation=self.activation, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def inner(self, x: Tensor) -> Tensor:
        return self.dropout(super().inner(x))


class SwiGLU(DroppedGatedFeedForward):
    """Gated by SiLU (Shazeer, 2020, https://arxiv.org/abs/2002.05202)."""

    activation = "silu"


class GeGLU(DroppedGatedFeedForward):
    """Gated by GELU (Shazeer, 2020)."""

    activation = "gelu"
