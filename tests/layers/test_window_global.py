"""Two-sided window with global tokens against its formula, and the size of what it creates.

Shapes: B batch, T tokens, H heads, D head width, W window, S queries of a block, G global tokens of a row.
"""

import pytest
import torch
from cases import padding_mask
from operators import LargestTensor
from torch import Tensor, nn

from hf_ext.layers.packing import Packing
from hf_ext.layers.patterns.window_global import Projected, Unprojected, WindowGlobal

TOLERANCE = 1e-9
HEADS, WIDTH = 2, 4


def inputs(batch: int, tokens: int, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values for the window, and those for global tokens: six of (B, T, H, D) in double precision."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, HEADS, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(6)]


def global_places(batch: int, tokens: int) -> Tensor:
    """(B, T) bool: none to three global tokens in a row, at its ends and in between."""
    places = torch.zeros(batch, tokens, dtype=torch.bool)
    for row in range(batch):
        chosen = ((0,), (tokens // 2, tokens - 1, 1), (), (tokens - 1,))[row % 4]
        places[row, [i for i in chosen if 0 <= i < tokens]] = True
    return places


def formula(six: list[Tensor], window: int, is_global: Tensor | None, real: Tensor | None = None) -> Tensor:
    """The definition, by dense masks: a query sees real keys with |i - j| <= W / 2 or that are global; a global query
    sees all real keys. (B, T, H, D), zero at padding."""
    query, key, value, far_query, far_key, far_value = (x.transpose(1, 2) for x in six)
    batch, _, tokens, _ = query.shape
    real = torch.ones(batch, tokens, dtype=torch.bool) if real is None else real
    is_global = torch.zeros_like(real) if is_global is None else is_global & real
    near = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs() <= window // 2
    seen = (near | is_global[:, None]) & real[:, None]  # (B, T, T)

    def mix(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~seen[:, None], -1e300)
        return ((scores.softmax(-1) * seen[:, None]) @ value).transpose(1, 2)

    local, whole = mix(query, key, value, seen), mix(far_query, far_key, far_value, real[:, None].expand_as(seen))
    out = torch.where(is_global[..., None, None], whole, local)
    return out * real[..., None, None]


def attend(plan: WindowGlobal, six: list[Tensor], window: int, dropout: float = 0.0) -> Tensor:
    whole = None
    if plan.has_globals:
        whole = Projected(six[3].flatten(0, 1)[plan.global_tokens], *six[4:], explicit=plan.explicit)
    return plan.attend(tuple(six[:3]), whole, window=window, dropout=dropout, scaling=0.3)[0]


def agree(ours: Tensor, reference: Tensor, leaves: list[Tensor]) -> None:
    """Equal values, and equal gradients of a random projection."""
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() < TOLERANCE
    direction = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    found = torch.autograd.grad((ours * direction).sum(), leaves, allow_unused=True)
    expected = torch.autograd.grad((reference * direction).sum(), leaves, allow_unused=True)
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = (torch.zeros(()) if x is None else x for x in (mine, theirs))
        assert (mine - theirs).abs().max() < TOLERANCE


def plan_of(six: list[Tensor], **kwargs: object) -> WindowGlobal:
    return WindowGlobal(six[0].shape[:2], dtype=six[0].dtype, device=six[0].device, **kwargs)


SHAPES = [(tokens, window) for tokens in (1, 2, 7, 16, 33, 50) for window in (2, 4, 8, 16, 50, 70)]


@pytest.mark.parametrize("explicit", [False, True], ids=["sdpa", "explicit"])
@pytest.mark.parametrize("with_globals", [False, True])
@pytest.mark.parametrize("padding", ["none", "right", "left", "holes"])
def test_formula(padding, with_globals, explicit):
    for tokens, window in SHAPES:
        six = inputs(4, tokens)
        real = padding_mask(padding, 4, tokens)
        real = None if real is None else real.bool()
        is_global = global_places(4, tokens) if with_globals else None
        if is_global is not None and real is not None:
            is_global &= real
        for block in (None, 1, 3) if not explicit else (None,):
            plan = plan_of(six, real=real, is_global=is_global, block=block, explicit=explicit)
            agree(attend(plan, six, window), formula(six, window, is_global, real), six)


@pytest.mark.parametrize("explicit", [False, True], ids=["sdpa", "explicit"])
@pytest.mark.parametrize("lengths", [(3, 20, 1, 9, 9), (40,) * 3, (5, 50, 47), (2, 3)])
@pytest.mark.parametrize("window", [2, 6, 30, 64])
def test_packed(lengths, window, explicit):
    """Several sequences in one row do not see each other, and their global tokens stay their own."""
    six = inputs(1, sum(lengths))
    packing = Packing(list(lengths), None, None, torch.device("cpu"))
    places = torch.cat([global_places(4, n)[i % 4] for i, n in enumerate(lengths)])[None]
    for is_global in (places, None):
        plan = plan_of(six, packing=packing, is_global=is_global, block=3, explicit=explicit)
        parts = zip(*(x.split(lengths, 1) for x in six), strict=True)
        chosen = (None,) * len(lengths) if is_global is None else places.split(lengths, 1)
        reference = [formula(list(part), window, mark) for part, mark in zip(parts, chosen, strict=True)]
        agree(attend(plan, six, window), torch.cat(reference, 1), six)


def test_nothing_but_padding():
    six = inputs(2, 20)
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1] = False
    ours = attend(plan_of(six, real=real, block=4), six, 4)
    assert (ours[1] == 0).all()
    agree(ours, formula(six, 4, None, real), six)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    is_global = global_places(2, 90)
    six = [x.detach().to(dtype) for x in inputs(2, 90)]
    ours = attend(plan_of(six, is_global=is_global, block=8), six, 16)
    assert ours.dtype == dtype
    reference = formula([x.double() for x in six], 16, is_global)
    assert (ours.double() - reference).abs().max() < 0.05


def test_dropout():
    """Each weight is dropped or doubled: values of one come out as one on average, and no query is left as it was."""
    six = [x.detach() for x in inputs(1, 600)]
    six[2] = six[5] = torch.ones_like(six[2])
    torch.manual_seed(0)
    ours = attend(plan_of(six, is_global=global_places(1, 600)), six, 32, dropout=0.5)
    assert abs(ours.mean() - 1) < 0.02
    assert ((ours - 1).abs() > 1e-3).double().mean() > 0.95


def test_without_global_tokens_nothing_is_projected_for_them():
    six = inputs(2, 20)
    plan = plan_of(six, is_global=torch.zeros(2, 20, dtype=torch.bool))
    assert not plan.has_globals
    assert attend(plan, six, 4).shape == six[0].shape


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("explicit", [False, True], ids=["sdpa", "explicit"])
@pytest.mark.parametrize("with_globals", [False, True])
def test_size_is_proportional_to_the_length(with_globals, explicit, dropout):
    """No tensor of T * T, forward or backward: twice the tokens are at most twice the largest tensor."""
    sizes = []
    for tokens in (1024, 2048):
        six = inputs(1, tokens)
        is_global = global_places(1, tokens) if with_globals else None
        with LargestTensor() as largest:
            out = attend(plan_of(six, is_global=is_global, explicit=explicit), six, 32, dropout)
            out.sum().backward()
        sizes.append(largest.elements)
    assert sizes[1] < tokens * tokens / 4
    assert sizes[1] <= 2.1 * sizes[0]


# --- global queries and tokens that are not projected -------------------------------------------------------------


def projections() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(3)
    return tuple(nn.Linear(5, HEADS * WIDTH, dtype=torch.float64) for _ in range(2))


def both_ways(plan: WindowGlobal, dropout: float = 0.0) -> list[tuple[Tensor, ...]]:
    """What global tokens get from projected tokens and from tokens as they are, (n, G, H, D) of each of the rows, and
    the gradients of tokens, queries, weights and biases."""
    key, value = projections()
    batch, tokens = plan.rows[0].bucket.count, plan.rows[0].bucket.length
    if plan.rows[0].packed:
        batch, tokens = 1, sum(rows.bucket.tokens for rows in plan.rows)
    x = torch.randn(batch, tokens, 5, dtype=torch.float64, requires_grad=True)
    query = torch.randn(len(plan.global_tokens), HEADS, WIDTH, dtype=torch.float64, requires_grad=True)
    projected = (layer(x).unflatten(-1, (HEADS, WIDTH)) for layer in (key, value))
    results = []
    for whole in (Projected(query, *projected, explicit=True), Unprojected(query, x, key, value)):
        torch.manual_seed(5)
        options = {"dropout": dropout, "scaling": 0.3}
        found = [
            whole.attend(rows, **options)[0][rows.globals.filled] for rows in plan.rows if rows.globals is not None
        ]
        leaves = [x, query, *key.parameters(), *value.parameters()]
        weighted = sum((y * torch.arange(1, y.numel() + 1).view_as(y)).sum() for y in found)
        results.append((*found, *torch.autograd.grad(weighted, leaves)))
    return results


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("padding", ["none", "right", "left", "holes"])
def test_tokens_need_not_be_projected(padding, dropout):
    real = padding_mask(padding, 4, 13)
    real = None if real is None else real.bool()
    is_global = global_places(4, 13) if real is None else global_places(4, 13) & real
    plan = WindowGlobal((4, 13), dtype=torch.float64, device=torch.device("cpu"), real=real, is_global=is_global)
    for mine, theirs in zip(*both_ways(plan, dropout), strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE * max(1.0, theirs.abs().max())


def test_packed_tokens_need_not_be_projected():
    lengths = (3, 200, 1, 9, 40)
    places = torch.cat([global_places(4, n)[i % 4] for i, n in enumerate(lengths)])[None]
    plan = WindowGlobal(
        (1, sum(lengths)),
        dtype=torch.float64,
        device=torch.device("cpu"),
        is_global=places,
        packing=Packing(list(lengths), None, None, torch.device("cpu")),
    )
    assert sum(rows.globals is not None for rows in plan.rows) > 1
    for mine, theirs in zip(*both_ways(plan), strict=True):
        assert (mine - theirs).abs().max() < TOLERANCE * max(1.0, theirs.abs().max())
