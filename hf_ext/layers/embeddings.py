"""Table lookups with errors that a user can act on.

Shapes: B batch, T tokens, P cached tokens, C model width.
"""

import torch
from torch import Tensor, nn

TOKEN_ADVICE = "Use the tokenizer of this checkpoint, or resize the embeddings of the model."
POSITION_ADVICE = "Shorten the input, or generate fewer tokens: there are no positions beyond."


def look_up(table: nn.Module, index: Tensor, *, name: str, limit_name: str, advice: str = TOKEN_ADVICE) -> Tensor:
    """Rows of an embedding table.

    On CPU an index outside the table raises inside torch; it is turned into a message about the argument, at no cost
    for the calls that succeed. On a GPU the kernel's own assertion is the only sign: checking there would stall it.

    Args:
        table: an embedding of shape (rows, C).
        index: (B, T) integers.
        name: the argument that holds them, for the message.
        limit_name: the configuration field that limits them, for the message.
        advice: what to do about an index outside, for the message.

    Returns:
        (B, T, C)

    Raises:
        ValueError: an index lies outside the table.
    """
    try:
        return table(index)
    except IndexError:
        rows = table.weight.shape[0]
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
) -> Tensor:
    """Learned positions; where none are given, those that follow the cached tokens.

    Args:
        table: an embedding of shape (positions, C).
        position_ids: (B or 1, T), or None for P..P+T-1.
        tokens: T.
        past_length: P; a tensor in caches of fixed length.
        limit_name: the configuration field with the size of the table, for the message.

    Returns:
        (B or 1, T, C)

    Raises:
        ValueError: the table has no such position.
    """
    if position_ids is None:
        limit = table.weight.shape[0]
        if isinstance(past_length, int) and past_length + tokens > limit:
            raise ValueError(
                f"the input has {past_length + tokens} tokens, but the model has learned positions for {limit} "
                f"({limit_name}={limit}); truncate the input."
            )
        position_ids = (torch.arange(tokens, device=device) + past_length)[None]
    return look_up(table, position_ids, name="position_ids", limit_name=limit_name, advice=POSITION_ADVICE)
