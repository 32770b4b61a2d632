"""Layers of 4 bits on processors with AVX512-BF16, where bitsandbytes packs weights when it first computes without
gradients (`hf_ext/layers/quantized.py`)."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BertConfig, BertModel, BitsAndBytesConfig

import hf_ext

bnb = pytest.importorskip("bitsandbytes")
from bitsandbytes.functional import has_avx512bf16  # noqa: E402

ROUNDED_SCALES = 2**-7  # to bf16, which has 8 bits, and to 8 bits again where they are nested
SIZES = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}
WHOLE = {"hidden_size": 64, "intermediate_size": 128}  # in blocks of 64 columns and 32 rows
BROKEN = {"hidden_size": 48, "intermediate_size": 72}


@pytest.fixture
def packs(monkeypatch):
    """Layers are packed as on the processors that the packing is for."""
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)


needs_kernel = pytest.mark.skipif(not has_avx512bf16(), reason="the kernel needs a processor with AVX512-BF16")


@pytest.fixture
def load(tmp_path):
    """A tiny BERT in 4 bits; `packs` says whether a call without gradients packs it."""

    def loaded(sizes: dict, cls: type = hf_ext.ExtBertModel, nested: bool = True) -> torch.nn.Module:
        torch.manual_seed(0)
        config = BertConfig(**SIZES, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        BertModel(config).save_pretrained(tmp_path)
        options = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=nested,
        )
        return cls.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)

    return loaded


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, bnb.nn.Linear4bit)]


def is_packed(layer: torch.nn.Module) -> bool:
    return getattr(layer.weight.quant_state, "packing_format_for_cpu", False)


def pack(layer: torch.nn.Module) -> None:
    """What a call without gradients does first on such a processor."""
    weight = layer.weight
    weight.data, weight.quant_state = bnb.functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)


def values(layer: torch.nn.Module) -> torch.Tensor:
    return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("nested", [True, False])
def test_training_unpacks(load, packs, nested):
    model = load(WHOLE, nested=nested)
    expected = [values(layer) for layer in layers_of(model)]
    assert all(layer.support_avx512bf16_for_cpu for layer in layers_of(model)), "the fast kernel is not used"
    for layer in layers_of(model):
        pack(layer)
    model.train()
    for layer, reference in zip(layers_of(model), expected, strict=True):
        assert not is_packed(layer) and not layer.support_avx512bf16_for_cpu
        found = values(layer)
        assert found.dtype == reference.dtype
        assert (found - reference).abs().max() <= ROUNDED_SCALES * reference.abs().max()
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers_of(model.eval())), "packed once more"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("way", ["dequantised", "saved"])
def test_what_leaves_is_unpacked(load, packs, tmp_path, way, nested):
    model = load(WHOLE, nested=nested)
    expected = {name: values(layer) for name, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear4bit)}
    assert len(expected) == 13
    for layer in layers_of(model):
        pack(layer)
    if way == "saved":
        model.save_pretrained(tmp_path / "saved")
        model = hf_ext.ExtBertModel.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert len(layers_of(model)) == 13
    whole = model.dequantize()
    for name, reference in expected.items():
        difference = (whole.get_submodule(name).weight - reference).abs().max()
        assert difference <= ROUNDED_SCALES * reference.abs().max(), name


def test_sizes_that_cannot_be_packed_are_not(load, packs):
    """The official class raises here on such a processor; on any other, both compute the same."""
    model = load(BROKEN)
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers_of(model))
    mixed = load({"hidden_size": 64, "intermediate_size": 72})
    assert {layer.support_avx512bf16_for_cpu for layer in layers_of(mixed)} == {True, False}
    with torch.no_grad():
        found = model(IDS).last_hidden_state
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: False)
        stock = load(BROKEN, BertModel)
    with torch.no_grad():
        assert (found - stock(IDS).last_hidden_state).abs().max() < 1e-5


@needs_kernel
def test_packed_kernel_equals_stock(load, packs):
    outputs = []
    for cls in (hf_ext.ExtBertModel, BertModel):
        model = load(WHOLE, cls)
        with torch.no_grad():
            outputs.append(model(IDS).last_hidden_state)
        assert all(is_packed(layer) for layer in layers_of(model)), "the packed kernel was not used"
    assert torch.equal(*outputs)


@needs_kernel
def test_training_goes_on_after_an_evaluation(load, packs):
    """With the official class, the second step raises: nothing flows back through packed weights."""
    model = prepare_model_for_kbit_training(load(WHOLE), use_gradient_checkpointing=False)
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["query", "dense"], init_lora_weights=False))
    gradients = []
    for _ in ("before an evaluation", "after it"):
        tuned.train()
        tuned.zero_grad()
        tuned(IDS).last_hidden_state.pow(2).mean().backward()
        gradients.append({n: p.grad.clone() for n, p in tuned.named_parameters() if p.grad is not None})
        tuned.eval()
        with torch.no_grad():
            tuned(IDS)
    assert len(gradients[0]) == 16 and all(g.abs().sum() > 0 for g in gradients[0].values())
    for name, expected in gradients[0].items():
        assert torch.equal(gradients[1][name], expected), name
