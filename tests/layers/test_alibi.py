"""ALiBi against the dense formula: slopes, forward and gradients, padding, packed rows, decoding, half precision."""

import copy
import math

import pytest
import torch
from operators import LargestTensor
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from hf_ext import ExtBloomConfig, ExtBloomForCausalLM, ExtBloomModel
from hf_ext.layers.alibi import AlibiAttentionCore, append
from hf_ext.layers.attention import eager_attention
from hf_ext.layers.packing import Packing
from hf_ext.layers.positions import Alibi, alibi_slopes
from hf_ext.modeling import add_bias, places_after_first_seen

# --- slopes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (2, [4, 8]),
        (3, [4, 8, 2]),
        (4, [2, 4, 6, 8]),
        (5, [2, 4, 6, 8, 1]),
        (6, [2, 4, 6, 8, 1, 3]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (16, [0.5 * k for k in range(1, 17)]),
        (17, [*(0.5 * k for k in range(1, 17)), 0.25]),
    ],
)
def test_slopes_by_hand(heads: int, exponents: list[float]) -> None:
    expected = torch.tensor([2.0**-e for e in exponents])
    torch.testing.assert_close(alibi_slopes(heads), expected, atol=0, rtol=1e-6)


def paper_slopes(heads: int) -> list[float]:
    """The authors' recipe, by recursion (https://github.com/ofirpress/attention_with_linear_biases)."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return paper_slopes(lower) + paper_slopes(2 * lower)[0::2][: heads - lower]


@pytest.mark.parametrize("heads", range(1, 18))
def test_slopes_are_the_authors(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert slopes.shape == (heads,) and slopes.dtype == torch.float32
    torch.testing.assert_close(slopes.tolist(), paper_slopes(heads), atol=0, rtol=1e-6)


def test_bias_max_is_the_last_exponent() -> None:
    torch.testing.assert_close(alibi_slopes(4, bias_max=4), torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    torch.testing.assert_close(alibi_slopes(2, bias_max=16), torch.tensor([2.0**-8, 2.0**-16]))


# --- the core -----------------------------------------------------------------------------------------------------


class Runtime:
    """The one field that the core reads from a configuration."""

    def __init__(self, implementation: str) -> None:
        self._attn_implementation = implementation


def core(heads: int, width: int, implementation: str, kv_heads: int | None = None, scaling: float | None = None):
    return AlibiAttentionCore(
        config=Runtime(implementation),
        layer_idx=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        is_causal=True,
        scaling=scaling,
    ).eval()


def formula(query: Tensor, key: Tensor, value: Tensor, scaling: float, hidden: Tensor, index: Tensor) -> Tensor:
    """query (B, H, Q, D), key and value (B, G, K, D), hidden (B or 1, 1, Q, K) bool, index (B or 1, K) of the keys
    -> (B, Q, H * D): minus slope times distance, from the full tensor."""
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    queries = index[:, -query.shape[2] :]
    distance = (queries[:, :, None] - index[:, None, :])[:, None]
    slopes = torch.tensor(paper_slopes(heads), dtype=query.dtype)[:, None, None]
    scores = query @ key.transpose(2, 3) * scaling - slopes * distance
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return (weights.nan_to_num() @ value).transpose(1, 2).flatten(2)


def random_heads(seed: int, batch: int, heads: int, kv_heads: int, tokens: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, n, tokens, width, generator=generator) for n in (heads, kv_heads, kv_heads)]


def future(tokens: int) -> Tensor:
    """(1, 1, T, T) True where a key comes after the query."""
    return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]


def run(module: AlibiAttentionCore, tensors: list[Tensor], mask: Tensor | None, index: Tensor, heads: int, **kwargs):
    columns = Alibi(num_heads=heads, scaling=module.scaling).columns(index, tensors[0].dtype)
    return module.attend_heads(*tensors, attention_mask=mask, alibi=columns, **kwargs)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "tokens", "scaling"),
    [(1, 1, 2, 1, None), (4, 4, 8, 7, None), (3, 3, 5, 9, 0.7), (6, 2, 16, 12, None), (12, 1, 7, 20, 1.0)],
)
def test_forward_and_gradients(heads, kv_heads, width, tokens, scaling, implementation) -> None:
    module = core(heads, width, implementation, kv_heads, scaling)
    tensors = [x.requires_grad_() for x in random_heads(tokens, 2, heads, kv_heads, tokens, width)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    index = torch.arange(tokens)[None]
    mask = ~future(tokens) if implementation == "eager" else None
    out, weights = run(module, tensors, mask, index, heads)
    expected = formula(*doubles, module.scaling, future(tokens), index)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    if implementation == "eager":
        assert weights.shape == (2, heads, tokens, tokens)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, heads, tokens))
    factor = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((out * factor).sum(), tensors)
    wanted = torch.autograd.grad((expected * factor).sum(), doubles)
    for a, b in zip(got, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5)


def test_what_softmax_does_not_see() -> None:
    """The index may start anywhere, in each row."""
    module, tensors = core(4, 8, "sdpa"), random_heads(0, 2, 4, 4, 9, 8)
    index = torch.arange(9)[None]
    out, _ = run(module, tensors, None, index, 4)
    shifted, _ = run(module, tensors, None, index + torch.tensor([[5], [300]]), 4)
    torch.testing.assert_close(shifted, out, atol=1e-5, rtol=1e-5)


def test_append() -> None:
    x, columns = torch.randn(2, 3, 4, 5), torch.randn(1, 3, 1, 2, dtype=torch.float64)
    wide = append(x, columns, 8)
    assert wide.shape == (2, 3, 4, 8) and wide.dtype == x.dtype
    assert torch.equal(wide[..., :5], x)
    assert torch.equal(wide[..., 5:7], columns.float().expand(2, 3, 4, 2))
    assert (wide[..., 7] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_are_exact(dtype: torch.dtype) -> None:
    """In bf16, 256 and 257 are one number, and most slopes are none."""
    alibi = Alibi(num_heads=12, scaling=80**-0.5)
    index = torch.arange(5000)[None]
    query, key = alibi.columns(index, dtype)
    assert query.dtype == key.dtype == dtype
    bias = (query.double() * key.double()).sum(-1)[0] * alibi.scaling  # (H, K)
    expected = torch.tensor(paper_slopes(12), dtype=torch.float64)[:, None] * index
    assert ((bias - expected).abs() <= 2e-5 * expected).all()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 2500), (torch.bfloat16, 300), (torch.bfloat16, 2500)])
def test_long_inputs_are_no_worse_than_the_official_way(dtype, tokens, implementation) -> None:
    """Official classes add slope * index, rounded to the model's type, to the scores. Both are held against fp64."""
    heads, width = 3, 16
    module = core(heads, width, implementation)
    tensors = [x.to(dtype) for x in random_heads(2, 1, heads, heads, tokens, width)]
    index = torch.arange(tokens)[None]
    exact = formula(*(x.double() for x in tensors), module.scaling, future(tokens), index)
    bias = (alibi_slopes(heads)[None, :, None, None] * index).to(dtype)
    official, _ = eager_attention(nn.Module().eval(), *tensors, add_bias(~future(tokens), bias, dtype), module.scaling)
    out, _ = run(module, tensors, ~future(tokens) if implementation == "eager" else None, index, heads)
    errors = [(x.double() - exact).square().mean().sqrt() for x in (out, official.flatten(2))]
    assert errors[0] <= errors[1] * 1.05
    if dtype == torch.float32:
        assert errors[0] < 2e-5
    elif implementation == "sdpa":  # scores in fp32 inside the kernel: only inputs, weights and output are rounded
        assert errors[0] < 1e-2


