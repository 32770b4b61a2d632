"""Sliding-window attention against its formula, and the size of what it creates.

Shapes: B batch, T tokens, H heads, G key/value heads, D head width, W window, S queries of a block.
"""

import pytest
import torch
from cases import padding_mask
from operators import LargestTensor
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_ext
from hf_ext.layers import packing as packing_module
from hf_ext.layers.packing import Packing
from hf_ext.layers.patterns.sliding_window import SlidingWindow, WindowAttentionCore
from hf_ext.modeling import ExtPreTrainedModel

TOLERANCE = 1e-5


def inputs(batch: int, heads: int, kv_heads: int, tokens: int, width: int = 8, seed: int = 0) -> list[Tensor]:
    """Random queries (B, H, T, D), keys and values (B, G, T, D) in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, n, tokens, width, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def formula(
    query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float, real: Tensor | None = None
) -> Tensor:
    """The definition, by a dense mask: 0 <= i - j < W and j real. (B, T, H, D); zeros where nothing is seen."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    distance = torch.arange(query.shape[2])[:, None] - torch.arange(query.shape[2])
    seen = ((distance >= 0) & (distance < window))[None, None]
    if real is not None:
        seen = seen & real[:, None, None, :]
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~seen, -1e300)
    weights = scores.softmax(-1) * seen
    return (weights @ value).transpose(1, 2)


def agree(ours: Tensor, reference: Tensor, leaves: list[Tensor]) -> None:
    """Equal values, and equal gradients of a random projection."""
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() < TOLERANCE
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    found = torch.autograd.grad((ours * direction).sum(), leaves)
    expected = torch.autograd.grad((reference * direction).sum(), leaves)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert (mine - theirs).abs().max() < TOLERANCE


SHAPES = [(tokens, window) for tokens in (1, 2, 7, 16, 33, 50) for window in (1, 2, 3, 8, 16, 50, 70)]


