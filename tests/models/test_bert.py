"""What is special to BERT."""

import torch
from cases import CASES
from transformers import DynamicCache

import hf_ext


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
