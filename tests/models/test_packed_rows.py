"""Rows that hold several sequences, for all architectures."""

import pytest
import torch
from harness import Subject, assert_close, build, subjects

BASE_MODELS = subjects("base", configs="one", where=lambda s: not s.depends_on_length and not s.seq2seq)


@torch.no_grad()
@pytest.mark.parametrize("subject", BASE_MODELS, ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["packed", "masked"])
def test_boundaries_without_positions(subject: Subject, weights: bool) -> None:
    """Positions that run on over the boundaries are those of another text; asking for weights brings a mask."""
    model = build(subject.ours, subject, attn="eager")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, model.config.vocab_size, (1, n), generator=generator) for n in (3, 6, 1, 5)]
    boundaries = torch.tensor([0, 3, 9, 10, 15], dtype=torch.int32)
    separate = torch.cat([model(row).last_hidden_state[0] for row in rows])
    given = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    ids = torch.cat(rows, 1)
    if weights and subject.model_type == "ext_longformer":
        with pytest.raises(ValueError, match="no common layout of attention weights"):
            model(ids, **given, output_attentions=True)
        return
    packed = model(ids, **given, output_attentions=weights).last_hidden_state[0]
    assert_close(packed, separate, "packed")
