"""SpecAugment: spans of a spectrogram are blanked in training (Park et al., 2019, https://arxiv.org/abs/1904.08779).

Shapes: B batch, L places along the axis that spans lie on.
"""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor


def random_spans(
    rows: int, length: int, *, share: float, span: int, least: int = 0, lengths: Sequence[int] | None = None
) -> Tensor:
    """Which places of each row to blank. Drawn with numpy's global generator, in the order of the official classes.

    Args:
        rows: B; length: L.
        share: of the places that would be covered if spans did not overlap; the number of spans is rounded up or down
            at random, for all rows alike.
        span: places in a span.
        least: least number of spans in a row.
        lengths: real places of each row, which spans start in; default all.

    Returns:
        (B, L) bool

    Raises:
        ValueError: a span is longer than the axis.
    """
    if span > length:
        raise ValueError(f"a span of {span} places does not fit on an axis of {length}; choose a shorter mask length.")
    rounding = numpy.random.rand(1).item()

    def spans_in(real: int) -> int:
        count = max(int(share * real / span + rounding), least)
        return max(min(count, length // span, real - span + 1), 0)

    mask = torch.zeros(rows, length, dtype=torch.bool)
    if spans_in(length) == 0:
        return mask
    for row, real in enumerate([length] * rows if lengths is None else lengths):
        starts = numpy.random.choice(numpy.arange(real - span + 1), spans_in(real), replace=False)
        if len(starts) == 0:  # a row too short for a span has padding at its end
            starts = numpy.array([length - 1])
        places = torch.from_numpy(starts)[:, None] + torch.arange(span)
        mask[row, places.clamp(max=length - 1)] = True
    return mask
