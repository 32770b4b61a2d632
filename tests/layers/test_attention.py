"""The attention core against the formula: masks, grouped queries, caches, rotation, cross-attention."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, DynamicCache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ext.layers.attention import AttentionCore, CrossAttentionCore, eager_attention
from hf_ext.layers.positions import rotate


class Runtime:
    """The one field that the core reads from a configuration."""

    def __init__(self, implementation: str) -> None:
        self._attn_implementation = implementation


def formula(query: Tensor, key: Tensor, value: Tensor, scaling: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(B, H, Q, D), (B, G, K, D), bias broadcastable to (B, H, Q, K) -> (B, Q, H, D) and weights, loop by loop."""
    batch, heads, queries, _ = query.shape
    groups, keys = heads // key.shape[1], key.shape[2]
    full = torch.zeros(batch, heads, queries, keys, dtype=query.dtype) if bias is None else bias
    full = full.expand(batch, heads, queries, keys)
    rows = []
    for b in range(batch):
        for h in range(heads):
            scores = torch.einsum("qd,kd->qk", query[b, h], key[b, h // groups]) * scaling + full[b, h]
            scores = (scores - scores.amax(-1, keepdim=True)).exp()
            rows.append(scores / scores.sum(-1, keepdim=True))
    weights = torch.stack(rows).view(batch, heads, queries, keys)
    out = torch.stack([weights[:, h] @ value[:, h // groups] for h in range(heads)], 2)
    return out, weights


def random_heads(seed: int, *, batch: int, heads: int, kv_heads: int, queries: int, keys: int, width: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, queries, width), (batch, kv_heads, keys, width), (batch, kv_heads, keys, width)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


SHAPES = [
    {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 1, "keys": 1, "width": 2},
    {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 5, "keys": 5, "width": 6},
    {"batch": 3, "heads": 6, "kv_heads": 1, "queries": 2, "keys": 9, "width": 4},
    {"batch": 2, "heads": 3, "kv_heads": 3, "queries": 7, "keys": 4, "width": 8},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "broadcast_bool"])
def test_eager_attention_is_the_formula(shape: dict[str, int], kind: str) -> None:
    tensors = random_heads(len(kind), **shape)
    generator = torch.Generator().manual_seed(7)
    size = (shape["batch"], 1, shape["queries"], shape["keys"])
    mask, bias = None, None
    if kind == "float":
        mask = torch.randn(shape["batch"], shape["heads"], *size[2:], generator=generator) * 3
        bias = mask.double()
    elif kind != "none":
        seen = torch.rand(size if kind == "bool" else (1, 1, 1, shape["keys"]), generator=generator) < 0.6
        seen[..., 0] = True
        mask, bias = seen, torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
    module = nn.Module().eval()
    out, weights = eager_attention(module, *tensors, mask, scaling=0.7)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    expected, expected_weights = formula(*doubles, 0.7, bias)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)
    if kind not in ("none", "float"):
        assert (weights * ~mask == 0).all(), "a masked key has weight 0 exactly"
    factor = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad((out * factor).sum(), tensors)
    wanted = torch.autograd.grad((expected * factor).sum(), doubles)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_row_that_sees_nothing_stays_finite(dtype: torch.dtype, kind: str) -> None:
    tensors = random_heads(0, batch=2, heads=2, kv_heads=2, queries=3, keys=3, width=4)
    tensors = [x.detach().to(dtype).requires_grad_() for x in tensors]
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool)
    mask[1] = False
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    out, weights = eager_attention(nn.Module(), *tensors, mask, scaling=0.5)
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    for x in (out, weights, *gradients):
        assert x.isfinite().all()
    # It makes no difference to the row that sees everything.
    alone, _ = eager_attention(nn.Module(), *(x[:1] for x in tensors), None, scaling=0.5)
    assert torch.equal(out[:1], alone)


def test_half_precision_softmax_is_taken_in_fp32() -> None:
    """The weights are the rounded fp32 softmax of the scores, not a softmax computed in bf16."""
    tensors = [x.bfloat16() for x in random_heads(3, batch=1, heads=1, kv_heads=1, queries=64, keys=64, width=16)]
    _, weights = eager_attention(nn.Module(), *tensors, None, scaling=0.25)
    scores = tensors[0] @ tensors[1].transpose(2, 3) * 0.25
    assert torch.equal(weights, torch.softmax(scores.float(), -1).bfloat16())


def test_dropout_only_in_training() -> None:
    tensors = random_heads(0, batch=1, heads=2, kv_heads=2, queries=8, keys=50, width=4)
    module = nn.Module()
    out, weights = eager_attention(module.eval(), *tensors, None, scaling=1.0, dropout=0.5)
    assert torch.equal(out, eager_attention(module, *tensors, None, scaling=1.0)[0])
    _, dropped = eager_attention(module.train(), *tensors, None, scaling=1.0, dropout=0.5)
    kept = dropped != 0
    assert 0.35 < kept.float().mean() < 0.65
    torch.testing.assert_close(dropped[kept], weights[kept] * 2, atol=1e-6, rtol=1e-6)


# --- the core -----------------------------------------------------------------------------------------------------


def make_core(implementation: str = "eager", *, is_causal: bool = True, layer_idx: int = 0, **kwargs) -> AttentionCore:
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, **kwargs}
    return AttentionCore(config=Runtime(implementation), layer_idx=layer_idx, is_causal=is_causal, **options).eval()


def random_tokens(seed: int, batch: int = 2, tokens: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, width, generator=generator) for width in (24, 12, 12)]


