"""What is special to GPT: a cache that the official class lacks, choices with a mask, and its tokenizer.

Shapes: B batch, T tokens.
"""

import json

import harness
import pytest
import torch
import transformers
from harness import Subject, build, compare_gradients, gradients, no_dropout, scratch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, DynamicCache

import hf_ext
from hf_ext.inspection import benchmark, parity

LM = Subject("ext_openai_gpt", "ExtOpenAIGPTLMHeadModel", "gelu")
DOUBLE = Subject("ext_openai_gpt", "ExtOpenAIGPTDoubleHeadsModel", "gelu")


def test_a_token_is_computed_once():
    """Generation feeds one new token at a time, where the stock class goes through the whole text again."""
    stock, ours = harness.generation_pair(LM)
    _, batch = harness.prompts(LM, ours.config)
    seen = {stock: [], ours: []}
    for model, lengths in seen.items():
        model.transformer.h[0].mlp.register_forward_pre_hook(
            lambda _, args, seen=lengths: seen.append(args[0].shape[1])
        )
    tokens = [model.generate(**batch, max_new_tokens=5) for model in seen]
    assert torch.equal(*tokens)
    assert seen == {stock: [9, 10, 11, 12, 13], ours: [9, 1, 1, 1, 1]}


@torch.no_grad()
def test_cache_is_on_unless_a_file_or_the_user_says_otherwise():
    """`use_cache` is no official field: the file must not get it, and must still be able to hold it."""
    ids, folder = torch.tensor([[5, 6]]), scratch()
    model = build(LM.ours, LM)
    assert "use_cache" not in model.config.to_dict()
    assert isinstance(model(input_ids=ids).past_key_values, DynamicCache)
    assert model(input_ids=ids, use_cache=False).past_key_values is None
    model.config.use_cache = False
    model.save_pretrained(folder)
    again = LM.ours.from_pretrained(folder)
    assert again.config.use_cache is False
    assert again(input_ids=ids).past_key_values is None
    assert hf_ext.ExtOpenAIGPTConfig().use_cache is True


@torch.no_grad()
def test_positions_end():
    model = build(LM.ours, LM)
    limit = model.config.n_positions
    ids = torch.full((1, limit + 1), 5)
    past = model(input_ids=ids[:, :limit]).past_key_values
    for inputs in ({"input_ids": ids}, {"input_ids": ids[:, :1], "past_key_values": past}):
        with pytest.raises(ValueError, match=f"{limit + 1} tokens.*n_positions={limit}"):
            model(**inputs)


def test_first_tokens_without_anything_to_see():
    """The stock class lets padding on the left attend to the text after it; that is all that differs there."""
    stock, ours = harness.pair(LM, attn="eager")
    inputs = LM.inputs(ours.config, "left")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        weights = [model(**inputs, output_attentions=True).attentions[0] for model in (stock, ours)]
    queries = [w.transpose(1, 2)[~real] for w in weights]
    assert not torch.allclose(*queries), "then the harness need not leave them out: see Case.first_tokens_differ"
    for own, reference in zip(weights[1], weights[0], strict=True):
        assert torch.isfinite(own).all() and torch.isfinite(reference).all()


@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_both_losses(padding):
    """The losses of tokens and choices, and the gradient of their sum, are those of the stock class."""
    stock, ours = harness.pair(DOUBLE, **no_dropout(DOUBLE))
    inputs = DOUBLE.inputs(ours.config, padding)
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


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"summary_use_proj": False}, {"summary_proj_to_labels": False}], ids=str)
def test_summary_without_scores(fields):
    """The vector itself, for a scorer of the user's own."""
    config = {**DOUBLE.fields, **fields}
    folder = scratch()
    transformers.OpenAIGPTDoubleHeadsModel(transformers.OpenAIGPTConfig(**config)).save_pretrained(folder)
    stock, ours = (cls.from_pretrained(folder).eval() for cls in (DOUBLE.stock, DOUBLE.ours))
    inputs = DOUBLE.inputs(ours.config, "right")
    harness.compare_outputs(ours(**inputs), stock(**inputs), str(fields))
    assert ours(**inputs).mc_logits.shape == (*inputs["input_ids"].shape[:2], ours.config.n_embd)


@pytest.mark.parametrize("source", [LM, DOUBLE], ids=str)
@pytest.mark.parametrize("target", [LM, DOUBLE], ids=str)
def test_one_head_from_the_file_of_another(source, target):
    """Files of the double heads hold the tied weight under the head's name, all others under the embedding's."""
    with torch.no_grad():
        expected = build(source.ours, source).lm_head.weight.clone()
    model, info = target.ours.from_pretrained(harness.stock_folder(source), output_loading_info=True)
    new = {"multiple_choice_head.summary.weight", "multiple_choice_head.summary.bias"}
    assert info["missing_keys"] == (new if target != source and target is DOUBLE else set())
    assert model.lm_head.weight is model.transformer.tokens_embed.weight
    assert torch.equal(model.lm_head.weight, expected)


def test_file_without_prefix():
    """The official file holds the bare model's names, its causal masks and no head."""
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


def test_tokenizer():
    """From the files of the first release, which name no tokenizer class: the model type decides."""
    tokens = ["<unk>", "l", "o", "w</w>", "lo", "low</w>", "n", "e", "w", "h</w>", "e</w>", ".</w>"]
    made = []
    for model_type in ("openai-gpt", "ext_openai_gpt"):
        folder = scratch()
        (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w</w>\n")
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        made.append(AutoTokenizer.from_pretrained(folder))
    assert type(made[0]) is type(made[1]) is transformers.OpenAIGPTTokenizer
    assert made[0]("Low low. ne").input_ids == made[1]("Low low. ne").input_ids == [5, 5, 11, 6, 10]


def test_tools_compare_with_a_stock_class_that_has_only_eager():
    folder = harness.stock_folder(LM)
    report = parity.compare(folder, attn_implementation="sdpa")
    assert report.ok, report.failed
    rows = benchmark.benchmark(folder, batch_size=2, length=8, repeats=1, new_tokens=4, memory=False)
    assert {row.stock_attention for row in rows} == {"eager"}
    assert {"generate-1", "training-full"} <= {row.scenario for row in rows}
