"""The vocabulary loss against plain cross-entropy: values, gradients, memory; and its other ways (heads that must be
called, autocast, compilation)."""

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from operators import LargestTensor
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from hf_ext import losses
from hf_ext.layers.linear import is_plain_linear
from hf_ext.losses import IGNORE_INDEX, mean_or_share, shift_labels_left, vocabulary_loss

WIDTH, VOCABULARY = 12, 37


def plain_loss(
    hidden: Tensor,
    labels: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    transform: Callable[[Tensor], Tensor] | None = None,
    num_items_in_batch: Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """By the formula: -(1 - e) log p(label) - e mean log p, all logits at once, in fp32 or wider."""
    logits = head(hidden if transform is None else transform(hidden))
    logits = logits.float() if logits.dtype != torch.float64 else logits
    log_p = logits - logits.exp().sum(-1, keepdim=True).log()
    labelled = labels != IGNORE_INDEX
    picked = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    rows = -(1 - label_smoothing) * picked - label_smoothing * log_p.mean(-1)
    total = (rows * labelled).sum()
    count = labelled.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / count


def random_batch(seed: int, shape: tuple[int, ...] = (3, 7), ignored: float = 0.4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < ignored] = IGNORE_INDEX
    return hidden, labels


def make_head(bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
    if bias:
        nn.init.normal_(head.bias)
    return head


def make_transform() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))