def causal(queries: int, keys: int) -> Tensor:
    """(1, 1, Q, K) bool for queries that are the last of the keys."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("scaling", [None, 1.0, 0.05])
@pytest.mark.parametrize("masked", [False, True])
def test_attend_is_the_formula_with_every_scaling(implementation: str, scaling: float | None, masked: bool) -> None:
    """eager and sdpa get the same scaling: each equals the formula with it."""
    module = make_core(implementation, is_causal=False, scaling=scaling)
    query, key, value = random_tokens(1)
    mask = torch.rand(2, 1, 7, 7) < 0.5 if masked else None
    if masked:
        mask[..., 2] = True
    out, weights = module.attend(query, key, value, attention_mask=mask)
    bias = torch.zeros(2, 1, 7, 7).masked_fill(~mask, -math.inf).double() if masked else None
    heads = [x.double().view(2, 7, -1, 6).transpose(1, 2) for x in (query, key, value)]
    expected, expected_weights = formula(*heads, 6**-0.5 if scaling is None else scaling, bias)
    torch.testing.assert_close(out.double(), expected.flatten(2), atol=1e-6, rtol=1e-5)
    if implementation == "eager":
        torch.testing.assert_close(weights.double(), expected_weights, atol=1e-6, rtol=1e-5)
    else:
        assert weights is None


def test_sdpa_is_causal_without_a_mask_only_when_the_core_is() -> None:
    query, key, value = random_tokens(2)
    full, _ = make_core("sdpa", is_causal=False).attend(query, key, value)
    last, _ = make_core("sdpa", is_causal=True).attend(query, key, value)
    torch.testing.assert_close(full[:, -1], last[:, -1], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(full[:, 0], last[:, 0])
    first_value = value[:, :1].view(2, 1, 2, 6).repeat_interleave(2, 2).flatten(2)
    torch.testing.assert_close(last[:, :1], first_value, atol=1e-6, rtol=1e-6)


def test_heads_follow_from_the_width() -> None:
    """A rank of tensor parallelism holds half of the heads."""
    module = make_core(is_causal=False)
    query, key, value = random_tokens(3)
    whole, _ = module.attend(query, key, value)
    halves = [module.attend(query[..., a : a + 12], key[..., b : b + 6], value[..., b : b + 6])[0]
              for a, b in ((0, 0), (12, 6))]  # fmt: skip
    torch.testing.assert_close(torch.cat(halves, -1), whole, atol=1e-6, rtol=1e-6)


def rotation_of(angles: Tensor) -> tuple[Tensor, Tensor]:
    """(B or 1, T, D / 2) angles -> what `RotaryEmbedding` makes of them."""
    angles = angles[:, None]
    return torch.cat([angles.cos(), angles.cos()], -1), torch.cat([-angles.sin(), angles.sin()], -1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("steps", [[7], [4, 3], [1] * 7, [3, 1, 1, 2]])
def test_cache_gives_what_the_whole_row_gives(implementation: str, steps: list[int]) -> None:
    module = make_core(implementation, layer_idx=1)
    query, key, value = random_tokens(4)
    angles = torch.arange(7)[None, :, None] * torch.tensor([1.0, 0.3, 0.05])
    whole, _ = module.attend(query, key, value, rotation=rotation_of(angles), attention_mask=causal(7, 7))
    cache, parts, done = DynamicCache(), [], 0
    cache.update(torch.zeros(2, 2, 0, 6), torch.zeros(2, 2, 0, 6), 0)  # another layer's place, left alone
    for n in steps:
        s = slice(done, done + n)
        rotation = rotation_of(angles[:, s])
        part, _ = module.attend(
            query[:, s],
            key[:, s],
            value[:, s],
            rotation=rotation,
            past_key_values=cache,
            attention_mask=causal(n, done + n),
        )
        parts.append(part)
        done += n
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=1e-5)
    assert cache.layers[1].keys.shape == (2, 2, 7, 6)
    assert cache.layers[0].keys.shape[2] == 0
    # Keys are cached rotated, values as they are.
    expected = rotate(key.view(2, 7, 2, 6).transpose(1, 2), *rotation_of(angles))
    torch.testing.assert_close(cache.layers[1].keys, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(cache.layers[1].values, value.view(2, 7, 2, 6).transpose(1, 2))


def test_self_attention_uses_its_half_of_an_encoder_decoder_cache() -> None:
    module = make_core()
    query, key, value = random_tokens(5)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    module.attend(query, key, value, past_key_values=cache)
    assert cache.self_attention_cache.get_seq_length() == 7
    assert cache.cross_attention_cache.get_seq_length() == 0


def test_rotation_turns_queries_and_keys_not_values() -> None:
    module = make_core(is_causal=False)
    query, key, value = random_tokens(6)
    angles = torch.rand(2, 7, 3) * 6
    out, _ = module.attend(query, key, value, rotation=rotation_of(angles))
    phase = torch.polar(torch.ones_like(angles).double(), angles.double())[:, None]

    def turned(x: Tensor) -> Tensor:
        x = x.double().view(2, 7, -1, 6).transpose(1, 2)
        x = torch.complex(x[..., :3], x[..., 3:]) * phase
        return torch.cat([x.real, x.imag], -1)

    expected, _ = formula(turned(query), turned(key), value.double().view(2, 7, 2, 6).transpose(1, 2), 6**-0.5, None)
    torch.testing.assert_close(out.double(), expected.flatten(2), atol=2e-6, rtol=1e-5)


# --- cross-attention ----------------------------------------------------------------------------------------------


class Cross(CrossAttentionCore):
    """A cross-attention layer that counts how often it projects."""

    def __init__(self, implementation: str, layer_idx: int = 0) -> None:
        super().__init__(config=Runtime(implementation), layer_idx=layer_idx, num_heads=4, head_dim=6, is_causal=False)
        self.key, self.value = nn.Linear(10, 24), nn.Linear(10, 24)
        self.calls = 0

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.key(encoder_hidden_states), self.value(encoder_hidden_states)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True])
def test_cross_attention_is_the_formula(implementation: str, masked: bool) -> None:
    module = Cross(implementation).eval()
    query, encoded = torch.randn(2, 3, 24), torch.randn(2, 9, 10)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., 5:] = False
    out, weights = module.attend_encoder(query, encoded, attention_mask=mask if masked else None)
    bias = torch.zeros(2, 1, 1, 9).masked_fill(~mask, -math.inf) if masked else None
    heads = [x.view(2, -1, 4, 6).transpose(1, 2) for x in (query, module.key(encoded), module.value(encoded))]
    expected, _ = formula(*heads, 6**-0.5, bias)
    torch.testing.assert_close(out, expected.flatten(2), atol=1e-6, rtol=1e-5)
    assert (weights is None) == (implementation == "sdpa")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_encoder_is_projected_once_per_generation(implementation: str) -> None:
    modules = [Cross(implementation, i).eval() for i in range(2)]
    encoded = torch.randn(2, 9, 10)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for _ in range(4):
        query = torch.randn(2, 1, 24)
        for module in modules:
            expected, _ = module.attend_encoder(query, encoded)
            out, _ = module.attend_encoder(query, encoded, past_key_values=cache)
            torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)  # cached keys lie otherwise in memory
    # Four calls without the cache, and one of the four with it.
    assert [module.calls for module in modules] == [5, 5]
    assert cache.cross_attention_cache.get_seq_length() == 9
    assert cache.self_attention_cache.get_seq_length() == 0
    # Another generation, another encoder output: a fresh cache sees it, the old one keeps what it has.
    other = torch.randn(2, 4, 10)
    fresh = EncoderDecoderCache(DynamicCache(), DynamicCache())
    out, _ = modules[0].attend_encoder(query, other, past_key_values=fresh)
    torch.testing.assert_close(out, modules[0].attend_encoder(query, other)[0], atol=1e-6, rtol=1e-6)


def test_cross_attention_needs_no_cache_of_its_own_kind() -> None:
    """A decoder-only cache holds self-attention only: the encoder is projected anew and the cache left alone."""
    module, cache = Cross("eager").eval(), DynamicCache()
    query, encoded = torch.randn(2, 1, 24), torch.randn(2, 9, 10)
    out, _ = module.attend_encoder(query, encoded, past_key_values=cache)
    assert torch.equal(out, module.attend_encoder(query, encoded)[0])
    assert cache.get_seq_length() == 0


def test_the_implementation_can_be_switched_afterwards() -> None:
    """`set_attn_implementation` changes the shared configuration; the core reads it at every call."""
    config = BertConfig(attn_implementation="sdpa")
    module = AttentionCore(config=config, layer_idx=0, num_heads=2, head_dim=4, is_causal=False).eval()
    x = torch.randn(1, 3, 8)
    assert module.attend(x, x, x)[1] is None
    config._attn_implementation = "eager"
    assert module.attend(x, x, x)[1].shape == (1, 2, 3, 3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_one_query_takes_a_short_way_to_the_same_result(kv_heads: int) -> None:
    """Gradients included; what the library's function alone understands still goes to it."""
    core = make_core("sdpa")
    core.num_key_value_groups = 4 // kv_heads
    tensors = random_heads(3, batch=2, heads=4, kv_heads=kv_heads, queries=1, keys=9, width=8)
    tensors = [x.float().requires_grad_() for x in tensors]
    results = []
    for special in ({}, {"output_attentions": False}):
        out, _ = core.mix(*tensors, attention_mask=None, **special)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for short, long in zip(*results, strict=True):
        torch.testing.assert_close(short, long, atol=1e-6, rtol=1e-6)
    bias = torch.randn(1, 4, 1, 9)
    biased, _ = core.mix(*tensors, attention_mask=None, position_bias=bias)
    expected, _ = core.mix(*tensors, attention_mask=bias)
    torch.testing.assert_close(biased, expected, atol=1e-6, rtol=1e-6)


def test_another_function_under_the_name_sdpa_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lambda module, query, key, value, mask, **kwargs: (query.transpose(1, 2) * 0 + 5, None)  # noqa: E731
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    out, _ = make_core("sdpa").attend(*(x[:, :1] for x in random_tokens(0)))
    assert (out == 5).all()
