"""Where the norms stand around a sub-layer: `residual(x, sublayer)` for x (..., C) and a function (..., C) -> (..., C).

post       norm(x + dropout(f(x)))             Vaswani et al., 2017, https://arxiv.org/abs/1706.03762
pre        x + dropout(f(norm(x)))             Xiong et al., 2020, https://arxiv.org/abs/2002.04745
sandwich   x + dropout(norm(f(norm(x))))       Ding et al., 2021, https://arxiv.org/abs/2105.13290
"""

from collections.abc import Callable

from torch import Tensor, nn

MakeNorm = Callable[[], nn.Module]
Sublayer = Callable[[Tensor], Tensor]


class PostNorm(nn.Module):
    """norm(x + dropout(f(x)))

    Args:
        make_norm: makes a norm of width C.
        dropout: probability of dropping a number of the sub-layer's output in training.
    """

    def __init__(self, *, make_norm: MakeNorm, dropout: float) -> None:
        super().__init__()
        self.norm = make_norm()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.norm(x + self.dropout(sublayer(x)))


class PreNorm(PostNorm):
    """x + dropout(f(norm(x))): what is added up is never normalised, so a norm follows the last block."""

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """(..., C) -> (..., C)"""
        return x + self.dropout(sublayer(self.norm(x)))


class SandwichNorm(PostNorm):
    """x + dropout(norm_after(f(norm(x)))): as `PreNorm`, and no sub-layer adds more than a normalised update."""

    def __init__(self, *, make_norm: MakeNorm, dropout: float) -> None:
        super().__init__(make_norm=make_norm, dropout=dropout)
        self.norm_after = make_norm()

    def forward(self, x: Tensor, sublayer: Sublayer) -> Tensor:
        """(..., C) -> (..., C)"""
        return x + self.dropout(self.norm_after(sublayer(self.norm(x))))
