"""Linear layers that are used without being called, and a few rows times a large matrix."""

import pytest
import torch
from operators import Operators
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hf_ext.layers.linear import FEW_ROWS, LARGE, is_plain_linear, project

WIDTH, OUT = 32, 1 << 17  # 2**22 weights


def by_onednn(layer: nn.Module, x: torch.Tensor) -> bool:
    with Operators() as called:
        project(layer, x)
    return any("_linear_pointwise" in name for name in called.names)


def large(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, OUT, bias=bias)


def test_layers_that_must_be_called():
    """A layer with an adapter, a listener or another's `forward` does more than its weight and bias say."""
    assert is_plain_linear(nn.Linear(4, 4))
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["0"]), nn.Sequential(nn.Linear(4, 4)))[0]
    heard, before, backwards, replaced = (nn.Linear(4, 4) for _ in range(4))
    heard.register_forward_hook(lambda *_: None)
    before.register_forward_pre_hook(lambda *_: None)
    backwards.register_full_backward_hook(lambda *_: None)
    replaced.forward = lambda x: x
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    child = type("Child", (nn.Linear,), {})(4, 4)
    for layer in (adapted, heard, before, backwards, replaced, normed, child):
        assert not is_plain_linear(layer)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_few_rows(bias):
    layer = large(bias)
    assert layer.weight.numel() == LARGE
    expected = layer.weight.double(), layer.bias.double() if bias else None
    for shape in ((4, 1, WIDTH), (1, 5, WIDTH), (15, WIDTH)):
        x = torch.randn(shape)
        out = project(layer, x)
        assert out.shape == (*shape[:-1], OUT)
        assert (out - nn.functional.linear(x.double(), *expected)).abs().max() < 1e-6
    strided = torch.randn(4, 3, WIDTH)[:, -1:]
    assert (project(layer, strided) - layer(strided)).abs().max() < 1e-6


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_when():
    layer, x = large(), torch.randn(4, 1, WIDTH)
    with torch.no_grad():
        for rows in range(1, 20):
            assert by_onednn(layer, torch.randn(rows, 1, WIDTH)) is (rows in FEW_ROWS)
        assert not by_onednn(nn.Linear(WIDTH, OUT - 1), x), "a small matrix"
        assert not by_onednn(large().bfloat16(), x.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert not by_onednn(layer, x)
        with torch.backends.mkldnn.flags(enabled=False):
            assert not by_onednn(layer, x)
        heard, seen = large(), []
        heard.register_forward_hook(lambda module, args, output: seen.append(output))
        assert not by_onednn(heard, x) and len(seen) == 1
    assert not by_onednn(layer, x), "gradients"
    with torch.inference_mode():
        assert by_onednn(layer, x)


def test_gradients_are_those_of_the_layer():
    layer, x = large(), torch.randn(4, 1, WIDTH, requires_grad=True)
    found = torch.autograd.grad(project(layer, x).square().sum(), [x, layer.weight])
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
