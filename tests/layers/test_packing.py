"""Packing against brute force: the plan's invariants, attention inside each sequence only, the cost of the buckets."""

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from operators import LargestTensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_ext.layers import packing as packing_file
from hf_ext.layers.attention import AttentionCore, eager_attention
from hf_ext.layers.packing import BUCKET_SLACK, FLASH, SHORT, Packing, has_varlen_kernel, varlen_kernel


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """These tensors are tiny: two threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Runtime:
    """The one field that the core reads from a configuration."""

    def __init__(self, implementation: str) -> None:
        self._attn_implementation = implementation


def masks() -> dict[str, Tensor]:
    """Masks of every kind; each has some padding and some token."""
    generator = torch.Generator().manual_seed(0)

    def random_lengths(batch: int, tokens: int) -> Tensor:
        return torch.randint(1, tokens + 1, (batch, 1), generator=generator)

    made = {}
    for i, (batch, tokens) in enumerate([(1, 5), (3, 7), (6, 40), (9, 97)]):
        lengths = random_lengths(batch, tokens)
        lengths[0] = tokens - 1  # there is padding
        right = (torch.arange(tokens)[None] < lengths).long()
        made[f"right{i}"] = right
        made[f"left{i}"] = right.flip(-1)
        made[f"holes{i}"] = (torch.rand(batch, tokens, generator=generator) < 0.6).long()
        made[f"holes{i}"][0, 0], made[f"holes{i}"][0, -1] = 1, 0
        empty = right.clone()
        empty[-1] = 0
        empty[0, 0] = 1 if batch > 1 else empty[0, 0]
        if empty.any():
            made[f"empty_row{i}"] = empty
    made["equal"] = torch.tensor([[1, 1, 1, 0]] * 4)
    made["single_tokens"] = torch.tensor([[1, 0, 0], [0, 0, 1], [0, 1, 0]])
    made["empty_between"] = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]])
    made["bool"] = made["right1"].bool()
    made["float"] = made["left1"].float()
    return made


MASKS = masks()


def rows_of(mask: Tensor) -> list[list[int]]:
    """Flat places of the real tokens of each row that has any, spelled out."""
    tokens = mask.shape[1]
    rows = [[b * tokens + t for t in range(tokens) if mask[b, t] != 0] for b in range(mask.shape[0])]
    return [row for row in rows if row]


def sequences(plan: Packing) -> list[slice]:
    """The packed tokens of each sequence."""
    starts = [sum(plan.lengths[:i]) for i in range(len(plan.lengths))]
    return [slice(a, a + n) for a, n in zip(starts, plan.lengths, strict=True)]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, is_causal: bool) -> Tensor:
    """(H, L, D), (G, L, D) -> (L, H, D) by the formula, head by head."""
    groups = query.shape[0] // key.shape[0]
    heads = []
    for h in range(query.shape[0]):
        scores = query[h] @ key[h // groups].T * scaling
        if is_causal:
            places = torch.arange(len(scores))
            scores = scores.masked_fill(places[None, :] > places[:, None], -math.inf)
        heads.append(torch.softmax(scores, -1) @ value[h // groups])
    return torch.stack(heads, 1)


def core(implementation: str, *, heads: int = 4, kv_heads: int = 4, width: int = 8, is_causal: bool = False, **kwargs):
    return AttentionCore(
        config=Runtime(implementation),
        layer_idx=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        is_causal=is_causal,
        **kwargs,
    )


# --- the plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASKS)
def test_from_mask_plan(name: str) -> None:
    mask = MASKS[name]
    plan, rows = Packing.from_mask(mask), rows_of(mask)
    assert sum(plan.lengths) == sum(len(row) for row in rows) == len(plan.indices)
    assert plan.lengths == sorted(len(row) for row in rows)
    assert plan.shape == tuple(mask.shape)
    # Every sequence is one row's real tokens, in order, and every row is there once.
    packed = [plan.indices[s].tolist() for s in sequences(plan)]
    assert sorted(packed) == sorted(rows)
    assert plan.cu_seqlens.dtype == torch.int32
    assert plan.cu_seqlens.tolist() == [sum(plan.lengths[:i]) for i in range(len(plan.lengths) + 1)]


@pytest.mark.parametrize("mask", [torch.ones(3, 4), torch.zeros(3, 4), torch.ones(1, 1, dtype=torch.bool)])
def test_from_mask_leaves_whole_batches_alone(mask: Tensor) -> None:
    assert Packing.from_mask(mask) is None


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
def test_pack_and_unpack(name: str, trailing: tuple[int, ...]) -> None:
    mask = MASKS[name]
    plan = Packing.from_mask(mask)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*mask.shape, *trailing, generator=generator, dtype=torch.float64, requires_grad=True)
    packed = plan.pack(x)
    assert packed.shape == (1, sum(plan.lengths), *trailing)
    flat = x.flatten(0, 1)
    assert torch.equal(packed[0], torch.stack([flat[i] for i in plan.indices.tolist()]))
    real = (mask != 0).view(*mask.shape, *(1 for _ in trailing)).expand_as(x)
    restored = plan.unpack(packed)
    assert torch.equal(restored, x * real)
    assert torch.equal(plan.unpack(piece for piece in packed.split(2, dim=1)), restored)
    # Gradients: those of a multiplication by the mask, exactly.
    factor = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((restored * factor).sum(), x)
    assert torch.equal(gradient, factor * real)


@pytest.mark.parametrize("seed", range(6))
def test_buckets_cover_every_token_once(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 40, (), generator=generator))
    lengths = torch.randint(1, (8, 60, 300)[seed % 3], (count,), generator=generator).tolist()
    plan = Packing(lengths, None, None, torch.device("cpu"))
    total, places = sum(lengths), []
    for bucket in plan.buckets:
        if bucket.gather is None:
            assert bucket.tokens == bucket.count * bucket.length
            found = list(range(bucket.start, bucket.start + bucket.tokens))
        else:
            found = bucket.gather.tolist()
            assert len(found) == bucket.count * bucket.length
            if bucket.keep is not None:
                assert torch.equal(bucket.real.flatten().nonzero().squeeze(-1), bucket.keep)
                found = [found[i] for i in bucket.keep.tolist()]
        assert len(found) == bucket.tokens
        places += found
    assert sorted(places) == list(range(total))
    order = plan.restore.tolist() if plan.restore is not None else range(total)
    assert [places[i] for i in order] == list(range(total))


@pytest.mark.parametrize("seed", range(6))
def test_cost_of_the_buckets_is_bounded(seed: int) -> None:
    """The padded work is what each sequence would cost at its own slack, and the number of calls is logarithmic."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(200, generator=generator) ** (1 + seed) * 511 + 1).long().tolist()
    plan = Packing(lengths, None, None, torch.device("cpu"))
    padded = sum(bucket.count * bucket.length**2 for bucket in plan.buckets)
    assert padded <= sum(max(BUCKET_SLACK * n, SHORT) ** 2 for n in lengths)
    assert padded < len(lengths) * max(lengths) ** 2
    assert len(plan.buckets) <= 1 + math.ceil(math.log(max(lengths) / SHORT, BUCKET_SLACK)) + 1
    assert sum(bucket.tokens for bucket in plan.buckets) == sum(lengths)


