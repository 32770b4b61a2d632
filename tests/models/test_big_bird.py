"""What is special to BigBird."""

import numpy as np
import pytest
import torch
import transformers
from cases import CASES
from harness import assert_close, compare_gradients, gradients, randomise
from torch import Tensor

import hf_ext
from hf_ext.layers.patterns.block_sparse import Pattern, random_blocks

FIELDS = {**CASES["ext_big_bird"].configs["sparse"], "max_position_embeddings": 99}  # sparse from 15 tokens on
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"), 0.0)
SEPARATOR = FIELDS["sep_token_id"]


def pair(tmp_path, head: str = "BigBirdModel", attn: str = "sdpa", **fields: object):
    """The stock model and ours from the same file, in eval mode."""
    torch.manual_seed(0)
    stock = getattr(transformers, head)(transformers.BigBirdConfig(**{**FIELDS, **DROPOUT, **fields}))
    randomise(stock)
    stock.save_pretrained(tmp_path)
    ours = getattr(hf_ext, f"Ext{head}").from_pretrained(tmp_path, attn_implementation=attn)
    return stock.eval(), ours.eval()


def words(batch: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(5, FIELDS["vocab_size"], (batch, tokens), generator=generator)


@pytest.mark.parametrize("tokens", [1, 2, 3, 14, 15, 16, 31, 40])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_any_length(tmp_path, tokens, attn):
    """The official class fills its input up to whole blocks; around that, and around the length that is attended
    fully, everything must agree, in both modes."""
    stock, ours = pair(tmp_path, attn=attn)
    ids, mask = words(3, tokens), torch.ones(3, tokens, dtype=torch.long)
    mask[1, (tokens + 1) // 2 :] = 0
    for train in (False, True):
        for given in (None, mask):
            real = torch.ones_like(mask) if given is None else given
            outputs = [model.train(train)(ids, given)[0] for model in (ours, stock)]
            assert_close(outputs[0][real == 1], outputs[1][real == 1], f"{train=}, padded: {given is not None}")
            found = []
            for model, output in zip((ours, stock), outputs, strict=True):
                model.zero_grad()
                output[real == 1].square().mean().backward()
                found.append(gradients(model))
            compare_gradients(*found, "gradients")


@pytest.mark.parametrize("length", [1000, 1024, 1100, 3072, 4096])
def test_random_blocks_are_the_official_ones(length):
    """With the generator that the official class seeds anew in each layer; 1024, 3072 and 4096 have a rule of their
    own."""
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention as Stock

    config = transformers.BigBirdConfig(hidden_size=12, num_attention_heads=3)
    layer, pattern = Stock(config, seed=5), Pattern(64, 3, 4096)
    blocks = pattern.blocks(length)
    np.random.seed(5)
    if 64 * blocks in (1024, 3072, 4096):
        expected = [layer._bigbird_block_rand_mask(4096, 4096, 64, 64, 3, last_idx=1024)[: blocks - 2] for _ in "abc"]
    else:
        lengths, counts = layer._get_rand_attn_plan(64 * blocks, 64, 3)
        expected = layer._bigbird_block_rand_mask_with_head(
            from_seq_length=64 * blocks,
            to_seq_length=64 * blocks,
            from_block_size=64,
            to_block_size=64,
            num_heads=3,
            plan_from_length=lengths,
            plan_num_rand_blocks=counts,
        )
    assert torch.equal(pattern.drawn(blocks, heads=3, seed=5), torch.tensor(np.stack(expected), dtype=torch.long))


@torch.no_grad()
def test_nothing_is_remembered(tmp_path):
    """A short input makes the official class attend fully for good, and numpy's generator is everybody's."""
    _, ours = pair(tmp_path)
    long, short = words(2, 30), words(2, 5)
    for train in (False, True):
        ours.train(train)
        before = ours(long)[0]
        np.random.seed(3)
        state = np.random.get_state()[1].copy()
        ours(short)
        assert torch.equal(ours(long)[0], before)
        assert (np.random.get_state()[1] == state).all()
    assert ours.config.attention_type == "block_sparse"


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("train", [False, True])
def test_equals_dense_attention(tmp_path, count, train, monkeypatch):
    """Block by block, and densely with a mask that says how often each query sees each key, which is written down here
    anew."""
    _, ours = pair(tmp_path, num_random_blocks=count)
    ours.train(train)
    ids, mask = words(2, 33), torch.ones(2, 33, dtype=torch.long)
    mask[1, 20:] = 0
    expected = ours(ids, mask)[0]

    def dense(module, query, key, value, attention_mask, **kwargs):
        times = torch.zeros(query.shape[1], 17, 17)
        for head in range(query.shape[1]):
            for i in range(17):
                seen = [0, i - 1, i, i + 1, 16] if 0 < i < 16 else range(17)
                times[head, i, list(set(seen))] = 1
                if 0 < i < 16:
                    drawn = random_blocks(17, size=2, count=count, heads=query.shape[1], seed=module.layer_idx)
                    for block in drawn[head, i - 1] if train else [0] * count:
                        times[head, i, block] += 1
        times = times.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, :33, :33]
        scores = query @ key.transpose(2, 3) * module.scaling + times.log() + (mask == 0)[:, None, None] * -1e9
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("dense", dense)
    ours.config.attention_type = "original_full"
    ours.set_attn_implementation("dense")
    assert_close(ours(ids, mask, skip_padding=False)[0][mask == 1], expected[mask == 1], "dense")


def test_packed_sequences_are_as_alone(tmp_path):
    """Long and short ones side by side: the long have blocks of their own, the short are attended fully."""
    _, ours = pair(tmp_path)
    lengths = (20, 3, 33, 14, 19)
    rows = [words(1, n) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for attn in ("sdpa", "eager"):
        ours.set_attn_implementation(attn)
        for train in (False, True):
            ours.train(train).zero_grad()
            packed = ours(torch.cat(rows, 1), position_ids=positions)[0][0]
            packed.square().mean().backward()
            found = gradients(ours)
            ours.zero_grad()
            separate = torch.cat([ours(row)[0][0] for row in rows])
            separate.square().mean().backward()
            assert_close(packed, separate, f"{attn}, {train=}")
            compare_gradients(found, gradients(ours), f"{attn}, {train=}")
    with pytest.raises(ValueError, match="no common layout of attention weights"):
        ours(torch.cat(rows, 1), position_ids=positions, output_attentions=True)


@torch.no_grad()
def test_attention_weights(tmp_path):
    """Those of the official class, cut to the input."""
    stock, ours = pair(tmp_path)
    for train in (False, True):
        outputs = [model.train(train)(words(2, 21), output_attentions=True) for model in (ours, stock)]
        for mine, reference in zip(*(output.attentions for output in outputs), strict=True):
            assert_close(mine, reference[:, :, :21, :21], "weights")
    assert ours(words(2, 21)).attentions is None


@torch.no_grad()
@pytest.mark.parametrize("given", ["ids", "lengths", "embeddings", "segments"])
def test_questions_are_no_answers(tmp_path, given):
    stock, ours = pair(tmp_path, "BigBirdForQuestionAnswering")
    ids = words(3, 20)
    ids[torch.arange(3), [2, 5, 9]] = SEPARATOR
    inputs = {
        "ids": {"input_ids": ids},
        "lengths": {"input_ids": ids, "question_lengths": torch.tensor([[4], [1], [7]])},
        "embeddings": {"inputs_embeds": torch.randn(3, 20, FIELDS["hidden_size"])},
        "segments": {"input_ids": ids, "token_type_ids": torch.zeros_like(ids)},
    }[given]
    outputs = [model(**{k: v.clone() for k, v in inputs.items()}) for model in (ours, stock)]
    for name in ("start_logits", "end_logits"):
        difference = (outputs[0][name] - outputs[1][name]).abs()
        assert difference[outputs[1][name] > -1e5].max() < 1e-4
        assert ((outputs[0][name] < -1e5) == (outputs[1][name] < -1e5)).all()
    assert outputs[0].get("pooler_output") is None
    pooling = type(ours)(ours.config, add_pooling_layer=True)
    assert pooling(**inputs).pooler_output.shape == (3, FIELDS["hidden_size"])


@torch.no_grad()
def test_decoders_see_no_later_token(tmp_path):
    """The official class goes by blocks in long inputs of a decoder too, and sees what comes."""
    _, ours = pair(tmp_path, is_decoder=True)
    ids = words(1, 30)
    assert_close(ours(ids[:, :20])[0], ours(ids)[0][:, :20], "causal")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path, dtype):
    _, ours = pair(tmp_path, "BigBirdForSequenceClassification")
    ids, mask = words(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, 9:] = 0
    expected = ours(ids, mask).logits
    with torch.autocast("cpu", dtype=dtype):
        loss = ours.train()(ids, mask, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    half = ours.to(dtype).eval()(ids, mask).logits
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 30, 30)}, "other masks need attention_type='original_full'"),
        ({"input_ids": words(1, 100)}, "the input has 100 tokens"),
        ({"attention_mask": torch.ones(1, 29)}, "attention_mask has shape"),
    ],
)
def test_bad_input(inputs, message):
    model = hf_ext.ExtBigBirdModel(hf_ext.ExtBigBirdConfig(**FIELDS))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": words(1, 30), **inputs})


