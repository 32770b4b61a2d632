"""What is special to CLIP: where a text is pooled, what need not be computed, and the loss over several processes."""

import copy
import gc
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from cases import CASES
from cases.clip_text_model import clip_texts
from harness import (
    assert_close,
    compare_gradients,
    compare_outputs,
    gradients,
    no_warning,
    randomise,
    subjects,
    tensors_of,
    trainer,
)
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hf_ext
from hf_ext.losses import contrastive_loss
from hf_ext.training import LogitScaleLimit

FIELDS = CASES["ext_clip"].configs["first-eos"]
TEXT = FIELDS["text_config"]
PAIR = subjects("pair", configs="one")[0]


def text_model(**fields: object) -> hf_ext.ExtCLIPTextModel:
    torch.manual_seed(0)
    model = hf_ext.ExtCLIPTextModel(hf_ext.ExtCLIPTextConfig(**{**TEXT, **fields})).eval()
    randomise(model)
    return model


def pair_model(**fields: object) -> hf_ext.ExtCLIPModel:
    model = hf_ext.ExtCLIPModel(hf_ext.ExtCLIPConfig(**{**FIELDS, **fields})).eval()
    randomise(model)
    return model


# --- where a text is pooled ---------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("eos", "row", "place"),
    [
        (9, [3, 15, 4, 9, 5, 1], 3),  # an added token above the end of text does not move it
        (9, [3, 4, 9, 9, 9, 9], 2),  # the end of text is the padding as well
        (9, [9, 4, 5, 9, 1, 1], 0),
        ([9, 11], [3, 4, 11, 9, 1, 1], 2),  # any of several
        ([2], [3, 19, 2, 5, 4, 1], 2),  # the end of text really is 2
        (2, [3, 19, 2, 5, 4, 1], 1),  # an early file: the highest id, as in the stock class
    ],
)
def test_pooled_at_the_end_of_the_text(eos, row, place):
    model = text_model(vocab_size=20, eos_token_id=eos, bos_token_id=8)
    output = model(torch.tensor([row]))
    assert torch.equal(output.pooler_output, output.last_hidden_state[:, place])


def test_early_files_of_the_openai_vocabulary():
    """They say 2, and mean 49407, whatever tokens were added above it; without added tokens that is the highest id."""
    model = text_model(vocab_size=49410, eos_token_id=2, num_hidden_layers=0)
    stock = transformers.CLIPTextModel(transformers.CLIPTextConfig(**{**TEXT, "vocab_size": 49410, "eos_token_id": 2}))
    ids = torch.tensor([[49406, 320, 2, 49407, 49407], [49406, 49407, 5, 49407, 0]])
    assert model.eos_places(ids).tolist() == [3, 1]
    assert ids.argmax(-1).tolist() == [3, 1] and stock.eos_token_id == 2
    ids[:, 2] = 49409
    assert model.eos_places(ids).tolist() == [3, 1]


def test_a_row_without_an_end():
    model = text_model()
    ids = torch.tensor([[40, 3, 41], [40, 3, 4]])
    with pytest.raises(ValueError, match=r"row 1 of input_ids has no end-of-text token \(eos_token_id=41\)"):
        model(ids)
    # Where nothing can be read, the last token.
    compiled = torch.compile(model.eos_places, fullgraph=True, backend="eager")
    assert compiled(ids).tolist() == [2, 2]


def test_what_users_get_wrong():
    with pytest.raises(ValueError, match="input_ids are needed"):
        text_model()()
    with pytest.raises(ValueError, match="the input has 35 tokens, but the model has learned positions for 34"):
        text_model()(torch.full((1, 35), 41))
    model = pair_model()
    inputs = PAIR.inputs(model.config)
    inputs["pixel_values"] = inputs["pixel_values"][:2]
    assert model(**inputs).logits_per_text.shape == (4, 2)
    with pytest.raises(ValueError, match="as many texts as images.*4 texts and 2 images"):
        model(**inputs, return_loss=True)
    with pytest.raises(ValueError, match="no mask token"):
        model.vision_model(inputs["pixel_values"], bool_masked_pos=torch.zeros(2, 9))


# --- what need not be computed ------------------------------------------------------------------------------------


