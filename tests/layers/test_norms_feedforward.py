"""Norms, feed-forwards and table lookups against their formulas."""

import pytest
import torch
from operators import Operators
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from hf_ext.layers.embeddings import look_up
from hf_ext.layers.feedforward import GELU, GatedFeedForward, make_activation
from hf_ext.layers.norms import RMSNorm


@pytest.mark.parametrize("shape", [(4,), (3, 8), (2, 5, 33), (1, 1, 1)])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_is_the_formula(shape: tuple[int, ...], eps: float, scale: float) -> None:
    norm = RMSNorm(shape[-1], eps=eps)
    assert torch.equal(norm.weight, torch.ones(shape[-1]))
    nn.init.normal_(norm.weight)
    x = (torch.randn(shape) * scale).requires_grad_()
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = wide / ((wide * wide).sum(-1, keepdim=True) / shape[-1] + eps) ** 0.5 * weight
    out = norm(x)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)
    norm.eval()
    with torch.no_grad():  # in other operations
        torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(norm(torch.zeros(shape)), torch.zeros(shape))
    factor = torch.randn(shape)
    got = torch.autograd.grad((out * factor).sum(), (x, norm.weight))
    wanted = torch.autograd.grad((expected * factor).sum(), (wide, weight))
    for a, b in zip(got, wanted, strict=True):
        # The two terms of x's gradient cancel in part: relative to its largest entry.
        torch.testing.assert_close(a.double(), b, atol=2e-6 * max(1.0, b.abs().max().item()), rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm_equals_stock_bit_by_bit(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    """Also with fp32 weights under half-precision inputs, as training recipes keep them."""
    ours, stock = RMSNorm(48, eps=1e-5), LlamaRMSNorm(48, eps=1e-5)
    nn.init.normal_(ours.weight)
    stock.load_state_dict(ours.state_dict())
    ours, stock = ours.to(weight_dtype or dtype), stock.to(weight_dtype or dtype)
    x = (torch.randn(3, 7, 48) * 5).to(dtype)
    a, b = (x.clone().requires_grad_() for _ in range(2))
    out, expected = ours(a), stock(b)
    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(ours.weight.grad, stock.weight.grad)


def test_rms_norm_of_zeros_is_zero_with_finite_gradients() -> None:
    norm, x = RMSNorm(8, eps=1e-6), torch.zeros(2, 8, requires_grad=True)
    out = norm(x)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 8))
    assert x.grad.isfinite().all()


def test_rms_norm_squares_in_fp32() -> None:
    """300 squared is beyond fp16."""
    out = RMSNorm(4, eps=1e-6).half()(torch.full((1, 4), 300.0, dtype=torch.float16))
    assert torch.equal(out, torch.ones(1, 4, dtype=torch.float16))


def test_rms_norm_of_one_token_inside_vmap_and_traced() -> None:
    """There the norm of a single token is no number that Python could hold."""
    norm = RMSNorm(8, eps=1e-6).eval()
    nn.init.normal_(norm.weight)
    tokens = torch.randn(5, 1, 8)
    with torch.no_grad():
        expected = norm(tokens)
        torch.testing.assert_close(torch.vmap(norm)(tokens), expected, atol=1e-6, rtol=1e-6)
        traced = torch.jit.trace(norm, tokens[:1])
        torch.testing.assert_close(traced(tokens[3:4] * 100), norm(tokens[3:4] * 100), atol=1e-6, rtol=1e-6)


def test_rms_norm_of_one_token_of_zeros_without_eps() -> None:
    norm = RMSNorm(8, eps=0.0).eval()
    with torch.no_grad():
        assert norm(torch.zeros(1, 8)).isnan().all()  # 0 / 0, as the formula has it


def test_rms_norm_says_what_it_is() -> None:
    assert "16, eps=1e-05" in repr(RMSNorm(16, eps=1e-5))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3, 5)])
def test_gated_feed_forward_is_the_formula(activation: str, bias: bool, shape: tuple[int, ...]) -> None:
    layer = GatedFeedForward(width=5, inner_width=12, activation=activation, bias=bias).double()
    names = {name for name, _ in layer.named_parameters()}
    weights = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    assert names == weights | ({name.replace("weight", "bias") for name in weights} if bias else set())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def linear(x: torch.Tensor, module: nn.Linear) -> torch.Tensor:
        return x @ module.weight.T + (module.bias if bias else 0.0)

    inner = ACTIVATIONS[activation](linear(x, layer.gate_proj)) * linear(x, layer.up_proj)
    expected = linear(inner, layer.down_proj)
    out = layer(x)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    parameters = [x, *layer.parameters()]
    got, wanted = (torch.autograd.grad(y.square().sum(), parameters) for y in (out, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_feed_forward_equals_stock_bit_by_bit(dtype: torch.dtype) -> None:
    ours = GatedFeedForward(width=16, inner_width=40, activation="silu", bias=False).to(dtype)
    stock = LlamaMLP(LlamaConfig(hidden_size=16, intermediate_size=40, num_attention_heads=4)).to(dtype)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 16, dtype=dtype)
    assert torch.equal(ours(x), stock(x))


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="no_such_activation"):
        GatedFeedForward(width=4, inner_width=8, activation="no_such_activation", bias=False)


