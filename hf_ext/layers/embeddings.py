"""Table lookups with errors that a user can act on.

Shapes: B batch, T tokens, C model width.
"""

from torch import Tensor, nn


def look_up(table: nn.Module, index: Tensor, *, name: str, limit_name: str) -> Tensor:
    """Rows of an embedding table.

    On CPU an index outside the table raises inside torch; it is turned into a message about the argument, at no cost
    for the calls that succeed. On a GPU the kernel's own assertion is the only sign: checking there would stall it.

    Args:
        table: an embedding of shape (rows, C).
        index: (B, T) integers.
        name: the argument that holds them, for the message.
        limit_name: the configuration field that limits them, for the message.

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
            f"{name} holds {bad[0].item()}, outside 0..{rows - 1} ({limit_name}={rows}). "
            "Use the tokenizer of this checkpoint, or resize the embeddings of the model."
        ) from None
