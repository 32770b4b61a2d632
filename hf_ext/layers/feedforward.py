"""Position-wise feed-forward layers."""

from torch import Tensor, nn
from transformers.activations import ACT2FN

# Spellings of GELU's tanh form in elementary steps, which take seven passes over the widest tensor of a block and keep
# most of them for the backward pass. torch has the formula as one kernel.
_TANH_GELU = ("gelu_new", "gelu_fast", "gelu_accurate")


def make_activation(name: str) -> nn.Module:
    """The activation of that name in the library's table, in its fastest form.

    Raises:
        KeyError: there is none of that name.
    """
    return ACT2FN["gelu_pytorch_tanh" if name in _TANH_GELU else name]


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

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