# --- other sources of boundaries ----------------------------------------------------------------------------------


def test_from_position_ids() -> None:
    def lengths(rows: list[list[int]], batch: int | None = None) -> list[int] | None:
        plan = Packing.from_position_ids(torch.tensor(rows), batch or len(rows))
        return plan.lengths if plan is not None else None

    assert lengths([[0, 1, 2, 0, 1]]) == [3, 2]
    assert lengths([[0, 1, 2, 3]]) is None
    assert lengths([[5, 6, 7]]) is None, "a row need not start at 0"
    assert lengths([[0, 1, 2], [0, 1, 2]]) is None, "rows are boundaries of their own"
    assert lengths([[0, 1, 2], [0, 0, 1]]) == [3, 1, 2]
    assert lengths([[0, 1, 2], [3, 4, 5]]) is None, "a row is a boundary even where the positions go on"
    assert lengths([[5, 6, 5, 6, 7]]) == [2, 3], "the first position of the row is where sequences begin"
    assert lengths([[0, 0, 0]]) is None, "positions switched off"
    assert lengths([[0, 1, 3, 4]]) is None, "a gap separates nothing"
    assert lengths([[4, 3, 2, 1, 0]]) is None, "another order separates nothing"
    assert lengths([[0, 1, 1, 2]]) is None, "a repeat separates nothing"
    assert lengths([[0, 1, 0, 1]], batch=3) == [2] * 6, "positions shared by all rows"
    assert lengths([[0, 1, 2]], batch=3) is None
    assert lengths([[0]]) is None