@torch.no_grad()
def test_blocks_larger_than_the_input():
    """More global tokens than there are."""
    fields = {**FIELDS, **DROPOUT}
    model = hf_ext.ExtBigBirdModel(hf_ext.ExtBigBirdConfig(**{**fields, "block_size": 64})).eval()
    ids = words(2, 30)
    sparse = model(ids)[0]
    model.config.attention_type = "original_full"
    assert torch.equal(model(ids)[0], sparse)


@pytest.mark.parametrize("train", [False, True])
def test_cost_is_linear(train):
    """Elements made by all operators of a forward and backward pass, and the largest tensor: 4 times the tokens make at
    most 4.5 times as many."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        total = largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, Tensor):
                    self.total += x.numel()
                    self.largest = max(self.largest, x.numel())
            return out

    fields = {**FIELDS, "block_size": 8, "max_position_embeddings": 2048}
    model = hf_ext.ExtBigBirdModel(hf_ext.ExtBigBirdConfig(**fields)).train(train)
    counts = []
    for tokens in (512, 2048):
        with Count() as count:
            out = model(words(1, tokens))[0]
            if train:
                out.sum().backward()
        counts.append(count)
    assert counts[1].total < 4.5 * counts[0].total
    assert counts[1].largest < 4.5 * counts[0].largest
