"""What is special to Falcon: rounded linear biases, in both implementations, and one cache entry per group."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, FalconConfig, FalconForCausalLM, StaticCache

from hf_ext import ExtFalconConfig, ExtFalconForCausalLM
from hf_ext.inspection import cache_bytes

FIELDS = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
ALIBI = {
    "rw": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "multi-query": {"alibi": True},
    "grouped": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
}
each_alibi = pytest.mark.parametrize("fields", ALIBI.values(), ids=ALIBI)


def pair(fields: dict, tmp_path, attn: str = "sdpa") -> tuple[FalconForCausalLM, ExtFalconForCausalLM]:
    torch.manual_seed(0)
    stock = FalconForCausalLM(FalconConfig(**FIELDS, **fields, initializer_range=0.2)).eval()
    stock.save_pretrained(tmp_path)
    return stock, ExtFalconForCausalLM.from_pretrained(tmp_path, attn_implementation=attn).eval()


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(1, 50, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


@each_alibi
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@torch.no_grad()
def test_rounding_of_long_distances(fields: dict, attn: str, tmp_path) -> None:
    """Beyond 256 tokens the official biases move in steps; an exact slope would give other numbers."""
    stock, ours = pair(fields, tmp_path, attn)
    tokens = ids(1, 700)
    expected = stock(input_ids=tokens).logits
    torch.testing.assert_close(ours(input_ids=tokens).logits, expected, atol=5e-5, rtol=1e-5)
    exact = ours.transformer.alibi
    exact.rounded = lambda index: type(exact).rounded(exact, index % 2) * 0 + 0.3 * index[:, None].float()
    assert (ours(input_ids=tokens).logits - expected).abs().max() > 1e-2


@each_alibi
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@torch.no_grad()
def test_cached_steps(fields: dict, attn: str, tmp_path) -> None:
    """With a cache of fixed length too, where the official class fails."""
    _, ours = pair(fields, tmp_path, attn)
    tokens = ids(2, 12)
    expected = ours(input_ids=tokens).logits
    for cache in (DynamicCache(), StaticCache(config=ours.config, max_cache_len=20)):
        pieces = [
            ours(input_ids=tokens[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 5), (5, 6), (6, 9), (9, 10), (10, 11), (11, 12))
        ]
        torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-5, rtol=1e-5)


@each_alibi
@torch.no_grad()
def test_generation_with_a_cache_of_fixed_length(fields: dict, tmp_path) -> None:
    _, ours = pair(fields, tmp_path)
    tokens = ids(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    tokens[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 10, "eos_token_id": None, "do_sample": False}
    plain = ours.generate(tokens, **options)
    assert torch.equal(ours.generate(tokens, **options, cache_implementation="static"), plain)


@torch.no_grad()
def test_attention_weights_add_the_biases_once(tmp_path) -> None:
    _, ours = pair(ALIBI["rw"], tmp_path, "eager")
    tokens = ids(1, 9)
    weights = ours(input_ids=tokens, output_attentions=True).attentions[0]
    layer = ours.transformer.h[0]
    fused = layer.self_attention.query_key_value(layer.input_layernorm(ours.transformer.word_embeddings(tokens)))
    query, key, _ = fused.view(1, 9, 4, 3, 8).permute(3, 0, 2, 1, 4)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    bias = (slopes.bfloat16()[:, None] * torch.arange(9).bfloat16()).float()  # (H, K)
    scores = (query @ key.transpose(2, 3) + bias[None, :, None]) * 8**-0.5
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    torch.testing.assert_close(weights, scores.masked_fill(hidden, -torch.inf).softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({}, 1),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
        ({"multi_query": False}, 4),
        (ALIBI["multi-query"], 1),
        (ALIBI["grouped"], 2),
    ],
)
@torch.no_grad()
def test_cache_holds_one_entry_per_group(fields: dict, kv_heads: int) -> None:
    model = ExtFalconForCausalLM(ExtFalconConfig(**FIELDS, **fields)).eval()
    cache = model(input_ids=ids(2, 7), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (2, kv_heads, 7, 8)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == cache_bytes(model.config, batch_size=2, length=7)
