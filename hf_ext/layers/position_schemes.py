"""Ways to tell a model where its tokens stand: the classes behind the field `positions`, looked up in
`hf_ext.registry.POSITIONS`.

A scheme acts in any of three places, and a half of a model asks it once per forward, for all blocks:

    embed     added to the embeddings            sinusoidal, learned
    rotation  turns queries and keys             rotary
    bias      added to the scores                relative, ALiBi in an encoder

A scheme of one's own inherits `NoPositions`, overrides the methods of its place, and is entered by
`@hf_ext.register_position("name")`; its further keyword-only arguments are set by `position_options`.

Shapes: B batch, T tokens, Q queries, K keys, H heads, D head width, C model width.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import initialization as init

from hf_ext.layers.embeddings import look_up_positions
from hf_ext.layers.positions import Alibi, RelativeBuckets, RotaryEmbedding, Rotation, alibi_slopes, sinusoids


class NoPositions(nn.Module):
    """No positions: a causal decoder still learns the order from what each token sees (Kazemnejad et al., 2023,
    https://arxiv.org/abs/2305.19466), an encoder reads a set. The base class of all schemes.

    Args:
        width: C.
        num_heads: H.
        head_dim: D.
        max_positions: how many positions a table needs.
        is_causal: whether the half that asks is a decoder.
    """

    has_bias = False
    """Whether `bias` adds something to the scores."""

    alibi: Alibi | None = None
    """Linear biases that a decoder's queries and keys carry themselves (`AlibiDecoderModel`)."""

    def __init__(self, *, width: int, num_heads: int, head_dim: int, max_positions: int, is_causal: bool) -> None:
        super().__init__()
        self.width, self.num_heads, self.head_dim = width, num_heads, head_dim
        self.max_positions, self.is_causal = max_positions, is_causal
        self.has_bias = self.adds_bias(is_causal)

    @classmethod
    def adds_bias(cls, is_causal: bool) -> bool:
        """Whether a half of this kind has a bias: where that depends on the half, this says so."""
        return cls.has_bias

    def embed(self, x: Tensor, position_ids: Tensor | None, past_length: int | Tensor) -> Tensor:
        """Embeddings (B, T, C) and positions (B or 1, T), None for those after `past_length` tokens -> (B, T, C)"""
        return x

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """position_ids (B or 1, T) -> cos and sin as `hf_ext.layers.positions.rotate` takes them, or None."""
        return None

    def bias(self, queries: int, keys: int, past_length: int | Tensor, device: torch.device) -> Tensor:
        """What is added to the scores, (1, H, Q, K). The key at place j stands at position j, the query at place i at
        `past_length` + i; that a decoder sees no later key is not the scheme's affair."""
        raise NotImplementedError


class LearnedPositions(NoPositions):
    """A learned vector for each position (Gehring et al., 2017, https://arxiv.org/abs/1705.03122)."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.table = self.make_table()

    def make_table(self) -> nn.Module:
        """Position -> vector."""
        return nn.Embedding(self.max_positions, self.width)

    def embed(self, x: Tensor, position_ids: Tensor | None, past_length: int | Tensor) -> Tensor:
        return x + look_up_positions(
            self.table,
            position_ids,
            tokens=x.shape[1],
            past_length=past_length,
            device=x.device,
            limit_name="max_position_embeddings",
        )


class SinusoidTable(nn.Module):
    """The sinusoids as a table that is in no file.

    Args:
        rows: number of positions; width: C.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Buffer(sinusoids(rows, width), persistent=False)

    def reset_buffers(self) -> None:
        """Compute the table again: loading leaves its memory uninitialised."""
        init.copy_(self.weight, sinusoids(*self.weight.shape, device=self.weight.device))

    def forward(self, index: Tensor) -> Tensor:
        """(B, T) -> (B, T, C)"""
        return embedding(index, self.weight)


class SinusoidalPositions(LearnedPositions):
    """Sines and cosines of growing wave length (Vaswani et al., 2017, section 3.5)."""

    def make_table(self) -> nn.Module:
        return SinusoidTable(self.max_positions, self.width)


class RotaryPositions(NoPositions):
    """Queries and keys turn with their position (Su et al., 2021, https://arxiv.org/abs/2104.09864).

    Args:
        theta: base of the wave lengths.
    """

    def __init__(self, *, theta: float = 10000.0, **sizes: int) -> None:
        super().__init__(**sizes)
        parameters = {"rope_type": "default", "rope_theta": theta}
        self.rotary_emb = RotaryEmbedding(config=SimpleNamespace(rope_parameters=parameters, head_dim=self.head_dim))

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
        return self.rotary_emb(position_ids, dtype)


class AlibiPositions(NoPositions):
    """Scores fall linearly with the distance (Press et al., 2021, https://arxiv.org/abs/2108.12409). In a decoder
    queries and keys carry the bias; in an encoder, where keys stand on both sides, it is a tensor.

    Args:
        bias_max: the last head's slope is 2 ** -bias_max.
    """

    def __init__(self, *, bias_max: float = 8, **sizes: int) -> None:
        super().__init__(**sizes)
        self.bias_max = bias_max
        if self.is_causal:
            self.alibi = Alibi(num_heads=self.num_heads, scaling=self.head_dim**-0.5, bias_max=bias_max)

    @classmethod
    def adds_bias(cls, is_causal: bool) -> bool:
        return not is_causal

    def bias(self, queries: int, keys: int, past_length: int | Tensor, device: torch.device) -> Tensor:
        query, key = torch.arange(queries, device=device) + past_length, torch.arange(keys, device=device)
        slopes = alibi_slopes(self.num_heads, bias_max=self.bias_max, device=device)
        return -slopes[:, None, None] * (query[:, None] - key).abs()[None, None]


class RelativePositions(NoPositions):
    """Learned biases by bucket of distances (T5, Raffel et al., 2019, https://arxiv.org/abs/1910.10683, section 2.1),
    the same for all layers.

    Args:
        num_buckets: how many; in an encoder half of them for each side.
        max_distance: where the last bucket begins.
    """

    has_bias = True

    def __init__(self, *, num_buckets: int = 32, max_distance: int = 128, **sizes: int) -> None:
        super().__init__(**sizes)
        self.relative = RelativeBuckets(num_buckets=num_buckets, max_distance=max_distance, is_causal=self.is_causal)
        self.table = nn.Embedding(num_buckets, self.num_heads)

    def bias(self, queries: int, keys: int, past_length: int | Tensor, device: torch.device) -> Tensor:
        return self.relative.bias(self.table, queries=queries, keys=keys, past_length=past_length, device=device)


def hide_later(bias: Tensor, past_length: int | Tensor) -> Tensor:
    """(1, H, Q, K) -> the same, the smallest number where the key stands after the query."""
    queries, keys = bias.shape[-2:]
    if isinstance(past_length, int) and queries == 1 and keys == past_length + 1:  # the step of decoding
        return bias
    query = torch.arange(queries, device=bias.device)[:, None] + past_length
    return bias.masked_fill(torch.arange(keys, device=bias.device) > query, torch.finfo(bias.dtype).min)
