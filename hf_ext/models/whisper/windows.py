"""A long clip on its way through the encoder's windows: where they start, and what their text is cut into.

Shapes: M mel bins, L frames of the spectrogram, P prompt tokens, T tokens, V vocabulary.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Clip:
    """A row on its way through the windows.

    Args:
        features: (M, L), or None where only the encoder's output is known.
        start: (P,) tokens that the decoder starts with.
        frames: real frames.
        seek: first frame of the next window.
        segments: what was found so far.
        conditioned: whether the next window reads the text before it.
    """

    features: Tensor | None
    start: Tensor
    frames: int
    seek: int = 0
    segments: list[dict] = field(default_factory=list)
    conditioned: bool = False

    def window(self, length: int) -> Tensor:
        """(M, length) frames from `seek` on, zeros behind the end."""
        piece = self.features[:, self.seek : min(self.seek + length, self.frames)]
        return torch.nn.functional.pad(piece, (0, length - piece.shape[1]))


@dataclass(frozen=True)
class Clock:
    """What a timestamp means.

    Args:
        first: id of the token for 0 seconds.
        seconds: from one timestamp to the next.
        frame_seconds: of a frame of the spectrogram.
        stride: frames for one encoder token, which is what a timestamp counts.
    """

    first: int
    seconds: float
    frame_seconds: float
    stride: int

    def segments(self, tokens: Tensor, seek: int, frames: int) -> tuple[list[tuple[int, int, Tensor, Tensor]], int]:
        """Cut a window's text where two timestamps follow each other: the end of a segment and the start of the next.

        Args:
            tokens: (T,) without prompt and end token.
            seek: first frame of the window; frames: real frames in it.

        Returns:
            First token, last token + 1, start and end in seconds (fp64) of each segment; frames to move on.
        """
        offset = torch.tensor(seek, dtype=torch.float64) * self.seconds / self.stride
        is_time = [token >= self.first for token in tokens.tolist()]
        cuts = [i + 1 for i in range(len(is_time) - 1) if is_time[i] and is_time[i + 1]]
        if not cuts:
            end = int(frames * self.frame_seconds / self.seconds)
            times = [i for i, found in enumerate(is_time) if found]
            if times and tokens[times[-1]] != self.first:
                end = (tokens[times[-1]] - self.first).double()
            return [(0, len(tokens), offset, offset + end * self.seconds)], frames
        said_all = is_time[-2:] == [False, True]  # nothing is spoken after a single timestamp at the end
        if said_all:
            cuts.append(len(tokens))
        else:
            cuts[-1] += 1  # the pair at the end stays together, to show that the text did not end there
        found, first = [], 0
        for i, last in enumerate(cuts):
            behind_text = tokens[last - 1 if said_all or i < len(cuts) - 1 else last - 2]
            start, end = ((t - self.first).double() * self.seconds for t in (tokens[first], behind_text))
            found.append((first, last, offset + start, offset + end))
            first = last
        if said_all:
            return found, frames
        return found, (tokens[first - 2].item() - self.first) * self.stride  # what comes after is heard again


def previous_text(clip: Clip, first_time: int) -> list[Tensor]:
    """The tokens of the segments so far; of a pair of timestamps at an end only the first, as the original does."""
    pieces = [segment["tokens"] for segment in clip.segments]
    return [x[:-1] if len(x) > 2 and x[-2] >= first_time else x for x in pieces]


def pad_rows(rows: Sequence[Tensor], value: float, *, side: str = "right", length: int | None = None) -> Tensor:
    """(T_i,) each -> (B, T), T the longest or `length`."""
    length = length or max(len(row) for row in rows)
    gaps = [(length - len(row), 0) if side == "left" else (0, length - len(row)) for row in rows]
    return torch.stack([torch.nn.functional.pad(row, gap, value=value) for row, gap in zip(rows, gaps, strict=True)])


def more_rows(x: Tensor, rows: int, value: float) -> Tensor:
    """(B, ...) -> (rows, ...), the new ones filled with `value`."""
    return torch.cat([x, x.new_full((rows - x.shape[0], *x.shape[1:]), value)])


def compression_ratio(tokens: Tensor, vocab_size: int) -> float:
    """How much shorter zlib makes the tokens (T,): high for text that repeats itself."""
    width = int(math.log2(vocab_size) / 8) + 1
    content = b"".join(token.to_bytes(width, "little") for token in tokens.tolist())
    return len(content) / len(zlib.compress(content))


def mean_logprob(scores: Sequence[Tensor], tokens: Tensor, temperature: float | None) -> Tensor:
    """Mean log-probability of the tokens (T,), the end token included, from scores (V,) of each step."""
    stacked = torch.stack(list(scores)).to(tokens.device)[: len(tokens)]
    tokens = tokens[-len(stacked) :]
    logprobs = (stacked * (temperature or 1.0)).float().log_softmax(-1).to(stacked.dtype)
    return logprobs.gather(-1, tokens[:, None]).sum().cpu() / len(tokens)


def without_padding(tokens: Tensor, pad: int | None, end: int | list[int] | None) -> Tensor:
    """(T,) -> (T',), without the padding at the end; an end token that is the padding too is kept once."""
    if tokens[-1] != pad:
        return tokens
    count = int((tokens == pad).sum()) - (pad == end)
    return tokens[: len(tokens) - count]