def seen_tokens(model: hf_ext.ExtCLIPTextModel) -> list[torch.Size]:
    """What enters the first block from now on."""
    seen = []
    model.blocks()[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    return seen


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", ["none", "ones", "right", "left", "holes"])
def test_tokens_after_the_end_are_not_computed(attn, padding):
    """The pooled output and its gradients are those of the whole batch."""
    model = text_model()
    model.set_attn_implementation(attn)
    inputs = clip_texts("text", model.config, padding)
    whole = model(**inputs, skip_padding=False)
    weights = torch.randn(whole.pooler_output.shape, generator=torch.Generator().manual_seed(0))
    (whole.pooler_output * weights).sum().backward()
    reference = gradients(model)
    seen = seen_tokens(model)
    for pooled_only in (False, True):
        model.zero_grad()
        output = model(**inputs, pooled_only=pooled_only)
        assert (output.last_hidden_state is None) == pooled_only
        assert_close(output.pooler_output, whole.pooler_output, f"{padding}, {pooled_only=}")
        (output.pooler_output * weights).sum().backward()
        compare_gradients(gradients(model), reference, f"{padding}, {pooled_only=}")
    eos = model.eos_places(inputs["input_ids"])
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    real = int(mask.sum())
    until_eos = int((mask * (torch.arange(mask.shape[1]) <= eos[:, None])).sum())
    expected = [(4, 9) if real == mask.numel() else (1, real), (4, 9) if until_eos == mask.numel() else (1, until_eos)]
    assert [tuple(shape[:2]) for shape in seen] == expected


@torch.no_grad()
def test_padding_is_left_out_of_the_pair():
    model = pair_model()
    inputs = PAIR.inputs(model.config, "right")
    expected = model(**inputs, skip_padding=False)
    mask = inputs["attention_mask"].bool()
    seen = seen_tokens(model.text_model)
    for options in ({}, {"pooled_only": True}, {"skip_padding": False}):
        found, wanted = tensors_of(model(**inputs, **options)), tensors_of(expected)
        for name in ("logits_per_text", "logits_per_image", "text_embeds", "image_embeds"):
            assert_close(found[name], wanted[name], f"{options}: {name}")
        if not options:
            states = found["text_model_output.last_hidden_state"]
            assert_close(states[mask], wanted["text_model_output.last_hidden_state"][mask], "real tokens")
            assert not states[~mask].any()
    model.config.skip_padding = False
    compare_outputs(model(**inputs), expected, "by configuration", tolerance=0.0)
    assert [shape[0] for shape in seen] == [1, 1, 4, 4]


@torch.no_grad()
def test_end_of_text_on_padding():
    """Where the mask covers the end of a text, what is pooled is computed as the official class does."""
    model = text_model()
    ids = torch.tensor([[40, 3, 41, 1, 1], [40, 3, 5, 6, 41]])
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]])
    expected = model(ids, attention_mask=mask, skip_padding=False).pooler_output
    assert torch.equal(model(ids, attention_mask=mask).pooler_output, expected)


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["TextModel", "TextModelWithProjection", "VisionModel", "VisionModelWithProjection"])
def test_a_tower_out_of_the_file_of_a_pair(name, tmp_path):
    """Each class reads its part of an official file, or of ours, without a word about the rest."""
    model = pair_model(projection_dim=10)  # the towers' own
    hf_ext.export_official(model, tmp_path / "official")
    model.save_pretrained(tmp_path / "ours")
    stock = getattr(transformers, f"CLIP{name}").from_pretrained(tmp_path / "official").eval()
    inputs = PAIR.inputs(model.config)
    names = ("pixel_values",) if name.startswith("Vision") else ("input_ids",)
    given = {n: inputs[n] for n in names}
    for folder in ("official", "ours"):
        with no_warning():
            tower, info = getattr(hf_ext, f"ExtCLIP{name}").from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        with torch.no_grad():
            compare_outputs(tower.eval()(**given), stock(**given), folder)


# --- the loss -----------------------------------------------------------------------------------------------------


def joined(rank: int, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    contrast_half(rank, folder)
    gc.collect()  # what DDP holds of the group goes first: as the last one to let it go, it would wait for ever
    dist.destroy_process_group()


def contrast_half(rank: int, folder: str) -> None:
    """A step on half of the pairs, gradients averaged by DDP."""
    saved = torch.load(f"{folder}/batch.pt", weights_only=True)
    model = hf_ext.ExtCLIPModel.from_pretrained(folder).train()
    half = {name: value[2 * rank : 2 * rank + 2] for name, value in saved.items()}
    parallel = DistributedDataParallel(model)
    loss = parallel(**half, return_loss=True).loss
    loss.backward()
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        torch.save({"loss": loss / 2, **gradients(model)}, f"{folder}/result.pt")
    model.config.contrast_across_processes = False
    alone = model(**half, return_loss=True)
    assert_close(alone.loss, by_hand(alone.logits_per_text), "each process for itself")


def by_hand(logits: Tensor) -> Tensor:
    """(B, B) logits -> the mean of the losses over rows and over columns."""
    logits = logits.double()
    own = logits.diagonal()
    return -((own - logits.logsumexp(1)).mean() + (own - logits.logsumexp(0)).mean()) / 2


def test_loss_over_two_processes_is_that_of_one(tmp_path: Path):
    model = pair_model().train()
    inputs = PAIR.inputs(model.config)
    model.save_pretrained(tmp_path)
    torch.save(inputs, tmp_path / "batch.pt")
    output = model(**inputs, return_loss=True)
    assert_close(output.loss, by_hand(output.logits_per_text), "by the formula")
    output.loss.backward()
    torch.multiprocessing.start_processes(joined, (str(tmp_path),), nprocs=2, start_method="spawn")
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert_close(result.pop("loss"), output.loss, "loss")
    compare_gradients(result, gradients(model), "two processes")


def test_without_processes_nothing_is_gathered():
    texts, images = (torch.nn.functional.normalize(torch.randn(3, 5), dim=-1) for _ in range(2))
    scale = torch.tensor(4.0)
    expected = contrastive_loss(texts, images, scale)
    assert torch.equal(contrastive_loss(texts, images, scale, across_processes=True), expected)


def test_the_temperature_is_limited():
    """After every step, by default to the bounds of the paper."""
    model = pair_model(logit_scale_init_value=4.6)
    inputs = PAIR.inputs(model.config)
    rows = [{**{name: value[i] for name, value in inputs.items()}, "return_loss": True} for i in range(4)]

    def collate(features: list[dict]) -> dict:
        return {**{n: torch.stack([f[n] for f in features]) for n in inputs}, "return_loss": True}

    for start, callback, expected in (
        (7.0, LogitScaleLimit(), math.log(100)),
        (-3.0, LogitScaleLimit(), 0.0),
        (7.0, LogitScaleLimit(largest=10), math.log(10)),
    ):
        trained = copy.deepcopy(model)
        with torch.no_grad():
            trained.logit_scale.fill_(start)
        runner = trainer(trained, rows, batch=4, collator=collate, learning_rate=1e-4)
        runner.add_callback(callback)
        runner.train()
        assert trained.logit_scale.item() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="smallest <= largest"):
        LogitScaleLimit(largest=0.5)
