"""What is T5's own: buckets of distances, the bias that all layers share, the head of T5 1.1, fp16."""

import math

import pytest
import torch
import transformers
from harness import assert_close, no_warning, randomise, scratch
from torch import nn

from hf_ext import ExtT5Config, ExtT5EncoderModel, ExtT5ForConditionalGeneration, ExtT5Model
from hf_ext.layers.packing import Packing
from hf_ext.layers.positions import RelativeBuckets

TINY = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 24,
    "num_layers": 3,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 1], [9, 10, 11, 1, 0, 0]])
MASK = (IDS != 0).long()
CPU = torch.device("cpu")


def tiny(cls: type, **fields: object):
    torch.manual_seed(0)
    model = cls(ExtT5Config(**{**TINY, **fields})).eval()
    randomise(model)
    model.tie_weights()
    return model


# --- buckets ------------------------------------------------------------------------------------------------------


def test_buckets_of_an_encoder() -> None:
    """By hand: 8 buckets for near keys of a side, 8 + floor(8 log(d / 8) / log 16) beyond; later keys from 16 on."""
    buckets = RelativeBuckets(num_buckets=32, max_distance=128, is_causal=False)
    expected = {0: 0, 1: 1, 7: 7, 8: 8, 11: 8, 12: 9, 20: 10, 50: 13, 100: 15, 128: 15, 5000: 15}
    distance = torch.tensor(list(expected))
    assert buckets.buckets(-distance).tolist() == list(expected.values())
    assert buckets.buckets(distance[1:]).tolist() == [16 + b for b in list(expected.values())[1:]]


def test_buckets_of_a_decoder() -> None:
    """By hand: 16 buckets for near keys, 16 + floor(16 log(d / 16) / log 8) beyond."""
    buckets = RelativeBuckets(num_buckets=32, max_distance=128, is_causal=True)
    expected = {0: 0, 1: 1, 15: 15, 16: 16, 18: 16, 20: 17, 50: 24, 100: 30, 127: 31, 128: 31, 5000: 31}
    assert buckets.buckets(-torch.tensor(list(expected))).tolist() == list(expected.values())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "past"), [(7, 7, 0), (3, 9, 6), (1, 5, 4), (4, 12, 2), (1, 1, 0)])
def test_bias_is_the_table_at_each_distance(queries: int, keys: int, past: int, is_causal: bool) -> None:
    buckets = RelativeBuckets(num_buckets=8, max_distance=6, is_causal=is_causal)
    table = nn.Embedding(8, 3)
    distance = torch.arange(keys)[None] - torch.arange(past, past + queries)[:, None]
    expected = table(buckets.buckets(distance)).permute(2, 0, 1)[None]
    if is_causal:
        expected = expected.masked_fill(distance > 0, torch.finfo(torch.float32).min)
    for start in (past, torch.tensor(past)):
        assert torch.equal(buckets.bias(table, device=CPU, queries=queries, keys=keys, past_length=start), expected)
        with torch.no_grad():  # decoding keeps the buckets
            assert torch.equal(buckets.bias(table, device=CPU, queries=queries, keys=keys, past_length=start), expected)


@torch.no_grad()
def test_bias_of_a_long_decoding() -> None:
    buckets = RelativeBuckets(num_buckets=32, max_distance=128, is_causal=True)
    table = nn.Embedding(32, 2)
    for keys in (1, 255, 256, 257, 40):
        expected = table(buckets.buckets(torch.arange(1 - keys, 1))).t()[None, :, None]
        assert torch.equal(buckets.bias(table, device=CPU, queries=1, keys=keys, past_length=keys - 1), expected)


