"""Positions: sinusoids, rotary embeddings, linear biases, learned biases.

Sinusoids (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, section 3.5) are added to the embeddings.

RoPE (Su et al., 2021, https://arxiv.org/abs/2104.09864) turns pairs of coordinates of queries and keys by an angle
proportional to the position, so that their dot product depends on the distance only.

ALiBi (Press et al., 2021, https://arxiv.org/abs/2108.12409) lowers a score in proportion to the distance between query
and key, with a slope of its own for each head.

T5's biases (Raffel et al., 2019, https://arxiv.org/abs/1910.10683, section 2.1) are learned numbers added to a score,
one for each head and each bucket of distances between query and key.

Shapes: B batch, T tokens, Q queries, K keys, H heads, G key/value heads, D head width, R rotated width (D unless a part
of the head is rotated), E extra coordinates of queries and keys.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.import_utils import is_tracing


def sinusoids(positions: int, width: int, *, device: torch.device | None = None) -> Tensor:
    """(positions, width) table, fp32: sines in the even columns and cosines in the odd ones, a frequency for each pair.

    The angles are computed in fp64: those of distant positions have lost digits in fp32.
    """
    exponents = 2 * (torch.arange(width, dtype=torch.float64, device=device) // 2) / width
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] / 10000.0**exponents
    angles[:, 0::2], angles[:, 1::2] = angles[:, 0::2].sin(), angles[:, 1::2].cos()
    return angles.float()


def placed_as(parameter: Tensor, values: Tensor) -> Tensor:
    """Values that each process has whole, spread over the processes as a parameter is; unchanged where it is whole."""
    if not hasattr(parameter, "device_mesh"):
        return values
    from torch.distributed.tensor import distribute_tensor  # not every build of torch has it

    return distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x_i, x_{i + R/2}) by the angles that `RotaryEmbedding` gives.

    Official checkpoints pair the two halves of a head, not neighbours: their weights are permuted accordingly.

    Args:
        x: (B, H, T, D)
        cos: (B or 1, 1, T, R), the angles twice; with R < D only the first R coordinates turn.
        sin: (B or 1, 1, T, R), the angles twice, negative the first time: swapping the halves and one multiplication
            then give (-x_{i + R/2} sin, x_i sin).

    Returns:
        (B, H, T, D)
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(width // 2, dims=-1), sin)


class Rotation(NamedTuple):
    """Angles of the positions, once for all layers.

    Args:
        cos, sin: (B or 1, 1, T, R) each, as `rotate` takes them.
    """

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Queries or keys, (B, H, T, D) -> (B, H, T, D)"""
        return rotate(x, self.cos, self.sin)


class RotationOfOneToken(Rotation):
    """A single position: turning is one product with a matrix, the same for all heads and layers, in place of a chain
    of operations that take longer to call than to compute. What is added for it are zeros."""

    matrix: Tensor | None = None

    def turn(self, x: Tensor) -> Tensor:
        """Queries or keys that stand there, (B, H, 1, D) -> (B, H, 1, D)"""
        # A block on another device has got cos and sin there; one that is compiled by itself fuses what they do.
        if x.dtype != torch.float32 or not x.is_cpu or torch.compiler.is_compiling():
            return super().turn(x)
        if self.matrix is None:
            self.matrix = self.make_matrix(x.shape[-1])
        return x @ self.matrix

    def make_matrix(self, width: int) -> Tensor:
        """(D, D)"""
        cos, sin = self.cos.view(-1), self.sin.view(-1)
        same, swapped = identity_and_swap(cos.shape[0], width)
        if (rest := width - cos.shape[0]) > 0:  # coordinates that stay as they are
            cos, sin = nn.functional.pad(cos, (0, rest), value=1.0), nn.functional.pad(sin, (0, rest))
        return torch.addcmul(same * cos, swapped, sin)


