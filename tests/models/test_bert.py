"""What is special to BERT."""

import pytest
import torch
from cases import CASES

import hf_ext


@pytest.mark.parametrize("name", ["ExtBertForMaskedLM", "ExtBertForPreTraining"])
def test_vocabulary_head_leaves_padding_out(name):
    """The head over the vocabulary is a fifth of a base model: on padding it is wasted time and memory."""
    torch.manual_seed(0)
    config = next(iter(CASES["ext_bert"].configs.values()))
    model = getattr(hf_ext, name)(hf_ext.ExtBertConfig(**config)).eval()
    ids = torch.randint(5, model.config.vocab_size, (3, 9))
    mask = (torch.arange(9)[None] < torch.tensor([4, 9, 2])[:, None]).long()
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1].numel()))
    with torch.no_grad():
        logits, padded = (model(ids, mask, skip_padding=s, return_dict=False) for s in (None, False))
    logits, padded = logits[0], padded[0]
    assert rows == [15, 27]
    assert torch.equal(logits[mask == 0], torch.zeros(12, model.config.vocab_size))
    torch.testing.assert_close(logits[mask == 1], padded[mask == 1], rtol=0, atol=1e-5)