def compare(hidden: Tensor, labels: Tensor, head: nn.Module, *, chunk_size: int = 512, **options: object) -> None:
    """Loss to 1e-6 and every gradient to 1e-6 or 1e-5 of its size, against the formula in fp64."""
    transform = options.get("transform")
    parameters = [p for m in (head, transform) if m is not None for p in m.parameters() if p.requires_grad]
    inputs = [*([hidden] if hidden.requires_grad else []), *parameters]
    loss = vocabulary_loss(hidden, labels, head, chunk_size=chunk_size, **options)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss * 3.0, inputs)
    modules = [m for m in (head, transform) if m is not None]
    try:
        for module in modules:
            module.double()
        wide = hidden.detach().double().requires_grad_(hidden.requires_grad)
        wide_inputs = [*([wide] if hidden.requires_grad else []), *parameters]
        expected = plain_loss(wide, labels, head, **options)
        wanted = torch.autograd.grad(expected * 3.0, wide_inputs)
    finally:
        for module in modules:
            module.float()
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-6, rtol=1e-6)
    assert any(x.abs().max() > 1e-3 for x in wanted) or not (labels != IGNORE_INDEX).any()
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=1e-5)


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which way the total was computed."""
    taken = []
    for name in ("fused_total", "checkpointed_total"):
        original = getattr(losses, name)
        monkeypatch.setattr(losses, name, lambda *a, _name=name, _f=original: (taken.append(_name), _f(*a))[1])
    return taken


@pytest.mark.parametrize("chunk_size", [1, 3, 512])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_transform", [False, True])
def test_equals_plain_cross_entropy(
    way: list[str], chunk_size: int, bias: bool, label_smoothing: float, with_transform: bool
) -> None:
    for seed, shape in enumerate([(3, 7), (1, 1), (2, 2, 3), (13,)]):
        hidden, labels = random_batch(seed, shape)
        labels.view(-1)[0] = seed  # at least one label
        transform = make_transform() if with_transform else None
        compare(
            hidden,
            labels,
            make_head(bias, seed),
            transform=transform,
            label_smoothing=label_smoothing,
            chunk_size=chunk_size,
        )
    assert set(way) == {"fused_total"}


@pytest.mark.parametrize("ignored", [0.0, 0.9])
@pytest.mark.parametrize("items", [17, torch.tensor(17), torch.tensor(17.0), 1])
@pytest.mark.parametrize("chunk_size", [2, 512])
def test_divides_by_the_items_of_the_step(ignored: float, items: Tensor | int, chunk_size: int) -> None:
    hidden, labels = random_batch(1, ignored=ignored)
    compare(hidden, labels, make_head(), num_items_in_batch=items, chunk_size=chunk_size)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    hidden, labels = random_batch(2, (4, 6))
    head, items = make_head(), (labels != IGNORE_INDEX).sum()
    whole = vocabulary_loss(hidden, labels, head)
    parts = sum(vocabulary_loss(hidden[i], labels[i], head, num_items_in_batch=items) for i in range(4))
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-6)


def wrapped(head: nn.Linear) -> nn.Module:
    return nn.Sequential(head)


def adapted(head: nn.Linear) -> nn.Module:
    holder = nn.ModuleDict({"lm_head": head})
    holder = inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.0), holder)
    for name, parameter in holder.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return holder["lm_head"]


HEADS = {"plain": lambda head: head, "wrapped": wrapped, "lora": adapted}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("items", [None, 9])
@pytest.mark.parametrize("chunk_size", [3, 512])
def test_without_labels_loss_and_gradients_are_zero(kind: str, items: int | None, chunk_size: int) -> None:
    hidden, labels = random_batch(3, ignored=2.0)
    head, transform = HEADS[kind](make_head()), make_transform()
    loss = vocabulary_loss(hidden, labels, head, transform=transform, num_items_in_batch=items, chunk_size=chunk_size)
    assert loss.item() == 0.0
    loss.backward()
    named = {
        "hidden": hidden,
        **dict(head.named_parameters()),
        **{f"t.{n}": p for n, p in transform.named_parameters()},
    }
    for name, x in named.items():
        if x.requires_grad:
            # A gradient of None would make distributed training wait for it.
            assert x.grad is not None, f"{name} takes no part in the graph"
            assert (x.grad == 0).all(), name


def test_without_labels_in_the_whole_step_the_loss_is_zero() -> None:
    """`Trainer` passes the count over the step, which may be 0 too."""
    hidden, labels = random_batch(3, ignored=2.0)
    loss = vocabulary_loss(hidden, labels, make_head(), num_items_in_batch=torch.tensor(0))
    loss.backward()
    assert loss.item() == 0.0
    assert (hidden.grad == 0).all()


def test_empty_batch() -> None:
    hidden = torch.zeros(0, 5, WIDTH, requires_grad=True)
    loss = vocabulary_loss(hidden, torch.zeros(0, 5, dtype=torch.long), make_head())
    assert loss.item() == 0.0


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
@pytest.mark.parametrize("chunk_size", [3, 512])
def test_frozen_parts(frozen: str, chunk_size: int) -> None:
    hidden, labels = random_batch(4)
    head = make_head()
    if frozen == "weight":
        head.requires_grad_(False)
    else:
        hidden = hidden.detach()
    compare(hidden, labels, head, chunk_size=chunk_size)


# --- heads that must be called ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wrapped", "lora"])
@pytest.mark.parametrize("chunk_size", [1, 3, 512])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_other_heads_are_called_chunk_by_chunk(
    way: list[str], kind: str, chunk_size: int, label_smoothing: float
) -> None:
    hidden, labels = random_batch(5)
    head = HEADS[kind](make_head())
    compare(hidden, labels, head, transform=make_transform(), label_smoothing=label_smoothing, chunk_size=chunk_size)
    assert set(way) == {"checkpointed_total"}


HOOKS = {
    "forward": lambda head, calls: head.register_forward_hook(lambda *a: calls.append(1)),
    "forward_pre": lambda head, calls: head.register_forward_pre_hook(lambda *a: calls.append(1)),
    "full_backward": lambda head, calls: head.register_full_backward_hook(lambda *a: calls.append(1)),
    "full_backward_pre": lambda head, calls: head.register_full_backward_pre_hook(lambda *a: calls.append(1)),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_the_head_run(way: list[str], kind: str) -> None:
    hidden, labels = random_batch(6)
    head, calls = make_head(), []
    handle = HOOKS[kind](head, calls)
    loss = vocabulary_loss(hidden, labels, head, chunk_size=4)
    loss.backward()
    assert way == ["checkpointed_total"]
    assert calls
    torch.testing.assert_close(loss, plain_loss(hidden, labels, head), atol=1e-6, rtol=1e-6)
    handle.remove()
    assert is_plain_linear(head)


def test_a_forward_put_on_the_head_runs(way: list[str]) -> None:
    """Some wrappers replace `forward` on the instance (gathered outputs, offloading)."""
    hidden, labels = random_batch(6)
    head = make_head()
    original = head.forward
    head.forward = lambda x: original(x) * 2.0
    loss = vocabulary_loss(hidden, labels, head)
    torch.testing.assert_close(loss, plain_loss(hidden, labels, head), atol=1e-6, rtol=1e-6)


def test_parametrised_head_is_called(way: list[str]) -> None:
    hidden, labels = random_batch(6)
    head = nn.utils.parametrizations.weight_norm(make_head())
    loss = vocabulary_loss(hidden, labels, head)
    assert way == ["checkpointed_total"]
    torch.testing.assert_close(loss, plain_loss(hidden, labels, head), atol=1e-6, rtol=1e-6)


# --- precision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
@pytest.mark.parametrize("chunk_size", [4, 512])
def test_autocast(kind: str, chunk_size: int) -> None:
    hidden, labels = random_batch(7, (5, 20))
    head = HEADS[kind](make_head())
    inputs = [hidden, *head.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = vocabulary_loss(hidden, labels, head, chunk_size=chunk_size)
        expected = plain_loss(hidden, labels, head)
    assert loss.dtype == torch.float32
    # bf16 logits, whose errors average out over the rows. A sum kept in bf16 itself would be off by up to 0.4 %.
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-3)
    got, wanted = torch.autograd.grad(loss, inputs), torch.autograd.grad(expected, inputs)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=0.02 * b.abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "wrapped"])
@pytest.mark.parametrize("chunk_size", [4, 512])
def test_half_precision_weights(dtype: torch.dtype, kind: str, chunk_size: int) -> None:
    """As far from the fp64 truth as the plain way (logits cast to fp32), no farther."""
    hidden, labels = random_batch(8, (5, 20))
    hidden = hidden.detach().to(dtype).requires_grad_()
    head = HEADS[kind](make_head().to(dtype))
    inputs = [hidden, *head.parameters()]
    loss = vocabulary_loss(hidden, labels, head, chunk_size=chunk_size)
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss, inputs)
    plain = torch.autograd.grad(plain_loss(hidden, labels, head), inputs)
    exact_hidden = hidden.detach().double().requires_grad_()
    head.double()
    exact_loss = plain_loss(exact_hidden, labels, head)
    exact = torch.autograd.grad(exact_loss, [exact_hidden, *head.parameters()])
    digits = torch.finfo(dtype).eps
    # Errors of the rounded logits average out; a loss that is itself a half-precision number is off by up to `digits`.
    torch.testing.assert_close(loss.double(), exact_loss.detach(), atol=digits / 8, rtol=digits / 8)
    for a, b, c in zip(got, plain, exact, strict=True):
        assert a.dtype == dtype
        ours, theirs = (a.double() - c).abs().max(), (b.double() - c).abs().max()
        assert ours <= 2 * theirs + 2 * digits * c.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "wrapped"])
def test_half_precision_gradients_stay_finite(dtype: torch.dtype, kind: str) -> None:
    """The sum over many rows is beyond fp16, its mean is not: the division must come before the cast."""
    torch.manual_seed(0)
    hidden = (torch.rand(8192, WIDTH) * 4 + 14).to(dtype).requires_grad_()
    labels = torch.full((8192,), 3)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    nn.init.normal_(head.weight, std=1e-3)
    head = HEADS[kind](head.to(dtype))
    (weight,) = head.parameters()
    loss = vocabulary_loss(hidden, labels, head, chunk_size=512)
    got = torch.autograd.grad(loss, (hidden, weight))
    wanted = torch.autograd.grad(plain_loss(hidden, labels, head), (hidden, weight))
    assert loss.isfinite()
    assert wanted[1].isfinite().all(), "the plain way can do it"
    for a, b in zip(got, wanted, strict=True):
        assert a.isfinite().all()
        # Those of the hidden states are near fp16's smallest numbers, 6e-8 apart, which loss scaling is for.
        torch.testing.assert_close(a, b, atol=0.02 * b.abs().max().item() + 1.2e-7, rtol=0.02)


def test_large_logits() -> None:
    hidden, labels = random_batch(9)
    head = make_head()
    with torch.no_grad():
        head.weight.mul_(300)
    loss = vocabulary_loss(hidden, labels, head, chunk_size=4)
    log_p = torch.log_softmax(head(hidden).double(), -1)
    keep = labels != IGNORE_INDEX
    expected = -log_p[keep].gather(-1, labels[keep][:, None]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert hidden.grad.isfinite().all()


# --- the graph ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("items", [None, torch.tensor(11)])
def test_compiled_in_one_graph(label_smoothing: float, items: Tensor | None) -> None:
    hidden, labels = random_batch(10)
    head, transform = make_head(), make_transform()
    inputs = [hidden, *head.parameters(), *transform.parameters()]

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_loss(
            hidden,
            labels,
            head,
            transform=transform,
            label_smoothing=label_smoothing,
            num_items_in_batch=items,
            chunk_size=4,
        )

    compiled = torch.compile(loss_of, backend="eager", fullgraph=True)
    a, b = compiled(hidden, labels), loss_of(hidden, labels)
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    for x, y in zip(torch.autograd.grad(a, inputs), torch.autograd.grad(b, inputs), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("chunk_size", [4, 512])
def test_without_gradients(kind: str, mode: Callable, chunk_size: int) -> None:
    hidden, labels = random_batch(11)
    head = HEADS[kind](make_head())
    expected = plain_loss(hidden, labels, head).item()
    with mode():
        loss = vocabulary_loss(hidden, labels, head, chunk_size=chunk_size)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk_size", [4, 512])
def test_backward_twice(kind: str, chunk_size: int) -> None:
    hidden, labels = random_batch(12)
    head = HEADS[kind](make_head())
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    loss = vocabulary_loss(hidden, labels, head, chunk_size=chunk_size)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss * 2, inputs)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b, atol=1e-7, rtol=1e-6)


def test_gradient_accumulates() -> None:
    hidden, labels = random_batch(13)
    head = make_head()
    for _ in range(2):
        vocabulary_loss(hidden, labels, head, chunk_size=4).backward()
    expected = torch.autograd.grad(plain_loss(hidden, labels, head), head.weight)[0]
    torch.testing.assert_close(head.weight.grad, 2 * expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("bad", [VOCABULARY, -1, VOCABULARY + 1000])
@pytest.mark.parametrize("chunk_size", [2, 512])
def test_label_outside_the_vocabulary_raises(kind: str, bad: int, chunk_size: int) -> None:
    """A wrong label must not be read as some other memory, nor be ignored."""
    hidden, labels = random_batch(14)
    labels[1, 2] = bad
    with pytest.raises((IndexError, ValueError, RuntimeError)):
        vocabulary_loss(hidden, labels, HEADS[kind](make_head()), chunk_size=chunk_size).backward()


# --- memory -------------------------------------------------------------------------------------------------------


def allocations(call: Callable[[], None]) -> tuple[int, int]:
    """Largest single allocation and peak above the start, bytes, inside torch's own operations too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    now = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        largest, peak = max(largest, event.nbytes()), max(peak, now)
    return largest, peak