@functools.cache
def identity_and_swap(rotated: int, width: int) -> tuple[Tensor, Tensor]:
    """(width, width) on CPU: the identity, and what swaps the halves of the first `rotated` coordinates."""
    same = torch.eye(width, dtype=torch.float32, device="cpu")
    return same, torch.cat([same[:rotated].roll(rotated // 2, dims=0), same[rotated:]])


def may_turn_by_matrix(position_ids: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is a single position, on CPU, and products are as exact as the angles must be: they are not where
    the user has allowed oneDNN to compute them in bf16."""
    return (
        position_ids.numel() == 1
        and dtype == torch.float32
        and type(position_ids) is Tensor
        and position_ids.is_cpu
        and not is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.matmul.fp32_precision in ("none", "ieee")
    )


class RotaryEmbedding(nn.Module):
    """Angles of the positions, for every rope type of the library: default, linear, dynamic, yarn, longrope, llama3.

    The frequencies stay in fp32 whatever the model is cast to: in bf16, 256 and 257 are the same number.

    Args:
        config: handed on to the library's functions, which read `rope_parameters`, `head_dim`,
            `max_position_embeddings`.
    """

    def __init__(self, *, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        frequencies, self.attention_scaling = self.compute_frequencies()
        self.inv_freq = nn.Buffer(frequencies["inv_freq"], persistent=False)  # (R / 2,)
        if "long_inv_freq" in frequencies:
            self.long_inv_freq = nn.Buffer(frequencies["long_inv_freq"], persistent=False)  # (R / 2,)

    def compute_frequencies(self, device: torch.device | None = None) -> tuple[dict[str, Tensor], float]:
        """The buffers' values, fp32, and the factor on cos and sin that some rope types ask for."""
        parameters = self.config.rope_parameters
        if self.rope_type == "default":
            head_dim = getattr(self.config, "head_dim", None)
            head_dim = head_dim or self.config.hidden_size // self.config.num_attention_heads
            width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
            return {"inv_freq": 1.0 / parameters["rope_theta"] ** exponents}, 1.0
        compute = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, scaling = compute(self.config, device)
        frequencies = {"inv_freq": inv_freq}
        if self.rope_type == "longrope":
            # Inputs longer than the original context use another set of factors.
            beyond = parameters["original_max_position_embeddings"] + 1
            frequencies["long_inv_freq"], _ = compute(self.config, device, seq_len=beyond)
        return frequencies, scaling

    def reset_buffers(self) -> None:
        """Recompute the buffers in place: they are not in any file, and loading leaves their memory uninitialised."""
        frequencies, self.attention_scaling = self.compute_frequencies(self.inv_freq.device)
        for name, value in frequencies.items():
            init.copy_(getattr(self, name), value)

    def _apply(self, fn, recurse: bool = True):
        # `model.half()` and the like cast buffers too; the frequencies follow to the device but stay in fp32.
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32:
            for name, value in self.compute_frequencies(self.inv_freq.device)[0].items():
                setattr(self, name, value)
        return self

    def frequencies(self, position_ids: Tensor) -> Tensor:
        """(R / 2,) frequencies for these positions, fp32."""
        buffers: dict[str, Tensor] = self._buffers
        if (
            buffers["inv_freq"].dtype != torch.float32
        ):  # cast behind our back, by a wrapper that writes buffers directly
            buffers, _ = self.compute_frequencies(position_ids.device)
        inv_freq = buffers["inv_freq"].to(position_ids.device)
        if self.rope_type == "dynamic":
            # NTK-aware scaling: the base grows with the length of this very input. Nothing is remembered between
            # calls, so a result never depends on what was computed before.
            parameters = self.config.rope_parameters
            limit, factor = self.config.max_position_embeddings, parameters["factor"]
            width = 2 * inv_freq.shape[0]
            length = (position_ids.max() + 1).clamp(min=limit).float()
            growth = (factor * length / limit - (factor - 1)) ** (width / (width - 2))
            exponents = torch.arange(0, width, 2, dtype=torch.float32, device=inv_freq.device) / width
            return 1.0 / (parameters["rope_theta"] * growth) ** exponents
        if self.rope_type == "longrope":
            original = self.config.rope_parameters["original_max_position_embeddings"]
            return torch.where(
                position_ids.max() + 1 > original, buffers["long_inv_freq"].to(inv_freq.device), inv_freq
            )
        return inv_freq

    @torch.no_grad()
    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Rotation:
        """position_ids (B or 1, T) -> cos and sin, (B or 1, 1, T, R) each.

        Computed in fp32 and cast to `dtype`, once for all layers and heads.
        """
        angles = position_ids[:, None, :, None].float() * self.frequencies(position_ids)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        kind = RotationOfOneToken if may_turn_by_matrix(position_ids, dtype) else Rotation
        return kind(torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype))


Columns = tuple[Tensor, Tensor]  # extra coordinates of queries (1, H, 1, E) and keys (B or 1, 1 or G, K, E)

PART = 256  # numbers up to this are exact in bf16


def alibi_slopes(num_heads: int, *, bias_max: float = 8, device: torch.device | None = None) -> Tensor:
    """(H,) slopes, fp32: the powers 1..H of 2 ** (-bias_max / H).

    For a number of heads that is no power of two (the authors' code, not the paper): all slopes of the next lower
    power, then every other slope of the next higher one.

    Computed where it is used, and no buffer: nothing to be cast to half precision or lost when loading.
    """
    whole = 1 << (num_heads - 1).bit_length()  # the next higher power of two, or the number itself
    slopes = torch.exp2(-torch.arange(1, whole + 1, dtype=torch.float32, device=device) * (bias_max / whole))
    if whole != num_heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:num_heads]
    return slopes


class Alibi:
    """Linear biases in two forms that need no H x T x T tensor.

    Softmax does not see what is the same for all keys of a query, so that slope * (index of the key) stands for
    -slope * (distance).

    Args:
        num_heads: H.
        scaling: the factor on the scores that the attention core applies.
        bias_max: the last of H slopes is 2 ** -bias_max.
    """

    def __init__(self, *, num_heads: int, scaling: float, bias_max: float = 8) -> None:
        self.num_heads, self.scaling, self.bias_max = num_heads, scaling, bias_max

    def columns(self, index: Tensor, dtype: torch.dtype) -> Columns:
        """Coordinates to append to queries and keys, whose dot product times `scaling` is the bias: any kernel,
        causal or not, then adds the bias by itself.

        Half precision cannot hold an index beyond 256 or most slopes. Both are split into two numbers that it can
        hold, a multiple of 256 and the rest, leading digits and the next ones; products are summed in fp32.

        Args:
            index: (B or 1, K) index of each key in its row.
            dtype: of queries and keys.

        Returns:
            (1, H, 1, 4) and (B or 1, 1, K, 4)
        """
        slopes = alibi_slopes(self.num_heads, bias_max=self.bias_max, device=index.device) / self.scaling
        leading = slopes.to(dtype)
        rest = (slopes - leading.float()).to(dtype)
        query = torch.stack([PART * leading, leading, PART * rest, rest], dim=-1)
        parts = torch.stack([index // PART, index % PART], dim=-1).to(dtype)
        return query[None, :, None], torch.cat([parts, parts], dim=-1)[:, None]

    def bias(self, index: Tensor, own: Tensor | int) -> Tensor:
        """The bias itself, for a single query.

        Args:
            index: (B or 1, K) index of each key in its row; own: (B or 1, 1) or number, that of the query.

        Returns:
            (B or 1, H, 1, K), fp32, zero at the query's own key.
        """
        slopes = alibi_slopes(self.num_heads, bias_max=self.bias_max, device=index.device)
        return slopes[:, None, None] * (index - own)[:, None, None]


STEPS = 256  # decoding computes the buckets of its keys once in as many steps


class RelativeBias(nn.Embedding):
    """The table (buckets, H) of `RelativeBuckets`, a class of its own to be sharded as a unit: the block that holds it
    is not the only one that uses it."""


class RelativeBuckets:
    """Learned biases by distance. Near keys have a bucket for each distance, those farther away share buckets whose
    width grows with the logarithm of the distance, and the last bucket holds all that are at least `max_distance` away.

    Args:
        num_buckets: rows of the table.
        max_distance: where the last bucket begins.
        is_causal: whether keys after the query are out of sight. Where they are not, they have half of the buckets.
    """

    def __init__(self, *, num_buckets: int, max_distance: int, is_causal: bool) -> None:
        self.num_buckets, self.max_distance, self.is_causal = num_buckets, max_distance, is_causal
        self.kept: Tensor | None = None

    def buckets(self, distance: Tensor) -> Tensor:
        """Index of the key minus index of the query -> bucket, of the same shape."""
        if self.is_causal:
            return self.one_sided(-distance.clamp(max=0), self.num_buckets)
        half = self.num_buckets // 2
        return self.one_sided(distance.abs(), half) + half * (distance > 0)

    def one_sided(self, distance: Tensor, count: int) -> Tensor:
        """Distances of at least 0 -> 0 to count - 1."""
        exact = count // 2
        share = torch.log(distance.clamp(min=exact).float() / exact) / math.log(self.max_distance / exact)
        shared = exact + (share * (count - exact)).long()
        return torch.where(distance < exact, distance, shared.clamp(max=count - 1))

    def buckets_before(self, keys: int, device: torch.device) -> Tensor:
        """(keys,) buckets of the last `keys` keys for a query at the last of them; kept until another number is asked
        for."""
        if self.kept is None or self.kept.shape[0] != keys or self.kept.device != device:
            self.kept = self.buckets(torch.arange(1 - keys, 1, device=device))
        return self.kept

    def bias(
        self, table: nn.Module, *, queries: int, keys: int, device: torch.device, past_length: int | Tensor = 0
    ) -> Tensor:
        """What is added to the scores.

        It depends on the distance only, so that Q + K rows of the table are looked up, and not Q * K.

        Args:
            table: an embedding of shape (buckets, H).
            queries: Q, keys: K; past_length: index of the first query (a tensor in caches of fixed length), that of
                the first key being 0.
            device: where the scores are; the table may be elsewhere until it is used (offloaded weights).

        Returns:
            (1, H, Q, K); the smallest number for keys that are out of sight.
        """
        decoding = queries == 1 and self.is_causal and not torch.is_grad_enabled()
        if decoding and isinstance(past_length, int) and keys == past_length + 1 and not is_tracing(table.weight):
            # The step of decoding: looking up buckets that were computed before takes a fourth of the operations.
            rounded = (keys // STEPS + 1) * STEPS
            return table(self.buckets_before(rounded, device)[-keys:]).t()[None, :, None]
        span = queries + keys
        distance = torch.arange(span, device=device) - (queries - 1 + past_length)
        values = table(self.buckets(distance)).t()  # (H, Q + K)
        if self.is_causal:
            values = values.masked_fill(distance > 0, torch.finfo(values.dtype).min)
        # The first query begins at place Q - 1, each later one a place earlier: in Q copies side by side that is a step
        # of Q + K - 1 from one to the next.
        copies = values[:, None].expand(-1, queries, -1).flatten(1)[:, queries - 1 :]
        return copies[:, : queries * (span - 1)].view(-1, queries, span - 1)[None, ..., :keys]
