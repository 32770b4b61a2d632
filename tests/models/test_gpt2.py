"""What is special to GPT-2: positions that end, cross-attention's cache, choices, and old files.

Shapes: B batch, T tokens, S encoder tokens.
"""

import harness
import pytest
import torch
from harness import Subject, build, compare_gradients, gradients, no_dropout, scratch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, EncoderDecoderCache

import hf_ext

LM = Subject("ext_gpt2", "ExtGPT2LMHeadModel", "default")
CROSS = Subject("ext_gpt2", "ExtGPT2LMHeadModel", "cross")
DOUBLE = Subject("ext_gpt2", "ExtGPT2DoubleHeadsModel", "default")


@torch.no_grad()
def test_positions_end():
    model = build(LM.ours, LM)
    limit = model.config.n_positions
    ids = torch.full((1, limit + 1), 5)
    model(input_ids=ids[:, :limit])
    with pytest.raises(ValueError, match=f"{limit + 1} tokens.*n_positions={limit}"):
        model(input_ids=ids)
    past = model(input_ids=ids[:, : limit - 1], use_cache=True).past_key_values
    with pytest.raises(ValueError, match=f"{limit + 1} tokens"):
        model(input_ids=ids[:, :2], past_key_values=past)
    with pytest.raises(ValueError, match="position_ids"):
        model(input_ids=ids[:, :2], position_ids=torch.tensor([[limit - 1, limit]]))
    # A packed row may be longer than any of its sequences may be.
    half = torch.arange(limit)
    packed = model(input_ids=torch.full((1, 2 * limit), 5), position_ids=torch.cat([half, half])[None]).logits
    assert torch.allclose(packed[:, :limit], packed[:, limit:], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("given", [None, DynamicCache])
def test_encoder_is_projected_once(given):
    """The encoder's keys and values are the same at every step of a generation."""
    model = build(CROSS.ours, CROSS)
    inputs = CROSS.inputs(model.config)
    ids, encoder = inputs["input_ids"], inputs["encoder_hidden_states"]
    calls = []
    layer = model.transformer.h[0].crossattention.c_attn
    layer.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    expected = model(input_ids=ids, encoder_hidden_states=encoder).logits
    calls.clear()
    cache = given(config=model.config) if given else None
    steps = []
    for t in range(ids.shape[1]):
        out = model(input_ids=ids[:, t : t + 1], encoder_hidden_states=encoder, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        steps.append(out.logits)
    assert isinstance(cache, EncoderDecoderCache)
    assert calls == [encoder.shape]
    assert torch.allclose(torch.cat(steps, 1), expected, atol=1e-5)


def test_encoder_needs_cross_attention():
    model = build(LM.ours, LM)
    with pytest.raises(ValueError, match="add_cross_attention"):
        model(input_ids=torch.tensor([[5, 6]]), encoder_hidden_states=torch.zeros(1, 3, model.config.n_embd))


@torch.no_grad()
@pytest.mark.parametrize("attn", harness.IMPLEMENTATIONS)
def test_cross_attentions(attn):
    stock, ours = harness.pair(CROSS, attn=attn)
    inputs = CROSS.inputs(ours.config, "right")
    wanted = {"output_attentions": True} if attn == "eager" else {}
    expected, actual = stock(**inputs, **wanted), ours(**inputs, **wanted)
    harness.compare_outputs(actual, expected, attn)
    if attn == "eager":
        assert len(actual.cross_attentions) == len(actual.attentions) == ours.config.n_layer


@torch.no_grad()
def test_packed_rows_with_an_encoder():
    """Packed sequences of a row share its encoder output, and still do not see each other."""
    model = build(CROSS.ours, CROSS)
    ids, encoder = torch.tensor([[5, 6, 7, 8, 9]]), torch.randn(1, 4, model.config.n_embd)
    mask = torch.tensor([[1, 1, 1, 0]])
    shared = {"encoder_hidden_states": encoder, "encoder_attention_mask": mask}
    packed = model(input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), **shared).logits
    separate = [model(input_ids=part, **shared).logits for part in (ids[:, :2], ids[:, 2:])]
    assert torch.allclose(packed, torch.cat(separate, 1), atol=1e-5)


@pytest.mark.parametrize("with_index", [False, True])
def test_both_losses(with_index):
    """The losses of tokens and choices, and the gradient of their sum, are those of the stock class."""
    stock, ours = harness.pair(DOUBLE, **no_dropout(DOUBLE))
    inputs = DOUBLE.inputs(ours.config, "right")
    if not with_index:
        inputs.pop("mc_token_ids")
    labels = DOUBLE.labels(ours.config, inputs)
    found = []
    for model in (stock, ours):
        model.train()
        output = model(**inputs, **labels)
        (output.loss + 2 * output.mc_loss).backward()
        found.append((output, gradients(model)))
    for name in ("loss", "mc_loss", "mc_logits"):
        harness.assert_close(found[1][0][name], found[0][0][name], name)
    assert found[1][0].logits is None, "the tensor of all logits was made"
    compare_gradients(found[1][1], found[0][1], "both losses")
    with pytest.raises(ValueError, match="mc_labels"):
        ours(input_ids=inputs["input_ids"][:, 0], mc_labels=labels["mc_labels"])
    with pytest.raises(ValueError, match="mc_labels"):
        ours(input_ids=inputs["input_ids"], mc_labels=labels["mc_labels"][:2])
    with pytest.raises(ValueError, match="mc_labels holds 3, outside 0..2"):
        ours(input_ids=inputs["input_ids"], mc_labels=torch.full_like(labels["mc_labels"], 3))


@torch.no_grad()
@pytest.mark.parametrize(
    "fields", [{"summary_type": "first"}, {"summary_type": "mean"}, {"summary_type": "last"}], ids=str
)
def test_summaries(fields):
    """Rows of tokens as in the stock class; of choices each by itself, which the stock class mixes up."""
    stock, ours = harness.pair(DOUBLE, **fields)
    inputs = DOUBLE.inputs(ours.config)
    inputs.pop("mc_token_ids")
    rows = {name: x.flatten(0, 1) for name, x in inputs.items()}
    harness.compare_outputs(ours(**rows), stock(**rows), "rows")
    harness.assert_close(ours(**inputs).mc_logits.flatten(), ours(**rows).mc_logits, "choices")


def test_unknown_summary():
    config = hf_ext.ExtGPT2Config(**DOUBLE.fields, summary_type="attn")
    with pytest.raises(ValueError, match="summary_type"):
        hf_ext.ExtGPT2DoubleHeadsModel(config)


@torch.no_grad()
def test_file_without_prefix():
    """The official files hold the bare model's names, its causal masks and no head."""
    source, folder = harness.stock_folder(LM), scratch()
    weights = load_file(source / "model.safetensors")
    bare = {name.removeprefix("transformer."): x for name, x in weights.items()}
    assert "lm_head.weight" not in bare
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    with harness.no_warning():
        model, info = LM.ours.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_upcast_in_half_precision(dtype):
    """With `reorder_and_upcast_attn` eager scores are computed in fp32, under autocast too."""
    subject = Subject("ext_gpt2", "ExtGPT2Model", "cross-upcast")
    stock, ours = harness.pair(subject, attn="eager")
    inputs = subject.inputs(ours.config, "right")
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        harness.compare_outputs(ours(**inputs), stock(**inputs), "autocast", tolerance=2e-2)
    with torch.no_grad():
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].to(dtype)
        harness.compare_outputs(ours.to(dtype)(**inputs), stock.to(dtype)(**inputs), "cast", tolerance=2e-2)


def test_cache_beside_a_loss():
    """In eval mode the stock class returns its cache with labels too."""
    model = build(LM.ours, LM)
    ids = torch.tensor([[5, 6, 7]])
    assert model(input_ids=ids, labels=ids).past_key_values.get_seq_length() == 3
    assert model.train()(input_ids=ids, labels=ids).past_key_values is None