# --- packed rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_packed_rows_equal_separate_ones(implementation: str) -> None:
    lengths, heads, width = [3, 6, 1, 5, 5], 3, 8
    module = core(heads, width, implementation)
    plan = Packing(lengths, None, None, torch.device("cpu"))
    assert plan.positions(1).tolist() == [[i for n in lengths for i in range(n)]]
    assert plan.positions(2).tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]
    tensors = random_heads(4, 1, heads, heads, sum(lengths), width)
    out, _ = run(module, tensors, None, plan.positions(1), heads, packing=plan)
    start = 0
    for n in lengths:
        piece = [x[:, :, start : start + n] for x in tensors]
        expected = formula(*piece, module.scaling, future(n), torch.arange(n)[None])
        torch.testing.assert_close(out[:, start : start + n], expected, atol=1e-5, rtol=1e-5)
        start += n


# --- in a model ---------------------------------------------------------------------------------------------------


def tiny(**fields: object) -> ExtBloomConfig:
    return ExtBloomConfig(
        **{"vocab_size": 50, "hidden_size": 24, "n_head": 3, "n_layer": 2, "pad_token_id": 0, **fields}
    )


def model(attn: str = "sdpa", **fields: object) -> ExtBloomForCausalLM:
    torch.manual_seed(0)
    config = tiny(initializer_range=0.3, **fields)
    config._attn_implementation = attn
    return ExtBloomForCausalLM(config).eval()