@pytest.mark.parametrize("training", [False, True])
def test_bias_is_made_once_for_each_half(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never with the rows of the batch, where no padding is computed."""
    shapes = []
    original = RelativeBuckets.bias

    def counted(self: RelativeBuckets, *args: object, **kwargs: object) -> torch.Tensor:
        bias = original(self, *args, **kwargs)
        shapes.append(tuple(bias.shape))
        return bias

    monkeypatch.setattr(RelativeBuckets, "bias", counted)
    tiny(ExtT5Model).train(training)(input_ids=IDS, attention_mask=MASK, decoder_input_ids=IDS[:, :4])
    assert shapes == [(1, 2, 6, 6), (1, 2, 4, 4)]


def test_padding_inside_a_row_counts_as_distance() -> None:
    encoder = tiny(ExtT5EncoderModel).encoder
    assert encoder.padding_plan(MASK) is not None
    assert encoder.padding_plan(MASK.flip(-1)) is not None
    assert encoder.padding_plan(torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])) is None


@torch.no_grad()
def test_packed_rows_of_the_decoder() -> None:
    """Sequences of one row do not see each other, and distances are those inside a sequence."""
    decoder = tiny(ExtT5Model).decoder
    lengths = (3, 1, 2, 4)
    ids = torch.randint(1, 40, (1, 10), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    separate = torch.cat([decoder(piece)[0] for piece in ids.split(lengths, dim=1)], dim=1)
    assert_close(decoder(ids, position_ids=positions)[0], separate, "packed")
    decoder.set_attn_implementation("eager")
    assert_close(decoder(ids, position_ids=positions)[0], separate, "packed, eager")


def test_bias_by_buckets_hides_pads() -> None:
    packing = Packing([2, 3, 40], None, None, torch.device("cpu"))
    bias = torch.randn(1, 2, 40, 40)
    first, second = packing.split_bias(packing.bias_of_buckets(bias), heads=2)
    least = torch.finfo(bias.dtype).min
    assert torch.equal(first[1], bias[0, :, :3, :3])
    assert torch.equal(first[0, ..., :2], bias[0, :, :3, :2])
    assert (first[0, ..., 2] == least).all()
    assert torch.equal(second, bias)


# --- the head -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_head_of_the_file_is_kept(tmp_path) -> None:
    """The library saves FLAN-T5 with `tie_word_embeddings: true` and two different tables."""
    stock = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**TINY, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ).eval()
    stock.lm_head.weight = nn.Parameter(torch.randn_like(stock.lm_head.weight))
    stock.save_pretrained(tmp_path)
    with no_warning():
        ours, info = ExtT5ForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert ours.lm_head.weight is not ours.shared.weight
    assert ours.encoder.embed_tokens.weight is ours.shared.weight
    assert ours.config.tie_word_embeddings is ours.config.scale_decoder_outputs is False
    inputs = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :3]}
    assert_close(ours(**inputs).logits, stock(**inputs).logits, "logits")
    folder = scratch()
    ours.save_pretrained(folder)
    with no_warning():
        again = ExtT5ForConditionalGeneration.from_pretrained(folder)
    assert torch.equal(again(**inputs).logits, ours(**inputs).logits)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_only_a_shared_table_is_scaled(tied: bool) -> None:
    model = tiny(ExtT5ForConditionalGeneration, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.shared.weight) == tied
    output = model(input_ids=IDS, decoder_input_ids=IDS, output_hidden_states=True)
    states = output.decoder_hidden_states[-1] * (1 / math.sqrt(16) if tied else 1)
    assert_close(output.logits, states @ model.lm_head.weight.T, "logits")


# --- fp16 ---------------------------------------------------------------------------------------------------------


def test_wo_stays_in_fp32(tmp_path) -> None:
    tiny(ExtT5ForConditionalGeneration).save_pretrained(tmp_path)
    stock, ours = (
        cls.from_pretrained(tmp_path, dtype=torch.float16)
        for cls in (transformers.T5ForConditionalGeneration, ExtT5ForConditionalGeneration)
    )
    kinds = [{n: p.dtype for n, p in model.named_parameters()} for model in (stock, ours)]
    assert kinds[0] == kinds[1]
    assert {n.split(".")[-2] for n, kind in kinds[1].items() if kind == torch.float32} == {"wo"}
    with torch.no_grad():
        inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
        assert_close(ours(**inputs).logits, stock(**inputs).logits, "logits", 2e-3)


@torch.no_grad()
def test_overflow_in_fp16_is_cut_off() -> None:
    model = tiny(ExtT5Model)
    for block in model.blocks():
        block.layer[-1].DenseReluDense.wo.weight.mul_(1e5)
    model.half()
    output = model(input_ids=IDS, decoder_input_ids=IDS, output_hidden_states=True)
    assert max(x.abs().max() for x in output.encoder_hidden_states[:-1]) == torch.finfo(torch.float16).max - 1000
    assert output.last_hidden_state.isfinite().all()


@pytest.mark.parametrize("feed_forward", ["relu", "gated-gelu"])
@pytest.mark.parametrize("way", ["loaded in fp16", "loaded in bf16", "half", "autocast"])
def test_half_precision_trains(tmp_path, way: str, feed_forward: str) -> None:
    """Activations past what fp16 holds: loss and gradients are finite, and the loss is that of fp32. Where `wo` is
    in fp16 as well (`half`), what overflows is cut off."""
    model = tiny(ExtT5ForConditionalGeneration, feed_forward_proj=feed_forward, dropout_rate=0.0)
    with torch.no_grad():
        for block in model.base_model.blocks():
            block.layer[-1].layer_norm.weight.fill_(20.0)
            for name, table in block.layer[-1].DenseReluDense.named_parameters():
                table.mul_(3e2 if name.startswith("wi") else 1e-4)
    inputs = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS[:, :4]}
    peaks = []
    for block in model.base_model.blocks():
        wo = block.layer[-1].DenseReluDense.wo
        wo.register_forward_hook(lambda module, given, output: peaks.append(given[0].abs().max().item()))
    expected = model(**inputs).loss.item()
    model.save_pretrained(tmp_path)
    dtype = {"loaded in fp16": torch.float16, "loaded in bf16": torch.bfloat16}.get(way)
    low = ExtT5ForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype or torch.float32)
    if way == "half":
        low = low.half()
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        loss = low.train()(**inputs).loss
    loss.backward()
    assert max(peaks) > torch.finfo(torch.float16).max or feed_forward == "relu"
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in low.parameters() if p.grad is not None)
    assert way == "half" or abs(loss.item() - expected) < 0.02 * expected


# --- what users get wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"input_ids": IDS}, "decoder_input_ids"),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "decoder_inputs_embeds": torch.zeros(2, 6, 16)}, "both"),
        ({"input_ids": IDS[:, :0], "decoder_input_ids": IDS}, "no token"),
        ({"input_ids": IDS + 40, "decoder_input_ids": IDS}, "vocab_size=40"),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": MASK[:, :4]}, "attention_mask"),
        ({"input_ids": IDS, "decoder_input_ids": IDS, "labels": IDS[:, :3]}, "labels"),
    ],
)
def test_contradictory_inputs(inputs: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tiny(ExtT5ForConditionalGeneration)(**inputs)


def test_labels_need_a_start_token() -> None:
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        tiny(ExtT5ForConditionalGeneration, decoder_start_token_id=None)(input_ids=IDS, labels=IDS)
