"""What all encoders have in common, whatever their blocks."""

import pytest
import torch
from harness import Subject, assert_close, build, subjects

from hf_ext.modeling import EncoderModel

VOCABULARY_HEADS = subjects("masked", "pretraining", configs="one", where=lambda s: not s.causal)


@pytest.mark.parametrize("subject", VOCABULARY_HEADS, ids=str)
def test_vocabulary_head_leaves_padding_out(subject: Subject) -> None:
    """The head over the vocabulary is a fifth of a base model: on padding it is wasted time and memory."""
    model = build(subject.ours, subject)
    ids = torch.randint(5, model.config.vocab_size, (3, 9))
    mask = (torch.arange(9)[None] < torch.tensor([4, 9, 2])[:, None]).long()
    ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1].numel()))
    with torch.no_grad():
        logits, padded = (model(ids, mask, skip_padding=s, return_dict=False)[0] for s in (None, False))
    assert rows == [15, 27]
    assert torch.equal(logits[mask == 0], torch.zeros(12, model.config.vocab_size))
    torch.testing.assert_close(logits[mask == 1], padded[mask == 1], rtol=0, atol=1e-5)


ENCODERS = subjects("base", configs="one", where=lambda s: issubclass(s.ours, EncoderModel))


@torch.no_grad()
@pytest.mark.parametrize("subject", ENCODERS, ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["packed", "masked"])
def test_boundaries_without_positions(subject: Subject, weights: bool) -> None:
    """Positions that run on over the boundaries are those of another text; asking for weights brings a mask."""
    model = build(subject.ours, subject, attn="eager")
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, model.config.vocab_size, (1, n), generator=generator) for n in (3, 6, 1, 5)]
    boundaries = torch.tensor([0, 3, 9, 10, 15], dtype=torch.int32)
    separate = torch.cat([model(row).last_hidden_state[0] for row in rows])
    given = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    packed = model(torch.cat(rows, 1), **given, output_attentions=weights).last_hidden_state[0]
    assert_close(packed, separate, "packed")