def ids(batch: int, tokens: int) -> Tensor:
    return torch.randint(1, 50, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


MASKS = {
    "right": [[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 0, 1]],
}


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("pattern", MASKS)
@torch.no_grad()
def test_padding_counts_for_no_distance(pattern: str, attn: str) -> None:
    """Real tokens give what they give alone, without the padding, in one call and in steps."""
    ours, mask = model(attn), torch.tensor(MASKS[pattern])
    tokens = ids(2, 7)
    logits = ours(input_ids=tokens, attention_mask=mask).logits
    cache, steps = None, []
    for t in range(7):
        output = ours(
            input_ids=tokens[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True
        )
        cache = output.past_key_values
        steps.append(output.logits)
    steps = torch.cat(steps, 1)
    for row in range(2):
        real = mask[row].bool()
        alone = ours(input_ids=tokens[row][real][None]).logits[0]
        torch.testing.assert_close(logits[row][real], alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(steps[row][real], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@torch.no_grad()
def test_four_dimensional_mask(attn: str) -> None:
    """Generation with a cache of fixed length hands over a mask that no index can be counted from."""
    ours, tokens = model(attn), ids(2, 6)
    expected = ours(input_ids=tokens).logits
    causal = ~future(6).expand(2, 1, 6, 6)
    given = causal if attn == "sdpa" else torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float).min)
    torch.testing.assert_close(ours(input_ids=tokens, attention_mask=given).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_type", [DynamicCache, StaticCache])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@torch.no_grad()
def test_cached_steps(attn: str, cache_type: type) -> None:
    ours, tokens = model(attn), ids(2, 12)
    expected = ours(input_ids=tokens).logits
    cache = DynamicCache() if cache_type is DynamicCache else StaticCache(config=ours.config, max_cache_len=20)
    pieces = [
        ours(input_ids=tokens[:, a:b], past_key_values=cache).logits
        for a, b in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11), (11, 12))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-5, rtol=1e-5)
    assert cache.layers[0].keys.shape[-1] == 8, "the cache holds plain keys"


@torch.no_grad()
def test_bf16_is_close_to_fp32_and_decodes_alike() -> None:
    reference = model()
    half = copy.deepcopy(reference).bfloat16()
    reference = copy.deepcopy(half).float()  # the same weights
    tokens = ids(2, 40)
    expected = reference(input_ids=tokens).logits
    logits = half(input_ids=tokens).logits.float()
    assert (logits - expected).norm() < 0.03 * expected.norm()
    cache = half(input_ids=tokens[:, :-1], use_cache=True).past_key_values
    last = half(input_ids=tokens[:, -1:], past_key_values=cache).logits.float()
    assert (last[:, 0] - expected[:, -1]).norm() < 0.03 * expected[:, -1].norm()


def test_autocast() -> None:
    """Projections return half precision while the hidden states are fp32; the slopes are split for what is returned."""
    ours, tokens = model(), ids(2, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ours(input_ids=tokens, labels=tokens)
        output.loss.backward()
    expected = ours(input_ids=tokens, labels=tokens)
    assert (output.logits.float() - expected.logits).norm() < 0.05 * expected.logits.norm()
    assert abs(output.loss - expected.loss) < 0.05
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize("pattern", ["none", "left", "packed"])
def test_nothing_of_the_size_of_all_scores(pattern: str) -> None:
    """Prefill and training step; with padding one mask of T x T for all heads is all there is."""
    heads, tokens = 8, 512
    torch.manual_seed(0)
    ours = ExtBloomModel(tiny(n_head=heads, hidden_size=16, n_layer=1))
    inputs = {"input_ids": ids(1, tokens)}
    if pattern == "left":
        inputs["attention_mask"] = torch.ones(1, tokens, dtype=torch.long)
        inputs["attention_mask"][:, :5] = 0
    elif pattern == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(200), torch.arange(312)])[None]
    with LargestTensor() as watch:
        ours.train()(**inputs).last_hidden_state.sum().backward()
        with torch.no_grad():
            ours.eval()(**inputs, use_cache=True)
    limit = tokens * tokens if pattern == "left" else tokens * heads * 16
    assert watch.elements <= limit < heads * tokens * tokens


def test_nothing_is_kept_in_buffers() -> None:
    assert not dict(ExtBloomModel(tiny()).named_buffers())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_texts_side_by_side_begin_at_zero(kind: str) -> None:
    """Places of another text's keys in front: Falcon rounds its biases, which then depend on where they begin."""
    seen = torch.zeros(1, 1, 4, 7, dtype=torch.bool)
    seen[0, 0, 0, :3] = True  # the third token of a text, whose keys are in the pages
    seen[0, 0, 1, 3:5] = seen[0, 0, 2, 3:6] = True  # two tokens of another one
    seen[0, 0, 3, 6:] = True  # the first of a third
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float).min)
    assert places_after_first_seen(mask).tolist() == [[0, 1, 2, 0, 1, 2, 0]]


def test_pages_without_a_mask() -> None:
    """A kernel that reads the pages by itself would leave the biases out."""
    core = AlibiAttentionCore(
        config=ExtBloomConfig(attn_implementation="sdpa"), layer_idx=0, num_heads=2, head_dim=4, is_causal=True
    )
    heads = torch.zeros(1, 2, 3, 4)
    columns = Alibi(num_heads=2, scaling=0.5).columns(torch.arange(3)[None], torch.float)
    with pytest.raises(ValueError, match="auto_switch_to_flash"):
        core.mix(heads, heads, heads, attention_mask=None, alibi=columns, cache=object())
