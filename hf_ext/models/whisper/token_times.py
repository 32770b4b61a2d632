"""When each token was spoken, from the cross-attention of those heads that follow the speech (`alignment_heads` of the
generation configuration; Radford et al., 2022, https://arxiv.org/abs/2212.04356).

Shapes: B rows, R rows times beams, H alignment heads, T tokens, S encoder tokens.
"""

import numpy
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput


def median_filter(x: Tensor, width: int) -> Tensor:
    """(..., T, S) -> the same, each number the median of `width` (odd) around it in S; short inputs stay."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    return nn.functional.pad(x, (half, half, 0, 0), mode="reflect").unfold(-1, width, 1).median(-1).values


def warp(cost: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Dynamic time warping: the cheapest monotone path from the first to the last pair.

    Places whose indices have the same sum depend on earlier sums only, so they are computed together.

    Args:
        cost: (T, S) of each pair.

    Returns:
        (path,) indices into T, and into S.
    """
    rows, columns = cost.shape
    total = numpy.full((rows + 1, columns + 1), numpy.inf, dtype=numpy.float32)
    total[0, 0] = 0
    came_from = numpy.full((rows + 1, columns + 1), -1, dtype=numpy.int8)  # 0: both, 1: the row, 2: the column before
    for place in range(2, rows + columns + 1):
        i = numpy.arange(max(1, place - columns), min(rows, place - 1) + 1)
        j = place - i
        both, row, column = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        first = numpy.where((both < row) & (both < column), 0, numpy.where((row < both) & (row < column), 1, 2))
        came_from[i, j] = first
        total[i, j] = cost[i - 1, j - 1] + numpy.choose(first, (both, row, column)).astype(numpy.float64)
    came_from[0, :], came_from[:, 0] = 2, 1
    path, i, j = [], rows, columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = came_from[i, j]
        i, j = i - (step != 2), j - (step != 1)
    text, time = numpy.array(path[::-1]).T
    return text, time


def of_beams(weights: Tensor, beam_indices: Tensor, prompt_length: int) -> Tensor:
    """The weights of the beams that the results came from: (R, H, T, S) -> (B, H, T', S)."""
    length = int((beam_indices != -1).sum(-1).max())  # a search may go on after the best beam has ended
    beams = beam_indices[:, :length]
    beams = torch.cat([beams[:, :1].expand(-1, prompt_length - 1), beams], dim=-1).clamp(min=0)
    places = torch.arange(beams.shape[1], device=beams.device)
    return weights[beams, :, places].transpose(1, 2)


def token_times(
    outputs: ModelOutput,
    *,
    heads: list[list[int]],
    frames: list[int] | None,
    prompt_length: int,
    filter_width: int,
    seconds: float,
) -> Tensor:
    """Start of each token.

    Args:
        outputs: what `generate` returned, with `cross_attentions`.
        heads: layer and head of those that follow the speech.
        frames: real frames of each row's spectrogram, two for each encoder token; None where all are.
        prompt_length: tokens of the decoder before the first new one; their time is 0.
        filter_width: of the median filter.
        seconds: of an encoder token.

    Returns:
        (B, T + 1) seconds, the last token with the time of the one before: it has no cross-attention of its own.
    """
    layers = {layer: torch.cat([step[layer] for step in outputs.cross_attentions], dim=2) for layer, _ in heads}
    weights = torch.stack([layers[layer][:, head] for layer, head in heads], dim=1)  # (R, H, T, S)
    if outputs.get("beam_indices") is not None:
        weights = of_beams(weights, outputs.beam_indices, prompt_length)
    rows, tokens = outputs.sequences.shape[0], weights.shape[2]
    times = torch.zeros(rows, tokens + 1, device=outputs.sequences.device)
    weights = weights[:, :, prompt_length:]
    if weights.shape[2] == 0:
        return times
    for row in range(rows):
        spoken = weights[row] if frames is None else weights[row, :, :, : frames[row] // 2]
        spoken = (spoken - spoken.mean(-2, keepdim=True)) / spoken.std(-2, keepdim=True, unbiased=False)
        cost = -median_filter(spoken, filter_width).mean(0).cpu().double().numpy()
        text, time = warp(cost)
        starts = time[numpy.diff(text, prepend=-1).astype(bool)] * seconds
        times[row, prompt_length:-1] = torch.from_numpy(starts).to(times)
        times[row, -1] = starts[-1]
    return times