@pytest.mark.parametrize("kind", ["plain", "wrapped"])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_all_logits_never_exist(kind: str, ignored: float, label_smoothing: float) -> None:
    rows, width, vocabulary, chunk = 1024, 16, 2000, 64
    hidden = torch.randn(rows, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,))
    labels[torch.rand(rows) < ignored] = IGNORE_INDEX
    head = HEADS[kind](nn.Linear(width, vocabulary))

    def step(function: Callable[..., Tensor] = vocabulary_loss, **options: object) -> None:
        function(hidden, labels, head, label_smoothing=label_smoothing, **options).backward()

    bound = max(chunk * vocabulary, vocabulary * width, rows * width)
    with LargestTensor() as largest:
        step(chunk_size=chunk)
    assert 0 < largest.elements <= bound
    big, peak = allocations(lambda: step(chunk_size=chunk))
    assert big <= 4 * bound
    # A few chunks of logits at once, and the gradients; a fraction of what the full logits alone take.
    assert peak <= 4 * (5 * chunk * vocabulary + 3 * vocabulary * width + 6 * rows * width + 8 * rows)
    assert peak < rows * vocabulary * 4 // 2
    # The measure itself sees full logits where they exist.
    assert allocations(lambda: step(plain_loss))[0] >= 4 * rows * vocabulary


