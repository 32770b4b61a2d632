"""Rotary positions against complex multiplication and against the stock embedding, for every rope type."""

import copy
import math

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_ext.configuration import ROPE_TYPES
from hf_ext.layers.positions import RotaryEmbedding, Rotation, RotationOfOneToken, rotate

ORIGINAL = 32  # tokens of the original context
WIDTH = 16  # D

PARAMETERS = {
    "default": {"rope_theta": 10000.0},
    "linear": {"rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_theta": 10000.0, "factor": 3.0},
    "yarn": {"rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.1 * i for i in range(WIDTH // 2)],
        "long_factor": [2.0 + 0.5 * i for i in range(WIDTH // 2)],
    },
    "llama3": {
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
BELOW = torch.arange(ORIGINAL - 2)[None]
ABOVE = torch.arange(ORIGINAL * 3)[None]


def config(rope_type: str, **parameters: object) -> LlamaConfig:
    # For linear and dynamic scaling `max_position_embeddings` is the original context itself.
    longest = ORIGINAL if rope_type in ("default", "linear", "dynamic") else ORIGINAL * 4
    return LlamaConfig(
        hidden_size=2 * WIDTH,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": rope_type, **PARAMETERS[rope_type], **parameters},
    )


def stock(rope_type: str, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A fresh stock embedding's cos and sin, first halves: the second repeat them."""
    cos, sin = LlamaRotaryEmbedding(config(rope_type))(torch.zeros(1, dtype=dtype), position_ids)
    half = WIDTH // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    assert torch.equal(sin[..., :half], sin[..., half:])
    return cos[..., :half], sin[..., :half]


def layout(angles: Tensor) -> tuple[Tensor, Tensor]:
    """(B or 1, T, D / 2) angles -> cos and sin as `rotate` takes them, (B or 1, 1, T, D), sin with its signs."""
    angles = angles[:, None]
    return torch.cat([angles.cos(), angles.cos()], -1), torch.cat([-angles.sin(), angles.sin()], -1)


def halves(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What a `RotaryEmbedding` gives -> cos and sin of each angle once, (B or 1, T, D / 2)."""
    cos, sin = pair
    half = cos.shape[-1] // 2
    assert cos.shape == sin.shape == (cos.shape[0], 1, cos.shape[2], 2 * half)
    assert torch.equal(cos[..., :half], cos[..., half:])
    assert torch.equal(sin[..., :half], -sin[..., half:])
    return cos[:, 0, :, half:], sin[:, 0, :, half:]


def check_equal(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], tolerance: float = 0.0) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0.0)


# --- the rotation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_rotate_is_complex_multiplication(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, tokens, half = (int(n) for n in torch.randint(1, 6, (4,), generator=generator))
    x = torch.randn(batch, heads, tokens, 2 * half, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = batch if seed % 2 else 1
    angles = torch.randn(rows, tokens, half, generator=generator, dtype=torch.float64) * 10
    out = rotate(x, *layout(angles))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None]
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=1e-12)
    # The gradient of a rotation is the rotation back.
    factor = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((out * factor).sum(), x)
    torch.testing.assert_close(gradient, rotate(factor, *layout(-angles)), atol=1e-13, rtol=1e-13)


def test_rotate_equals_stock() -> None:
    query, key = torch.randn(2, 4, 9, WIDTH), torch.randn(2, 2, 9, WIDTH)
    angles = torch.randn(2, 9, WIDTH // 2)
    cos, sin = (torch.cat([x, x], -1) for x in (angles.cos(), angles.sin()))
    expected = apply_rotary_pos_emb(query, key, cos, sin)
    for x, wanted in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, *layout(angles)), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("rope_type", ["default", "yarn"])  # yarn scales cos and sin
def test_one_token_turns_by_one_product(rope_type: str, share: float) -> None:
    rotary = RotaryEmbedding(config=config(rope_type, partial_rotary_factor=share))
    query, key = torch.randn(3, 4, 1, WIDTH), torch.randn(3, 2, 1, WIDTH, requires_grad=True)
    for place in (0, 7, 4000):
        rotation = rotary(torch.tensor([[place]]), torch.float32)
        assert type(rotation) is RotationOfOneToken
        assert rotation.cos.shape == rotation.sin.shape == (1, 1, 1, int(WIDTH * share))
        for x in (query, key):
            torch.testing.assert_close(rotation.turn(x), rotate(x, *rotation), atol=1e-6, rtol=1e-6)
        # What stands beside the rotated part is the same number, as is a query of another precision, turned as ever.
        rest = slice(int(WIDTH * share), None)
        assert torch.equal(rotation.turn(query)[..., rest], query[..., rest])
        assert torch.equal(rotation.turn(query.double()), rotate(query.double(), *rotation))
        factor = torch.randn_like(key)
        (got,) = torch.autograd.grad((rotation.turn(key) * factor).sum(), key)
        (wanted,) = torch.autograd.grad((rotate(key, *rotation) * factor).sum(), key)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-6)


def test_a_token_whose_next_block_is_on_another_device() -> None:
    """Accelerate moves tensors inside named tuples, and builds these anew."""
    rotation = RotaryEmbedding(config=config("default"))(torch.tensor([[3]]), torch.float32)
    query = torch.randn(1, 4, 1, WIDTH)
    moved = send_to_device({"rotation": rotation}, "meta")["rotation"]
    assert type(moved) is RotationOfOneToken
    assert moved.turn(query.to("meta")).shape == query.shape
    back = send_to_device(rotation, "cpu")
    torch.testing.assert_close(back.turn(query), rotate(query, *rotation), atol=1e-6, rtol=1e-6)


def test_a_token_in_a_block_that_is_compiled_by_itself() -> None:
    rotation = RotaryEmbedding(config=config("default"))(torch.tensor([[3]]), torch.float32)
    query = torch.randn(1, 4, 1, WIDTH)
    turn = torch.compile(lambda rotation, x: rotation.turn(x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(turn(rotation, query), rotate(query, *rotation), atol=1e-6, rtol=1e-6)
    assert rotation.matrix is None


def test_only_products_in_fp32_turn_a_token() -> None:
    """Angles in bf16 are not the same angles; and rows that stand at different places share no matrix."""
    rotary, one = RotaryEmbedding(config=config("default")), torch.tensor([[3]])

    def kind(position_ids: Tensor = one, dtype: torch.dtype = torch.float32) -> type:
        return type(rotary(position_ids, dtype))

    assert kind() is RotationOfOneToken
    assert kind(torch.tensor([[3], [5]])) is kind(torch.tensor([[3, 4]])) is Rotation
    assert kind(dtype=torch.bfloat16) is kind(dtype=torch.float64) is Rotation
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kind() is Rotation
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert kind() is Rotation
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3"])
def test_dot_product_depends_on_the_distance_only(rope_type: str) -> None:
    rotary = RotaryEmbedding(config=config(rope_type))
    query, key = (torch.randn(1, 1, 1, WIDTH, dtype=torch.float64) for _ in range(2))

    def product(a: int, b: int) -> float:
        def at(x: Tensor, place: int) -> Tensor:
            return rotate(x, *rotary(torch.tensor([[place]]), torch.float64))

        return (at(query, a) * at(key, b)).sum().item()

    for distance in (0, 1, 5, 17):
        values = [product(a + distance, a) for a in (0, 1, 8, 30)]
        # Angles are fp32: at 47 they are exact to about 2e-6.
        assert max(values) - min(values) < 1e-4
        assert values[0] == pytest.approx(product(distance, 0), abs=1e-12)
    assert abs(product(3, 0) - product(0, 3)) > 1e-3, "the sign of the distance matters"


# --- the angles ---------------------------------------------------------------------------------------------------


def test_default_frequencies_are_the_paper_s() -> None:
    rotary = RotaryEmbedding(config=config("default"))
    expected = [10000.0 ** (-2 * i / WIDTH) for i in range(WIDTH // 2)]
    torch.testing.assert_close(rotary.inv_freq.double(), torch.tensor(expected).double(), atol=0, rtol=1e-6)
    cos, sin = halves(rotary(torch.tensor([[0, 3]]), torch.float32))
    assert cos.shape == sin.shape == (1, 2, WIDTH // 2)
    assert cos[0, 0].tolist() == [1.0] * (WIDTH // 2)
    assert cos[0, 1, 0].item() == pytest.approx(math.cos(3), abs=1e-6)
    assert sin[0, 1, 0].item() == pytest.approx(math.sin(3), abs=1e-6)


def test_linear_scaling_divides_positions() -> None:
    a = RotaryEmbedding(config=config("linear"))(torch.arange(8)[None] * 4, torch.float32)
    b = RotaryEmbedding(config=config("default"))(torch.arange(8)[None], torch.float32)
    check_equal(a, b, 1e-6)


def test_every_rope_type_is_tested() -> None:
    assert set(PARAMETERS) == set(ROPE_TYPES)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", ["below", "above", "batch", "one_late"])
def test_angles_equal_stock(rope_type: str, dtype: torch.dtype, positions: str) -> None:
    position_ids = {
        "below": BELOW,
        "above": ABOVE,
        "batch": torch.stack([torch.arange(7), torch.arange(20, 27)]),
        "one_late": torch.tensor([[ORIGINAL + 5]]),
    }[positions]
    rotary = RotaryEmbedding(config=config(rope_type))
    out = rotary(position_ids, dtype)
    expected = stock(rope_type, position_ids, dtype)
    # Dynamic frequencies are computed from the length in fp32 here, in Python's doubles there: the base differs in its
    # last digit, and the angles of up to 95 with it.
    tolerance = {torch.float32: 3e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] if rope_type == "dynamic" else 0
    check_equal(halves(out), expected, tolerance)
    assert not out[0].requires_grad


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_exactly_at_the_limit(rope_type: str) -> None:
    """The last position of the original context, and the first one beyond."""
    for last in (ORIGINAL - 1, ORIGINAL):
        position_ids = torch.arange(last + 1)[None]
        out = RotaryEmbedding(config=config(rope_type))(position_ids, torch.float32)
        check_equal(halves(out), stock(rope_type, position_ids), 1e-5)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_nothing_is_remembered_between_calls(rope_type: str) -> None:
    rotary = RotaryEmbedding(config=config(rope_type))
    alone = rotary(BELOW, torch.float32)
    above = rotary(ABOVE, torch.float32)
    check_equal(rotary(BELOW, torch.float32), alone)
    check_equal(rotary(ABOVE, torch.float32), above)
    if rope_type in ("dynamic", "longrope"):
        assert not torch.equal(above[0][:, :, : BELOW.shape[1]], alone[0]), "the length changes the frequencies"


def test_scaling_factor_is_applied_to_cos_and_sin() -> None:
    rotary = RotaryEmbedding(config=config("yarn"))
    expected = 0.1 * math.log(8.0) + 1
    assert rotary.attention_scaling == pytest.approx(expected)
    cos, sin = rotary(BELOW, torch.float32)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, expected**2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_partial_rotary_width(share: float) -> None:
    rotary = RotaryEmbedding(config=config("default", partial_rotary_factor=share))
    half = int(WIDTH * share) // 2
    expected = [10000.0 ** (-i / half) for i in range(half)]
    torch.testing.assert_close(rotary.inv_freq.double(), torch.tensor(expected).double(), atol=0, rtol=1e-6)


# --- precision ----------------------------------------------------------------------------------------------------


def write_buffers(module: nn.Module) -> nn.Module:
    """What wrappers do that cast a model in place, without `_apply`."""
    for buffer in module.buffers():
        buffer.data = buffer.data.to(torch.bfloat16)
    return module


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "to": lambda m: m.to(torch.bfloat16),
    "twice": lambda m: m.half().float(),
    "double": lambda m: m.double(),
    "inside_a_model": lambda m: nn.ModuleDict({"rotary": m}).bfloat16()["rotary"],
    "copied": lambda m: copy.deepcopy(m).half(),
    "buffer_data": write_buffers,
}


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("cast", CASTS)
def test_angles_keep_fp32_whatever_the_model_is_cast_to(rope_type: str, cast: str) -> None:
    """In bf16, 256 and 257 are one number: the angles of late positions would be noise."""
    late = torch.arange(ORIGINAL * 30, ORIGINAL * 30 + 5)[None]
    rotary = RotaryEmbedding(config=config(rope_type))
    expected = [rotary(position_ids, torch.float32) for position_ids in (BELOW, ABOVE, late)]
    rotary = CASTS[cast](rotary)
    for position_ids, wanted in zip((BELOW, ABOVE, late), expected, strict=True):
        check_equal(rotary(position_ids, torch.float32), wanted)
    if cast != "buffer_data":
        assert all(buffer.dtype == torch.float32 for buffer in rotary.buffers())
    assert rotary.state_dict() == {}, "the buffers are in no file"


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_angles_keep_fp32_under_autocast(rope_type: str) -> None:
    rotary = RotaryEmbedding(config=config(rope_type))
    expected = rotary(ABOVE, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        check_equal(rotary(ABOVE, torch.float32), expected)


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.parametrize("cast", [False, True])
def test_meta_construction_then_reset(rope_type: str, cast: bool) -> None:
    """How `from_pretrained` builds a model: on meta, then on raw memory, then `reset_buffers`."""
    with torch.device("meta"):
        rotary = RotaryEmbedding(config=config(rope_type))
    assert all(buffer.is_meta for buffer in rotary.buffers())
    if cast:
        rotary.bfloat16()
    rotary.to_empty(device="cpu")
    for buffer in rotary.buffers():
        buffer.fill_(math.nan)
    rotary.reset_buffers()
    assert all(buffer.dtype == torch.float32 for buffer in rotary.buffers())
    fresh = RotaryEmbedding(config=config(rope_type))
    assert rotary.attention_scaling == fresh.attention_scaling
    for position_ids in (BELOW, ABOVE):
        check_equal(rotary(position_ids, torch.float32), fresh(position_ids, torch.float32))


def test_buffers_follow_to_the_device() -> None:
    rotary = RotaryEmbedding(config=config("longrope")).to("meta")
    assert rotary.inv_freq.is_meta
    assert rotary.long_inv_freq.is_meta


@pytest.mark.parametrize("rope_type", ROPE_TYPES)
def test_traces_in_one_graph(rope_type: str) -> None:
    rotary = RotaryEmbedding(config=config(rope_type))
    compiled = torch.compile(rotary, backend="eager", fullgraph=True)
    for position_ids in (BELOW, ABOVE):
        check_equal(compiled(position_ids, torch.float32), rotary(position_ids, torch.float32))