@pytest.mark.parametrize(("tokens", "window"), SHAPES)
@pytest.mark.parametrize("block", [None, 1, 3, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_formula(tokens, window, block, heads, kv_heads):
    q, k, v = inputs(2, heads, kv_heads, tokens)
    plan = SlidingWindow(window, dtype=q.dtype, device=q.device, block=block)
    ours, weights = plan.attention(None, q, k, v, scaling=0.3)
    assert weights is None
    agree(ours, formula(q, k, v, window, 0.3), [q, k, v])


@pytest.mark.parametrize("pattern", ["right", "left", "holes", "ones"])
@pytest.mark.parametrize(("tokens", "window"), [(t, w) for t, w in SHAPES if t > w])
@pytest.mark.parametrize("block", [None, 3])
def test_padding(pattern, tokens, window, block):
    q, k, v = inputs(4, 4, 2, tokens)
    real = padding_mask(pattern, 4, tokens).bool()
    plan = SlidingWindow(window, dtype=q.dtype, device=q.device, real=real, block=block)
    ours, _ = plan.attention(None, q, k, v, scaling=0.3)
    agree(ours, formula(q, k, v, window, 0.3, real), [q, k, v])


def test_nothing_but_padding():
    q, k, v = inputs(2, 2, 1, 20)
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1] = False
    plan = SlidingWindow(4, dtype=q.dtype, device=q.device, real=real, block=4)
    ours, _ = plan.attention(None, q, k, v, scaling=0.3)
    assert (ours[1] == 0).all()
    agree(ours, formula(q, k, v, 4, 0.3, real), [q, k, v])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q, k, v = (x.detach().to(dtype) for x in inputs(1, 4, 2, 90))
    ours, _ = SlidingWindow(16, dtype=dtype, device=q.device, block=8).attention(None, q, k, v, scaling=0.3)
    assert ours.dtype == dtype
    reference = formula(q.double(), k.double(), v.double(), 16, 0.3)
    assert (ours.double() - reference).abs().max() < 0.05


def test_room_in_the_cache_is_not_looked_at():
    q, k, v = inputs(1, 2, 2, 20)
    longer = [torch.cat([x, torch.full_like(x[:, :, :5], 1e3)], 2) for x in (k, v)]
    plan = SlidingWindow(4, dtype=q.dtype, device=q.device, block=3)
    ours, _ = plan.attention(None, q, *longer, scaling=0.3)
    agree(ours, formula(q, k, v, 4, 0.3), [q, k, v])


def test_dropout():
    """Each weight is dropped or doubled: values of one come out as one on average, and no query is left as it was."""
    q, k, v = inputs(1, 4, 2, 600)
    plan = SlidingWindow(32, dtype=q.dtype, device=q.device)
    ours, _ = plan.attention(None, q, k, torch.ones_like(v), scaling=0.3, dropout=0.5)
    assert abs(ours.mean() - 1) < 0.02
    assert ((ours - 1).abs() > 1e-3).double().mean() > 0.95


# --- the core: implementations, packed rows -----------------------------------------------------------------------


class Settings:
    """The one field that a core reads."""

    def __init__(self, implementation: str) -> None:
        self._attn_implementation = implementation


def core(implementation: str, window: int | None) -> WindowAttentionCore:
    made = WindowAttentionCore(
        config=Settings(implementation), layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=8, is_causal=True
    )
    made.sliding_window = window
    return made


def restarting(lengths: tuple[int, ...]) -> Tensor:
    """(1, T) positions of sequences end to end."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", [(3, 20, 1, 9, 9), (40,) * 3, (5, 50), (2, 3)])
@pytest.mark.parametrize("window", [1, 4, 9, 30, 64])
def test_packed(implementation, lengths, window):
    q, k, v = inputs(1, 4, 2, sum(lengths))
    packing = Packing.from_position_ids(restarting(lengths), 1)
    plan = None
    if implementation == "sdpa" and max(lengths) > window:
        plan = SlidingWindow(window, dtype=q.dtype, device=q.device, block=3)
    layer = core(implementation, window)
    ours, _ = layer.mix(q, k, v, attention_mask=plan, packing=packing)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    reference = torch.cat([formula(*part, window, layer.scaling) for part in parts], 1)
    agree(ours, reference.flatten(2), [q, k, v])


@pytest.mark.parametrize("packed", [False, True])
def test_flash_gets_the_window(monkeypatch, packed):
    seen = {}

    def flash(module, query, key, value, attention_mask, **kwargs):
        seen.update(kwargs)
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", flash)
    q, k, v = inputs(1, 4, 2, 12)
    packing = Packing.from_position_ids(restarting((5, 7)), 1) if packed else None
    core("flash_attention_2", 3).mix(q, k, v, attention_mask=None, packing=packing)
    assert seen["sliding_window"] == 3


def test_varlen_kernel_gets_the_window(monkeypatch):
    seen = {}

    def kernel(query, key, value, *args, **kwargs):
        seen.update(kwargs)
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(packing_module, "has_varlen_kernel", lambda *_: True)
    q, k, v = inputs(1, 4, 2, 12)
    packing = Packing.from_position_ids(restarting((5, 7)), 1)
    for window, expected in ((3, (2, 0)), (1, (0, 0)), (None, (-1, 0))):
        plan = None if window is None else SlidingWindow(window, dtype=q.dtype, device=q.device)
        core("sdpa", window).mix(q, k, v, attention_mask=plan, packing=packing)
        assert seen["window_size"] == expected


# --- models -------------------------------------------------------------------------------------------------------


def mistral(window: int | None = 8, attn: str = "sdpa", **fields: object) -> ExtPreTrainedModel:
    config = hf_ext.ExtMistralConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=window,
        pad_token_id=0,
        **fields,
    )
    torch.manual_seed(0)
    return hf_ext.ExtMistralForCausalLM._from_config(config, attn_implementation=attn).eval()


def gpt_neo(window: int = 8, attn: str = "sdpa") -> ExtPreTrainedModel:
    config = hf_ext.ExtGPTNeoConfig(
        vocab_size=60,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        window_size=window,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return hf_ext.ExtGPTNeoForCausalLM._from_config(config, attn_implementation=attn).eval()


def tokens_of(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", ["plain", "right", "left", "packed", "dropout", "static", "dynamic"])
def test_nothing_of_squared_length_exists(case):
    """Forward and backward; also the blocks' own scores under dropout stay below T * T."""
    length, window, rows = 1600, 32, 2
    model = mistral(window, attention_dropout=0.1 if case == "dropout" else 0.0)
    ids = tokens_of(rows, length)
    options = {"attention_mask": padding_mask(case, rows, length)} if case in ("right", "left") else {}
    if case == "packed":
        options["position_ids"] = torch.cat([restarting((900, 700)), restarting((20, 1580))])
    if case == "static":
        options["past_key_values"] = StaticCache(config=model.config, max_cache_len=length + 5)
    if case == "dynamic":
        options["past_key_values"] = DynamicCache(config=model.config)
    with LargestTensor() as largest:
        if "past_key_values" in options:
            with torch.no_grad():
                model.model(ids, **options)
        else:
            model.train()
            model(ids, labels=ids, **options).loss.backward()
    # The largest is the keys of all blocks, copied: T * (S + W) / S * D per head; scores where there is dropout.
    per_token = 2 * window * 4 if case == "dropout" else max(2 * window, 4 * 24)
    assert largest.elements <= rows * (length + window) * per_token
    assert largest.elements < length * length


def test_global_layers_have_no_mask_either():
    model = gpt_neo(32)
    ids = tokens_of(1, 1600)
    with LargestTensor() as largest:
        model.train()
        model(ids, labels=ids).loss.backward()
    assert largest.elements < 1600 * 1600 / 8


@pytest.mark.parametrize("build", [mistral, gpt_neo])
@pytest.mark.parametrize("pattern", ["none", "right", "left", "holes"])
def test_long_inputs_equal_eager(build, pattern):
    sdpa, eager = build(40), build(40, "eager")
    ids, mask = tokens_of(4, 300), padding_mask(pattern, 4, 300)
    real = torch.ones(4, 300, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        difference = sdpa(ids, attention_mask=mask).logits - eager(ids, attention_mask=mask).logits
    assert difference[real].abs().max() < TOLERANCE


@pytest.mark.parametrize("build", [mistral, gpt_neo])
def test_packed_rows_equal_separate_rows(build):
    model = build(40)
    lengths = (130, 20, 150)
    ids = tokens_of(1, sum(lengths))
    with torch.no_grad():
        packed = model(ids, position_ids=restarting(lengths)).logits
        separate = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    assert (packed - separate).abs().max() < TOLERANCE


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [mistral, gpt_neo])
@pytest.mark.parametrize("window", [1, 2, 8, 200])
def test_pieces_and_caches(build, window, attn):
    """Prefill at once, in chunks longer and shorter than the window, token by token; caches of every kind."""
    model = build(window, attn)
    ids = tokens_of(2, 60)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for make in (
            lambda: DynamicCache(config=model.config),
            DynamicCache,
            lambda: StaticCache(config=model.config, max_cache_len=64),
        ):
            cache, pieces = make(), []
            for piece in ids.split([25, 1, 1, 3, 20, 1, 9], 1):
                pieces.append(model(piece, past_key_values=cache, use_cache=True).logits)
            assert (torch.cat(pieces, 1) - expected).abs().max() < TOLERANCE, type(cache)


@pytest.mark.parametrize("build", [mistral, gpt_neo])
@pytest.mark.parametrize("window", [1, 4])
def test_generation_with_and_without_cache(build, window):
    model = build(window)
    ids = tokens_of(3, 12)
    mask = padding_mask("left", 3, 12)
    ids[mask == 0] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, use_cache=False, **options)
    assert torch.equal(model.generate(ids, use_cache=True, **options), expected)
    assert torch.equal(model.generate(ids, prefill_chunk_size=5, **options), expected)


