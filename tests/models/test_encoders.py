"""What all encoders have in common, whatever their blocks."""

import pytest
import torch
from harness import Subject, build, subjects

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
