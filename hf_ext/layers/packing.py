"""Sequences packed end to end, so that no computation is spent on padding.

    padded, (B, T, C)                 packed, (1, N, C) with N = 3 + 5 + 1 real tokens

    a a a . .                         f a a a b b b b b
    b b b b b                         sequences sorted by length, boundaries 0 1 4 9
    f . . . .

Linear layers, norms and feed-forwards work on packed tokens as they stand. Attention must not cross a boundary: a GPU
kernel takes the boundaries (`cu_seqlens`, as in FlashAttention, Dao et al., 2022, https://arxiv.org/abs/2205.14135);
elsewhere sequences of similar length are attended together, bucket by bucket, so that the cost follows the sum of the
squared lengths and no N x N tensor exists.

Shapes: B batch, T tokens of a padded row, N packed tokens, S sequences, H heads, D head width, C model width,
n sequences of a bucket, L longest sequence of a bucket.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Sequences share a bucket while the longest is at most this much longer than the shortest, or no longer than
# SHORT tokens: below that, one more call costs more than the padding inside the bucket.
BUCKET_SLACK = 1.25
SHORT = 32

# Implementations that can attend to packed sequences; all others get the padded batch and its mask.
BUCKETED = ("eager", "sdpa")
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


@dataclass
class Bucket:
    """Sequences attended in one call, as a batch of n rows of L tokens."""

    start: int  # first packed token, when the sequences lie side by side and are equally long; else unused
    count: int  # n
    length: int  # L
    gather: Tensor | None  # (n * L,) packed token of each place, pads repeat a real token; None: a plain slice
    real: Tensor | None  # (n, L) bool, True at real tokens; None: no pads
    keep: Tensor | None  # (tokens,) places of the real tokens among the n * L; None: no pads
    tokens: int  # real tokens in the bucket

    def rows(self, x: Tensor) -> Tensor:
        """(N, ...) -> (n, L, ...); pads hold what some real token holds."""
        if self.gather is None:
            x = x[self.start : self.start + self.tokens]
        else:
            x = x.index_select(0, self.gather.to(x.device))
        return x.view(self.count, self.length, *x.shape[1:])


@dataclass
class Packing:
    """Where each packed token comes from and where sequences begin and end.

    Args:
        lengths: S sequence lengths, in packed order.
        indices: (N,) place of each packed token in the flattened padded batch; None if the input came packed.
        shape: (B, T) of the padded batch; None if the input came packed.
        device: where the index tensors live.
    """

    lengths: list[int]
    indices: Tensor | None
    shape: tuple[int, int] | None
    device: torch.device

    @functools.cached_property
    def cu_seqlens(self) -> Tensor:
        """(S + 1,) int32 boundaries."""
        return torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @property
    def buckets(self) -> list[Bucket]:
        """The sequences by length."""
        return self._bucketed[0]

    @property
    def restore(self) -> Tensor | None:
        """(N,) bucket order back to packed order; None if they are the same."""
        return self._bucketed[1]

    @functools.cached_property
    def _bucketed(self) -> tuple[list[Bucket], Tensor | None]:
        # Made when asked for: kernels that take boundaries, and what packs or unpacks only, need none.
        starts = [0, *itertools.accumulate(self.lengths)][:-1]
        order = sorted(range(len(starts)), key=self.lengths.__getitem__)
        buckets, in_bucket_order = [], []
        first = 0
        while first < len(order):
            last = first + 1
            shortest = self.lengths[order[first]]
            while last < len(order) and self.lengths[order[last]] <= max(BUCKET_SLACK * shortest, SHORT):
                last += 1
            members = order[first:last]
            buckets.append(self._bucket(members, starts))
            in_bucket_order += members
            first = last
        if in_bucket_order == list(range(len(order))):
            return buckets, None
        packed = torch.cat([torch.arange(starts[s], starts[s] + self.lengths[s]) for s in in_bucket_order])
        restore = torch.empty_like(packed)
        restore[packed] = torch.arange(len(packed))
        return buckets, restore.to(self.device)

    def _bucket(self, members: list[int], starts: list[int]) -> Bucket:
        lengths = [self.lengths[s] for s in members]
        longest = max(lengths)
        side_by_side = all(starts[b] == starts[a] + self.lengths[a] for a, b in zip(members, members[1:], strict=False))
        if side_by_side and min(lengths) == longest:
            return Bucket(starts[members[0]], len(members), longest, None, None, None, sum(lengths))
        offsets = torch.arange(longest)[None]  # (1, L)
        lengths_column = torch.tensor(lengths)[:, None]  # (n, 1)
        real = offsets < lengths_column  # (n, L)
        gather = torch.tensor([starts[s] for s in members])[:, None] + torch.minimum(offsets, lengths_column - 1)
        has_pads = min(lengths) < longest
        return Bucket(
            starts[members[0]],
            len(members),
            longest,
            gather.flatten().to(self.device),
            real.to(self.device) if has_pads else None,
            real.flatten().nonzero().squeeze(-1).to(self.device) if has_pads else None,
            sum(lengths),
        )

    @classmethod
    def from_mask(cls, attention_mask: Tensor) -> "Packing | None":
        """Plan for a padded batch.

        Args:
            attention_mask: (B, T), non-zero at real tokens; padding may be left, right or in between.

        Returns:
            None when nothing is padded, or nothing is real.
        """
        batch, tokens = attention_mask.shape
        real = attention_mask != 0
        counts = real.sum(-1)
        order = torch.argsort(counts, stable=True)
        lengths = counts[order].tolist()
        if not lengths or lengths[0] == tokens or lengths[-1] == 0:
            return None
        place = real[order].flatten().nonzero().squeeze(-1)  # (N,) in the batch sorted by length
        indices = order[place // tokens] * tokens + place % tokens
        return cls([n for n in lengths if n], indices, (batch, tokens), attention_mask.device)

    @classmethod
    def from_position_ids(cls, position_ids: Tensor, batch: int) -> "Packing | None":
        """Plan for rows that already hold several sequences each.

        Args:
            position_ids: (B or 1, T); a sequence begins where the positions go back to the first one of the row, as
                `DataCollatorWithFlattening` builds them. Gaps, repeats and other orders separate nothing. A row is
                always a boundary.
            batch: B, when `position_ids` is shared by all rows.

        Returns:
            None when every row is one sequence.
        """
        position_ids = position_ids.expand(batch, -1)
        starts_sequence = torch.ones_like(position_ids, dtype=torch.bool)
        first = position_ids[:, :1]
        starts_sequence[:, 1:] = (position_ids[:, 1:] == first) & (position_ids.diff(dim=-1) <= 0)
        # Positions that never move are switched off, not sequences of one token.
        starts_sequence[:, 1:] &= (position_ids != first).any(-1, keepdim=True)
        boundaries = starts_sequence.flatten().nonzero().squeeze(-1).tolist()
        if len(boundaries) == batch:
            return None
        ends = boundaries[1:] + [position_ids.numel()]
        return cls([b - a for a, b in zip(boundaries, ends, strict=True)], None, None, position_ids.device)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> "Packing":
        """Plan for one packed row whose (S + 1,) boundaries are given."""
        return cls([n for n in cu_seqlens.diff().tolist() if n], None, None, cu_seqlens.device)

    def sequence_ids(self, batch: int) -> Tensor:
        """(B, T) number of the sequence that each packed token belongs to."""
        counts = torch.tensor(self.lengths, device=self.device)
        return torch.repeat_interleave(torch.arange(len(counts), device=self.device), counts).view(batch, -1)

    def positions(self, batch: int) -> Tensor:
        """(B, T) place of each packed token in its sequence."""
        counts = torch.tensor(self.lengths, device=self.device)
        starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        return (torch.arange(len(starts), device=self.device) - starts).view(batch, -1)

    def pack(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (1, N, ...), real tokens only."""
        return x.flatten(0, 1).index_select(0, self.indices.to(x.device))[None]

    def unpack(self, pieces: Tensor | Iterable[Tensor]) -> Tensor:
        """(1, N, ...), whole or in pieces along N, -> (B, T, ...), zero at padding."""
        padded, done = None, 0
        for x in (pieces,) if isinstance(pieces, Tensor) else pieces:
            if padded is None:
                padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
            places = self.indices[done : done + x.shape[1]].to(x.device)
            padded.index_copy_(0, places, x[0])
            done += x.shape[1]
            del x  # before the next piece is made
        return padded.view(*self.shape, *padded.shape[1:])

    def bias_of_buckets(self, bias: Tensor) -> Tensor:
        """What is added to the scores, made once for all layers.

        One tensor and not one for each bucket: gradient checkpointing has to see it among the arguments of a block.

        Args:
            bias: (1, H, L, L) for the longest sequence, for tokens by their places in the sequence.

        Returns:
            (entries,), for each bucket (n or 1, H, L, L) with the smallest number at pads.
        """
        pieces = []
        for bucket in self.buckets:
            piece = bias[..., : bucket.length, : bucket.length]
            if bucket.real is not None:
                real = bucket.real.to(bias.device)[:, None, None, :]
                piece = torch.where(real, piece, torch.finfo(bias.dtype).min)
            pieces.append(piece.flatten())
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def split_bias(self, bucket_bias: Tensor, heads: int) -> list[Tensor]:
        """What `bias_of_buckets` made -> for each bucket (n or 1, H, L, L)."""
        shapes = [(1 if b.real is None else b.count, heads, b.length, b.length) for b in self.buckets]
        pieces = bucket_bias.split([math.prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def attend(
        self,
        attention: Callable[..., tuple[Tensor, Tensor | None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        implementation: str,
        is_causal: bool,
        dropout: float,
        scaling: float,
        sliding_window: int | None = None,
        bucket_bias: Tensor | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Attention inside each sequence only.

        Args:
            attention: the library's attention function for `implementation`, or one with its signature.
            query: (B, H, T, D); key and value: (B, G, T, D), where B * T = N packed tokens.
            sliding_window: keys that a query of causal attention sees, the last ones; None: all earlier ones. Under
                "sdpa" without a variable-length kernel, `attention` must know it.
            bucket_bias: (entries,) of `bias_of_buckets`, which says what is out of sight as well; without it nothing
                is added to the scores.

        Returns:
            (B, T, H, D)
        """
        batch, heads, tokens, _ = query.shape
        if implementation in FLASH:
            longest = max(self.lengths)
            boundaries = self.cu_seqlens.to(query.device)
            out, _ = attention(
                module,
                *(as_one_row(x) for x in (query, key, value)),
                None,
                dropout=dropout,
                scaling=scaling,
                cu_seq_lens_q=boundaries,
                cu_seq_lens_k=boundaries,
                max_length_q=longest,
                max_length_k=longest,
                is_causal=is_causal,
                sliding_window=sliding_window,
                **kwargs,
            )
            return out.view(batch, tokens, *out.shape[2:])
        # Token-major (N, H, D): a bucket is then a slice or one gather.
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        if implementation == "sdpa" and bucket_bias is None and has_varlen_kernel(query, dropout):
            out = varlen_kernel(
                query, key, value, self.cu_seqlens, max(self.lengths), is_causal, scaling, sliding_window
            )
            return out.view(batch, tokens, *out.shape[1:])
        outputs = []
        masks = [None] * len(self.buckets) if bucket_bias is None else self.split_bias(bucket_bias, heads)
        for bucket, mask in zip(self.buckets, masks, strict=True):
            rows = [bucket.rows(x).transpose(1, 2) for x in (query, key, value)]  # (n, H, L, D)
            if mask is None and implementation == "eager" and is_causal:
                mask = torch.ones(bucket.length, bucket.length, dtype=torch.bool, device=query.device).tril()
                mask = (mask if sliding_window is None else mask.triu(1 - sliding_window))[None, None]
            elif (
                mask is None and bucket.real is not None and not is_causal
            ):  # causal rows are padded on the right, out of sight
                mask = bucket.real.to(query.device)[:, None, None, :]
            out, _ = attention(
                module, *rows, mask, dropout=dropout, scaling=scaling, is_causal=is_causal and mask is None, **kwargs
            )
            out = out.flatten(0, 1)  # (n * L, H, D)
            outputs.append(out if bucket.keep is None else out.index_select(0, bucket.keep.to(out.device)))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if self.restore is not None:
            out = out.index_select(0, self.restore.to(out.device))
        return out.view(batch, tokens, *out.shape[1:])


def has_varlen_kernel(query: Tensor, dropout: float) -> bool:
    """Whether torch's variable-length flash kernel takes this call: CUDA, half precision, no attention dropout."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and dropout == 0.0
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


def varlen_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    is_causal: bool,
    scaling: float,
    sliding_window: int | None = None,
) -> Tensor:
    """torch's variable-length attention over packed tokens. query (N, H, D), key and value (N, G, D) -> (N, H, D)"""
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = cu_seqlens.to(query.device)
    return varlen_attn(
        query,
        key,
        value,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scaling,
        window_size=(sliding_window - 1 if sliding_window else -1, 0) if is_causal else (-1, -1),
        enable_gqa=key.shape[1] != query.shape[1],
    )


def as_one_row(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (1, H, B * T, D)"""
    return x.transpose(1, 2).reshape(1, -1, x.shape[1], x.shape[3]).transpose(1, 2)


@dataclass
class CrossPacking:
    """Queries of a padded batch against packed keys: cross-attention that leaves the encoder's padding out.

    Args:
        keys: plan of the encoder's tokens, made from a mask. A row without any real token gets zeros.
    """

    keys: Packing

    @functools.cached_property
    def rows(self) -> Tensor:
        """(S,) row of the batch that each sequence of keys belongs to."""
        return self.keys.indices[self.keys.cu_seqlens[:-1].long()] // self.keys.shape[1]

    def attend(
        self,
        attention: Callable[..., tuple[Tensor, Tensor | None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        implementation: str,
        is_causal: bool,
        dropout: float,
        scaling: float,
        **kwargs: object,
    ) -> Tensor:
        """Attention of each row's queries to the keys of the same row.

        Args:
            attention, implementation, dropout, scaling: as `Packing.attend`.
            query: (B, H, Q, D); key and value: (1, G, N, D).
            is_causal: must be False: the keys are another sequence.

        Returns:
            (B, Q, H, D)
        """
        assert not is_causal
        batch, _, tokens, _ = query.shape
        rows = self.rows.to(query.device)
        if implementation in FLASH or (implementation == "sdpa" and has_varlen_kernel(query, dropout)):
            out = self._by_kernel(
                attention, module, query.index_select(0, rows), key, value, implementation, dropout, scaling, **kwargs
            )
        else:
            key, value = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
            outputs, first = [], 0
            for bucket in self.keys.buckets:  # a plan from a mask is sorted by length, and so are its buckets
                keys, values = (bucket.rows(x).transpose(1, 2) for x in (key, value))  # (n, G, L, D)
                queries = query.index_select(0, rows[first : first + bucket.count])
                mask = None if bucket.real is None else bucket.real.to(query.device)[:, None, None, :]
                outputs.append(
                    attention(
                        module, queries, keys, values, mask, dropout=dropout, scaling=scaling, is_causal=False, **kwargs
                    )[0]
                )
                first += bucket.count
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.new_zeros(batch, *out.shape[1:]).index_copy(0, rows, out)

    def _by_kernel(
        self,
        attention: Callable[..., tuple[Tensor, Tensor | None]],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        implementation: str,
        dropout: float,
        scaling: float,
        **kwargs: object,
    ) -> Tensor:
        """query (S, H, Q, D) of the rows that have keys, key and value (1, G, N, D) -> (S, Q, H, D)"""
        sequences, _, tokens, _ = query.shape
        boundaries = torch.arange(sequences + 1, dtype=torch.int32, device=query.device) * tokens
        key_boundaries, longest = self.keys.cu_seqlens.to(query.device), max(self.keys.lengths)
        if implementation in FLASH:
            out, _ = attention(
                module,
                as_one_row(query),
                key,
                value,
                None,
                dropout=dropout,
                scaling=scaling,
                cu_seq_lens_q=boundaries,
                cu_seq_lens_k=key_boundaries,
                max_length_q=tokens,
                max_length_k=longest,
                is_causal=False,
                **kwargs,
            )
        else:
            from torch.nn.attention.varlen import varlen_attn

            query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
            out = varlen_attn(
                query,
                key,
                value,
                boundaries,
                key_boundaries,
                tokens,
                longest,
                scale=scaling,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        return out.view(sequences, tokens, *out.shape[-2:])