def test_local_layers_keep_a_window_of_keys():
    """The cache of a local layer must not grow with the text."""
    model = gpt_neo(8)
    cache = model(tokens_of(1, 50), use_cache=True).past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [50, 7, 50]


def plan_for(model: ExtPreTrainedModel, length: int, **options: object) -> object:
    arguments = {"attention_mask": None, "position_ids": None, "past_key_values": None, "rows": None, "packing": None}
    hidden_states = torch.zeros(2, length, 32)
    return model.model.masks(hidden_states, **{**arguments, **options})["attention_mask"]


def test_which_plan():
    model = mistral(8)
    for length in (2, 7, 8):  # as fast as plain causal attention
        assert plan_for(model, length) is None
        assert plan_for(model, length, attention_mask=torch.ones(2, length)) is None
    assert isinstance(plan_for(model, 9), SlidingWindow)
    assert plan_for(model, 9).first is None
    assert plan_for(model, 9, attention_mask=torch.ones(2, 9)).first is None
    assert plan_for(model, 9, attention_mask=padding_mask("left", 2, 9)).first is not None
    assert isinstance(plan_for(model, 7, attention_mask=padding_mask("left", 2, 7)), Tensor)
    own = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    assert plan_for(model, 9, attention_mask=own) is own
    cache = DynamicCache(config=model.config)
    assert isinstance(plan_for(model, 9, past_key_values=cache), SlidingWindow)
    cache.update(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), 0)
    assert plan_for(model, 9, past_key_values=cache).shape == (2, 1, 9, 12)
    model.set_attn_implementation("eager")
    assert plan_for(model, 9).shape[-2:] == (9, 9)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # compiling what builds the mask takes long
        assert type(plan_for(model, 9)).__name__ == "BlockMask"
    assert plan_for(mistral(None), 9) is None


def test_own_mask_is_used_as_it_is():
    """A mask of the caller's own says all that is to be said; the window is not added to it."""
    model = mistral(4)
    ids = tokens_of(2, 30)
    own = torch.ones(30, 30, dtype=torch.bool).tril().triu(-5).expand(2, 1, 30, 30)
    with torch.no_grad():
        expected = mistral(6)(ids).logits
        assert (model(ids, attention_mask=own).logits - expected).abs().max() < TOLERANCE


def test_autocast():
    model = mistral(8)
    ids = tokens_of(2, 60)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.train()(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_gradients_with_checkpointing():
    model = mistral(8)
    ids, mask = tokens_of(3, 60), padding_mask("right", 3, 60)
    found = []
    for checkpointing in (False, True):
        model.train().zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for plain, again in zip(*found, strict=True):
        assert torch.equal(plain, again)
