"""What is special to BERT."""

import pytest
import torch
from cases import CASES
from transformers import DynamicCache

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


def test_the_encoder_is_projected_once_for_a_whole_generation():
    """A cache that the caller made holds no room for the encoder's keys; they were computed again at every token."""
    torch.manual_seed(0)
    fields = next(iter(CASES["ext_bert"].configs.values()))
    config = hf_ext.ExtBertConfig(**fields, is_decoder=True, add_cross_attention=True)
    model = hf_ext.ExtBertLMHeadModel(config).eval()
    projected = []
    key = model.bert.encoder.layer[0].crossattention.self.key
    key.register_forward_hook(lambda *call: projected.append(call))
    ids = torch.randint(5, config.vocab_size, (2, 6))
    encoder = torch.randn(2, 4, config.hidden_size)
    with torch.no_grad():
        whole = model(ids, encoder_hidden_states=encoder).logits
        projected.clear()
        cache, steps = DynamicCache(config=config), []
        for token in ids.split(1, dim=1):
            out = model(token, encoder_hidden_states=encoder, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    assert len(projected) == 1
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-5)