def test_from_position_ids_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        batch, tokens = (int(n) for n in torch.randint(1, 12, (2,), generator=generator))
        rows, expected = [], []
        for _ in range(batch):
            row, found = [], []
            while len(row) < tokens:
                n = min(int(torch.randint(1, 6, (), generator=generator)), tokens - len(row))
                row += range(n)
                found.append(n)
            rows.append(row)
            expected += found if max(found) > 1 else [tokens]  # zeros only: positions switched off
        plan = Packing.from_position_ids(torch.tensor(rows), batch)
        assert (plan.lengths if plan is not None else None) == (expected if len(expected) > batch else None)


def test_from_cu_seqlens() -> None:
    plan = Packing.from_cu_seqlens(torch.tensor([0, 2, 2, 7, 8], dtype=torch.int32))
    assert plan.lengths == [2, 5, 1], "empty sequences take no part"
    assert plan.cu_seqlens.tolist() == [0, 2, 7, 8]
    assert plan.indices is None
    assert plan.shape is None


# --- attention ----------------------------------------------------------------------------------------------------

LENGTHS = {
    "sorted": [1, 3, 3, 7, 20, 33, 34, 60],
    "mixed": [34, 1, 60, 3, 33, 7, 3, 20],
    "equal": [6, 6, 6],
    "one": [9],
    "single_tokens": [1, 1, 1, 1],
    "equal_apart": [40, 2, 40],
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "kv_heads", "training"),
    [*((name, 4, False) for name in LENGTHS), ("mixed", 2, False), ("sorted", 1, False), ("mixed", 1, True)],
)
def test_attention_stays_inside_sequences(
    implementation: str, is_causal: bool, name: str, kv_heads: int, training: bool
) -> None:
    """Values and gradients are those of each sequence on its own; in train mode too, with a dropout of 0."""
    generator = torch.Generator().manual_seed(len(name) + kv_heads)
    lengths, width = LENGTHS[name], 8
    total = sum(lengths)
    plan = Packing(lengths, None, None, torch.device("cpu"))
    module = core(implementation, kv_heads=kv_heads, is_causal=is_causal, dropout=0.0, scaling=0.3).train(training)
    query, key, value = (
        torch.randn(1, total, h * width, generator=generator, requires_grad=True) for h in (4, kv_heads, kv_heads)
    )
    out, weights = module.attend(query, key, value, packing=plan)
    assert out.shape == (1, total, 4 * width)
    assert weights is None

    doubles = [x.detach().double().requires_grad_() for x in (query, key, value)]
    parts = []
    for s in sequences(plan):
        heads = [x[0, s].view(-1, x.shape[-1] // width, width).transpose(0, 1) for x in doubles]
        parts.append(dense_attention(*heads, scaling=0.3, is_causal=is_causal).flatten(1))
    expected = torch.cat(parts)[None]
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)
    factor = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad((out * factor).sum(), (query, key, value))
    wanted = torch.autograd.grad((expected * factor).sum(), doubles)
    for a, b in zip(got, wanted, strict=True):
        # Gradients are sums over up to 60 keys of terms of size 1 in fp32.
        torch.testing.assert_close(a.double(), b, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_several_packed_rows(implementation: str, is_causal: bool) -> None:
    """(B, T) rows that hold several sequences each, as positions that start again describe them."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    plan = Packing.from_position_ids(positions, 2)
    module = core(implementation, is_causal=is_causal).eval()
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 6, 32, generator=generator, dtype=torch.float64) for _ in range(3))
    out, _ = module.attend(query, key, value, packing=plan)
    assert out.shape == (2, 6, 32)
    for row, bounds in enumerate(([0, 3, 5, 6], [0, 2, 6])):
        for a, b in zip(bounds[:-1], bounds[1:], strict=True):
            heads = [x[row, a:b].view(-1, 4, 8).transpose(0, 1) for x in (query, key, value)]
            expected = dense_attention(*heads, scaling=8**-0.5, is_causal=is_causal).flatten(1)
            # eager takes its softmax in fp32 whatever the inputs are, as the official code does.
            tolerance = 1e-6 if implementation == "eager" else 1e-12
            torch.testing.assert_close(out[row, a:b], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_sequence_does_not_see_the_others(implementation: str) -> None:
    """Another sequence may hold anything, even infinities."""
    plan = Packing([3, 5, 2], None, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 10, 32, generator=generator) for _ in range(3)]
    module = core(implementation).eval()
    before, _ = module.attend(*tensors, packing=plan)
    for x in tensors:
        x[:, 3:8] = math.inf
    after, _ = module.attend(*tensors, packing=plan)
    keep = [0, 1, 2, 8, 9]
    assert torch.equal(before[:, keep], after[:, keep])
    assert after[:, 3:8].isnan().all(), "the poisoned sequence shows it"


def test_dropout_reaches_the_kernel() -> None:
    plan = Packing([3, 5], None, None, torch.device("cpu"))
    x = torch.randn(1, 8, 32)
    module = core("eager", dropout=0.5)
    assert torch.equal(module.eval().attend(x, x, x, packing=plan)[0], module.attend(x, x, x, packing=plan)[0])
    module.train()
    assert not torch.equal(module.attend(x, x, x, packing=plan)[0], module.attend(x, x, x, packing=plan)[0])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_tensor_of_the_packed_length_squared(implementation: str, is_causal: bool) -> None:
    lengths = torch.randint(1, 65, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    total, heads, width = sum(lengths), 2, 4
    plan = Packing(lengths, None, None, torch.device("cpu"))
    module = core(implementation, heads=heads, kv_heads=heads, width=width, is_causal=is_causal)
    x = torch.randn(1, total, heads * width, requires_grad=True)
    with LargestTensor() as recorder:
        out, _ = module.attend(x, x, x, packing=plan)
        out.sum().backward()
    scores = max(b.count * heads * b.length**2 for b in plan.buckets)
    tokens = heads * width * sum(b.count * b.length for b in plan.buckets)
    # sdpa's backward on CPU works with a few score blocks of the bucket's size.
    assert 0 < recorder.elements <= max(scores, tokens)
    assert recorder.elements < total**2 // 8


# --- device kernels -----------------------------------------------------------------------------------------------


def reference_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """torch's variable-length attention, by the formula."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert window_size in ((-1, -1), (-1, 0))
    assert enable_gqa or key.shape[1] == query.shape[1]
    bounds = cu_seq_q.tolist()
    assert bounds[-1] == len(query)
    return torch.cat(
        [
            dense_attention(
                *(x[a:b].transpose(0, 1) for x in (query, key, value)), scaling=scale, is_causal=window_size == (-1, 0)
            )
            for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_kernel_gets_the_right_arguments(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, kv_heads: int
) -> None:
    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)
    calls = []

    def kernel(*args, **kwargs):
        signature.bind(*args, **kwargs)  # torch's own function takes these arguments
        calls.append(kwargs)
        return reference_varlen(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(packing_file, "has_varlen_kernel", lambda query, dropout: dropout == 0.0)
    plan = Packing([5, 2, 40, 2], None, None, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(1, 49, h * 8, generator=generator, dtype=torch.float64) for h in (4, kv_heads, kv_heads)]
    module = core("sdpa", kv_heads=kv_heads, is_causal=is_causal, dropout=0.1, scaling=0.2)
    out, _ = module.eval().attend(*tensors, packing=plan)
    assert len(calls) == 1
    monkeypatch.setattr(packing_file, "has_varlen_kernel", lambda query, dropout: False)
    expected, _ = module.attend(*tensors, packing=plan)
    assert len(calls) == 1
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    # An explicit is_causal goes before the module's own.
    monkeypatch.setattr(packing_file, "has_varlen_kernel", lambda query, dropout: True)
    module.attend(*tensors, packing=plan, is_causal=not is_causal)
    assert calls[-1]["window_size"] == ((-1, -1) if is_causal else (-1, 0))


@pytest.mark.parametrize(
    ("device", "dtype", "width", "dropout", "expected"),
    [
        ("cuda", torch.bfloat16, 64, 0.0, True),
        ("cuda", torch.float16, 256, 0.0, True),
        ("cuda", torch.float32, 64, 0.0, False),
        ("cuda", torch.bfloat16, 64, 0.1, False),
        ("cuda", torch.bfloat16, 60, 0.0, False),
        ("cuda", torch.bfloat16, 264, 0.0, False),
        ("cpu", torch.bfloat16, 64, 0.0, False),
    ],
)
def test_has_varlen_kernel(device: str, dtype: torch.dtype, width: int, dropout: float, expected: bool) -> None:
    with FakeTensorMode():
        assert has_varlen_kernel(torch.empty(3, 2, width, device=device, dtype=dtype), dropout) is expected


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_varlen_kernel_on_fake_device_tensors(kv_heads: int) -> None:
    """torch's real function accepts the call: shapes and devices, without a device."""
    with FakeTensorMode():
        query = torch.empty(10, 4, 64, device="cuda", dtype=torch.bfloat16)
        key = torch.empty(10, kv_heads, 64, device="cuda", dtype=torch.bfloat16)
        boundaries = torch.empty(4, dtype=torch.int32)  # made on CPU: it must follow to the queries' device
        out = varlen_kernel(query, key, key, boundaries, 5, True, 0.125)
    assert out.shape == (10, 4, 64)
    assert out.device.type == "cuda"


@pytest.mark.parametrize("implementation", FLASH)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_flash_branch(monkeypatch: pytest.MonkeyPatch, implementation: str, is_causal: bool, rows: int) -> None:
    """The library's flash function gets one row, boundaries and lengths; through its real wrapper."""
    wrapper = ALL_ATTENTION_FUNCTIONS[implementation]
    calls = []

    def kernel(query, key, value, attention_mask, *, query_length, is_causal, dropout, softmax_scale, **kwargs):
        calls.append(kwargs)
        assert attention_mask is None
        assert dropout == 0.0
        assert query.shape == (1, 12, 4, 8)
        assert key.shape == value.shape == (1, 12, 2, 8)
        assert query_length == 12
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == 6
        return reference_varlen(
            query[0],
            key[0],
            value[0],
            kwargs["cu_seq_lens_q"],
            kwargs["cu_seq_lens_k"],
            kwargs["max_length_q"],
            kwargs["max_length_k"],
            scale=softmax_scale,
            window_size=(-1, 0) if is_causal else (-1, -1),
            enable_gqa=True,
        )[None]

    monkeypatch.setitem(wrapper.__globals__, "_flash_attention_forward", kernel)
    plan = Packing([4, 2, 6], None, None, torch.device("cpu"))
    module = core(implementation, kv_heads=2, is_causal=is_causal, scaling=0.2).eval()
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(rows, 12 // rows, h * 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2)
    )
    out, weights = module.attend(query, key, value, packing=plan)
    assert len(calls) == 1
    assert weights is None
    module.config = Runtime("sdpa")
    expected, _ = module.attend(query, key, value, packing=plan)
    assert out.shape == expected.shape == (rows, 12 // rows, 32)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)


def test_buckets_pass_nothing_a_kernel_must_not_see() -> None:
    """A bucket without pads has no mask at all; a causal one has none in sdpa, whose kernel is causal by itself."""
    seen = []

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: object):
        seen.append((tuple(query.shape), None if mask is None else tuple(mask.shape), kwargs["is_causal"]))
        return eager_attention(module, query, key, value, mask, scaling=1.0)

    def run(lengths: list[int], implementation: str, is_causal: bool) -> list:
        seen.clear()
        plan = Packing(lengths, None, None, torch.device("cpu"))
        x = torch.randn(1, 2, sum(lengths), 4)
        function: Callable = attention
        plan.attend(
            function,
            core(implementation),
            x,
            x,
            x,
            implementation=implementation,
            is_causal=is_causal,
            dropout=0.0,
            scaling=1.0,
        )
        return list(seen)

    assert run([6, 6], "sdpa", False) == [((2, 2, 6, 4), None, False)]
    assert run([6, 6], "sdpa", True) == [((2, 2, 6, 4), None, True)]
    assert run([4, 6], "sdpa", False) == [((2, 2, 6, 4), (2, 1, 1, 6), False)]
    assert run([4, 6], "sdpa", True) == [((2, 2, 6, 4), None, True)]
    assert run([4, 6], "eager", True) == [((2, 2, 6, 4), (1, 1, 6, 6), False)]
    assert run([6, 6], "eager", False) == [((2, 2, 6, 4), None, False)]