def test_rows_without_a_label_are_never_multiplied() -> None:
    hidden, labels = random_batch(15, (4, 25), ignored=0.8)
    seen = []

    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    transformed = []
    with torch.no_grad():
        vocabulary_loss(
            hidden,
            labels,
            Counting(WIDTH, VOCABULARY),
            transform=lambda x: (transformed.append(len(x)), x)[1],
            chunk_size=7,
        )
    count = int((labels != IGNORE_INDEX).sum())
    assert transformed == [count]
    assert sum(seen) == count
    assert max(seen) <= 7


# --- the small ones -----------------------------------------------------------------------------------------------


def test_shift_labels_left() -> None:
    labels = torch.tensor([[1, 2, 3], [4, IGNORE_INDEX, 6]])
    assert shift_labels_left(labels).tolist() == [[2, 3, IGNORE_INDEX], [IGNORE_INDEX, 6, IGNORE_INDEX]]
    assert shift_labels_left(torch.tensor([[5]])).tolist() == [[IGNORE_INDEX]]
    assert labels.tolist() == [[1, 2, 3], [4, IGNORE_INDEX, 6]], "the argument is left alone"


@pytest.mark.parametrize("items", [None, 13, torch.tensor(13)])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_mean_or_share(items: Tensor | int | None, label_smoothing: float) -> None:
    logits = torch.randn(3, 5, 4, dtype=torch.float32, requires_grad=True)
    labels = torch.randint(0, 4, (3, 5))
    labels[0, :3] = IGNORE_INDEX
    loss = mean_or_share(logits, labels, items, label_smoothing)
    expected = plain_loss(logits, labels, lambda x: x, num_items_in_batch=items, label_smoothing=label_smoothing)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    a, b = (torch.autograd.grad(x, logits)[0] for x in (loss, expected))
    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_mean_or_share_without_labels_is_zero() -> None:
    """A micro-batch of sub-word continuations only has no label; the step must not become NaN."""
    logits = torch.randn(2, 3, 4, requires_grad=True)
    loss = mean_or_share(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert not math.isnan(loss.item())
    assert logits.grad.isfinite().all()


def test_the_library_knows_these_options() -> None:
    """The chunk size is explicit: the automatic one is several times slower on CPU."""
    names = set(inspect.signature(nn.LinearCrossEntropyOptions).parameters)
    assert {"batch_chunk_size", "chunking_method", "acc_policy", "allow_retain_graph"} <= names
