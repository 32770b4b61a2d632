"""Table lookups with errors that a user can act on.

Shapes: B batch, T tokens, P cached tokens, C model width.
"""

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

TOKEN_ADVICE = "Use the tokenizer of this checkpoint, or resize the embeddings of the model."
POSITION_ADVICE = "Shorten the input, or generate fewer tokens: there are no positions beyond."


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by a factor when they are looked up (Vaswani et al., 2017, section 3.4).

    Args:
        rows: number of rows; width: C.
        padding_idx: the row that is not trained.
        scale: the factor.
    """

    def __init__(self, rows: int, width: int, padding_idx: int | None, *, scale: float) -> None:
        super().__init__(rows, width, padding_idx)
        self.scale = scale

    def forward(self, index: Tensor) -> Tensor:
        """(B, T) -> (B, T, C)"""
        return super().forward(index) * self.scale


def look_up(
    table: nn.Module, index: Tensor, *, name: str, limit_name: str, advice: str = TOKEN_ADVICE, offset: int = 0
) -> Tensor:
    """Rows of an embedding table.

    On CPU an index outside the table raises inside torch; it is turned into a message about the argument, at no cost
    for the calls that succeed. On a GPU the kernel's own assertion is the only sign: checking there would stall it.

    Args:
        table: an embedding of shape (rows, C).
        index: (B, T) integers.
        name: the argument that holds them, for the message.
        limit_name: the configuration field that limits them, for the message.
        advice: what to do about an index outside, for the message.
        offset: rows at the start of the table that no index means.

    Returns:
        (B, T, C)

    Raises:
        ValueError: an index lies outside the table.
    """
    try:
        return table(index + offset if offset else index)
    except IndexError:
        rows = table.weight.shape[0] - offset
        bad = index[(index < 0) | (index >= rows)]
        raise ValueError(
            f"{name} holds {bad[0].item()}, outside 0..{rows - 1} ({limit_name}={rows}). {advice}"
        ) from None


def look_up_positions(
    table: nn.Module,
    position_ids: Tensor | None,
    *,
    tokens: int,
    past_length: int | Tensor,
    device: torch.device,
    limit_name: str,
    offset: int = 0,
) -> Tensor:
    """Learned positions; where none are given, those that follow the cached tokens.

    Args:
        table: an embedding of shape (positions, C).
        position_ids: (B or 1, T), or None for P..P+T-1.
        tokens: T.
        past_length: P; a tensor in caches of fixed length.
        limit_name: the configuration field with the size of the table, for the message.
        offset: rows at the start of the table that are no positions.

    Returns:
        (B or 1, T, C)

    Raises:
        ValueError: the table has no such position.
    """
    if position_ids is None:
        limit = table.weight.shape[0] - offset
        if isinstance(past_length, int) and past_length + tokens > limit:
            raise ValueError(
                f"the input has {past_length + tokens} tokens, but the model has learned positions for {limit} "
                f"({limit_name}={limit}); truncate the input."
            )
        position_ids = (torch.arange(tokens, device=device) + past_length)[None]
    return look_up(
        table, position_ids, name="position_ids", limit_name=limit_name, advice=POSITION_ADVICE, offset=offset
    )


def embed_words_and_positions(
    words: nn.Module,
    positions: nn.Module,
    *,
    input_ids: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    past_length: int | Tensor,
    limit_name: str,
) -> Tensor:
    """The sum that the GPT family starts from: words, learned positions, and segments, which are words too.

    Args:
        words: an embedding of shape (vocabulary, C); positions: one of shape (positions, C).
        input_ids: (B, T); or inputs_embeds: (B, T, C).
        token_type_ids: (B, T) words of the vocabulary, or None.
        position_ids, past_length, limit_name: as `look_up_positions`.

    Returns:
        (B, T, C)

    Raises:
        ValueError: an index lies outside its table.
    """
    if inputs_embeds is None:
        inputs_embeds = look_up(words, input_ids, name="input_ids", limit_name="vocab_size")
    x = inputs_embeds + look_up_positions(
        positions,
        position_ids,
        tokens=inputs_embeds.shape[1],
        past_length=past_length,
        device=inputs_embeds.device,
        limit_name=limit_name,
    )
    if token_type_ids is not None:
        x = x + look_up(words, token_type_ids, name="token_type_ids", limit_name="vocab_size")
    return x


def positions_after_padding(
    table: nn.Module,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    *,
    padding_idx: int,
    past_length: int | Tensor = 0,
) -> Tensor:
    """Positions as fairseq counts them: P + 1, P + 2, ... beyond the padding id.

    Ids that are the padding id stay on its position and are not counted, whatever the attention mask says; embeddings
    do not show which tokens are padding, and all are counted.

    Args:
        table: the embedding of the positions, (positions, C).
        input_ids: (B, T); or inputs_embeds: (B, T, C).
        padding_idx: the padding id.
        past_length: P; a tensor in caches of fixed length.

    Returns:
        (B or 1, T)

    Raises:
        ValueError: there are more tokens than positions.
    """
    if input_ids is None:
        tokens = inputs_embeds.shape[1]
        counts = torch.arange(1, tokens + 1, device=inputs_embeds.device)[None] + past_length
    else:
        tokens, real = input_ids.shape[1], input_ids != padding_idx
        counts = (real.cumsum(1) + past_length) * real
    limit = table.weight.shape[0] - padding_idx - 1
    if isinstance(past_length, int) and not is_tracing(counts) and tokens + past_length > limit:
        longest = int(counts.max())  # the count is read only where padding decides whether the row fits
        if longest > limit:
            raise ValueError(
                f"the input has {longest} tokens, but the model has learned positions for {limit} "
                f"(max_position_embeddings - pad_token_id - 1 = {limit}); truncate the input."
            )
    return counts + padding_idx