# --- lookups ------------------------------------------------------------------------------------------------------


def test_look_up_is_the_table() -> None:
    table = nn.Embedding(7, 3, padding_idx=0)
    index = torch.tensor([[0, 6, 2], [1, 1, 5]])
    out = look_up(table, index, name="input_ids", limit_name="vocab_size")
    assert torch.equal(out, table.weight[index])
    out.sum().backward()
    assert table.weight.grad[0].abs().sum() == 0, "the padding row is not trained"
    assert table.weight.grad[1].tolist() == [2, 2, 2]
    empty = look_up(table, torch.empty(2, 0, dtype=torch.long), name="input_ids", limit_name="vocab_size")
    assert empty.shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("bad", "index"), [(7, [[1, 7]]), (-1, [[0, 2], [-1, 3]]), (-100, [[-100]]), (10**9, [[10**9]])]
)
def test_look_up_names_argument_value_and_limit(bad: int, index: list[list[int]]) -> None:
    table = nn.Embedding(7, 3)
    with pytest.raises(ValueError, match=rf"position_ids holds {bad}, outside 0\.\.6 \(max_position_embeddings=7\)"):
        look_up(table, torch.tensor(index), name="position_ids", limit_name="max_position_embeddings")


def test_look_up_names_the_first_bad_value() -> None:
    with pytest.raises(ValueError, match="input_ids holds 9,"):
        look_up(nn.Embedding(7, 3), torch.tensor([[1, 9], [-4, 8]]), name="input_ids", limit_name="vocab_size")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_look_up_leaves_other_errors_alone(dtype: torch.dtype) -> None:
    """Ids that are no integers: torch's own message says so."""
    with pytest.raises(RuntimeError, match="(?i)expected tensor for argument|scalar type|Long|Int"):
        look_up(nn.Embedding(7, 3), torch.zeros(1, 2, dtype=dtype), name="input_ids", limit_name="vocab_size")


def test_look_up_inside_a_wrapped_table_keeps_the_message() -> None:
    """A table inside another module (an adapter) has its weight through it, or raises what torch raises."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Embedding(7, 3)

        @property
        def weight(self) -> torch.Tensor:
            return self.base_layer.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.base_layer(index)

    with pytest.raises(ValueError, match="input_ids holds 7"):
        look_up(Wrapped(), torch.tensor([[7]]), name="input_ids", limit_name="vocab_size")


@pytest.mark.parametrize(
    "name", ["gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "quick_gelu", "relu"]
)
def test_activation_is_that_of_its_name(name: str) -> None:
    x = (torch.randn(1000, dtype=torch.float64) * 4).requires_grad_()
    factor = torch.randn(1000, dtype=torch.float64)
    results = []
    for act in (make_activation(name), ACT2FN[name]):
        y = act(x)
        results.append((y, *torch.autograd.grad((y * factor).sum(), x)))
    # The library writes the constants with eight digits in one of the spellings.
    torch.testing.assert_close(results[0], results[1], atol=1e-11, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1, 48), (3, 7), (1, GELU.FEW), (1, GELU.FEW + 1)])
def test_gelu_of_few_numbers_is_the_formula(shape: tuple[int, ...]) -> None:
    act, x = GELU().eval(), torch.randn(shape) * 4
    x.flatten()[:3] = torch.tensor([0.0, -100.0, 100.0])
    given, wide = x.clone(), x.double()
    expected = wide * (1 + torch.erf(wide / 2**0.5)) / 2
    for enabled in (False, True):  # without gradients few numbers go another way
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(act(x).double(), expected, atol=2e-6, rtol=0)
    assert torch.equal(x, given)


def test_which_gelu() -> None:
    """Few numbers without gradients, in evaluation, in fp32, and not while a graph is traced."""
    act, few = GELU().eval(), torch.randn(1, 1, 48)

    def spelled_out(act: nn.Module, x: torch.Tensor) -> bool:
        with Operators() as called:
            act(x)
        return "aten.erf_.default" in called.names

    assert not spelled_out(act, few)
    with torch.no_grad():
        assert spelled_out(act, few)
        assert not spelled_out(act, torch.randn(1, GELU.FEW + 1))
        assert not spelled_out(act, few.bfloat16())
        assert not spelled_out(GELU().train(), few)
        assert "erf_" not in str(torch.jit.trace(act, few).graph)


def test_tanh_gelu_keeps_only_its_input() -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        make_activation("gelu_new")(torch.randn(8, requires_grad=True))
    assert len(kept) == 1
