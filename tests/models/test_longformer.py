"""What is special to Longformer."""

import pytest
import torch
import transformers
from cases import CASES
from torch import Tensor

import hf_ext

FIELDS = CASES["ext_longformer"].configs["window4"]
SEPARATOR = 2


def pair(tmp_path, head: str, **fields: object):
    """The stock model and ours from the same file, in eval mode."""
    torch.manual_seed(0)
    config = transformers.LongformerConfig(**{**FIELDS, "sep_token_id": SEPARATOR, **fields})
    stock = getattr(transformers, head)(config)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(0.15 * torch.randn(parameter.shape))
    stock.save_pretrained(tmp_path)
    return stock.eval(), getattr(hf_ext, f"Ext{head}").from_pretrained(tmp_path).eval()


def words(batch: int, tokens: int) -> Tensor:
    return torch.randint(5, FIELDS["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(1))


def questions(batch: int, tokens: int = 14) -> tuple[Tensor, Tensor]:
    """Ids of <s> question </s></s> text </s> with questions of different lengths, padded, and their mask."""
    ids = words(batch, tokens)
    mask = torch.ones_like(ids)
    for row in range(batch):
        end = 3 + row
        last = tokens - 1 - 2 * row
        ids[row, [end, end + 1, last]] = SEPARATOR
        ids[row, last + 1 :], mask[row, last + 1 :] = FIELDS["pad_token_id"], 0
    return ids, mask


def close(ours: Tensor, stock: Tensor) -> None:
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-5 * max(1.0, stock.abs().max().item()))


@pytest.mark.parametrize("tokens", [1, 3, 5, 11, 22])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_any_length(tmp_path, tokens, attn):
    """The official class pads to the window; we need not. Gradients too, and rows without global tokens."""
    stock, ours = pair(tmp_path, "LongformerModel")
    ours.set_attn_implementation(attn)
    ids, marks = words(3, tokens), torch.zeros(3, tokens, dtype=torch.long)
    marks[0, 0] = marks[2, tokens // 2] = 1
    for global_attention_mask in (marks, None):
        outputs = [model(ids, global_attention_mask=global_attention_mask) for model in (ours, stock)]
        for name in ("last_hidden_state", "pooler_output"):
            close(outputs[0][name], outputs[1][name])
        gradients = []
        for model, output in zip((ours, stock), outputs, strict=True):
            model.zero_grad()
            output[0].square().mean().backward()
            gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[1].items():
            close(gradients[0][name], gradient)


@torch.no_grad()
def test_question_answering_chooses_the_question(tmp_path):
    stock, ours = pair(tmp_path, "LongformerForQuestionAnswering", num_labels=2)
    ids, mask = questions(3)
    outputs = [model(ids, attention_mask=mask) for model in (ours, stock)]
    for name in ("start_logits", "end_logits"):
        close(outputs[0][name][mask == 1], outputs[1][name][mask == 1])
    marks = (torch.arange(ids.shape[1]) < torch.tensor([3, 4, 5])[:, None]).long()
    assert torch.equal(ours(ids, mask, marks).start_logits, outputs[0].start_logits)
    assert (ours(ids, mask, 0 * marks).start_logits - outputs[0].start_logits).abs().max() > 1e-3


@torch.no_grad()
def test_multiple_choice_chooses_the_choice(tmp_path):
    stock, ours = pair(tmp_path, "LongformerForMultipleChoice")
    ids, mask = (x.view(2, 2, -1) for x in questions(4, 16))
    outputs = [model(ids, attention_mask=mask).logits for model in (ours, stock)]
    close(*outputs)
    assert (ours(ids, attention_mask=mask, global_attention_mask=0 * mask).logits - outputs[0]).abs().max() > 1e-4


@torch.no_grad()
def test_masks_of_two(tmp_path):
    """2 in the attention mask is a global token; a mark on padding is none."""
    stock, ours = pair(tmp_path, "LongformerModel")
    ids = words(2, 12)
    mask, marks = torch.ones_like(ids), torch.zeros_like(ids)
    ids[1, 7:], mask[1, 7:] = FIELDS["pad_token_id"], 0
    marks[0, 3] = marks[1, 2] = marks[1, 9] = 1
    expected = stock(ids, mask, marks).last_hidden_state
    for given in ((mask, marks), (mask * (marks + 1), None)):
        close(ours(ids, *given).last_hidden_state[mask == 1], expected[mask == 1])


@torch.no_grad()
@pytest.mark.parametrize("tokens", [12, 10])
def test_attention_weights(tmp_path, tokens):
    stock, ours = pair(tmp_path, "LongformerForMaskedLM")
    ids, marks = words(2, tokens), torch.zeros(2, tokens, dtype=torch.long)
    marks[0, [0, 5]] = marks[1, [2, 3]] = 1
    outputs = [model(ids, global_attention_mask=marks, output_attentions=True) for model in (ours, stock)]
    for layer in range(2):
        close(outputs[0].attentions[layer], outputs[1].attentions[layer])
        close(outputs[0].global_attentions[layer], outputs[1].global_attentions[layer][:, :, :tokens])
    assert "global_attentions" not in ours(ids, output_attentions=True)


@torch.no_grad()
def test_holes_keep_their_places(tmp_path):
    """Positions are counted over the words, the window over the places."""
    stock, ours = pair(tmp_path, "LongformerModel")
    ids = words(2, 12)
    mask = torch.ones_like(ids)
    ids[0, 3:6], mask[0, 3:6] = FIELDS["pad_token_id"], 0
    for side in ("holes", "and padding"):
        if side == "and padding":
            ids[1, 9:], mask[1, 9:] = FIELDS["pad_token_id"], 0
        close(ours(ids, mask)[0][mask == 1], stock(ids, mask)[0][mask == 1])


def test_packed_rows_are_separate(tmp_path):
    _, ours = pair(tmp_path, "LongformerModel")
    first, second = words(1, 9), words(1, 6)
    start = FIELDS["pad_token_id"] + 1
    positions = torch.cat([torch.arange(9), torch.arange(6)])[None] + start
    packed = ours(torch.cat([first, second], 1), position_ids=positions)[0]
    close(packed, torch.cat([ours(first)[0], ours(second)[0]], 1))


@pytest.mark.parametrize(
    ("head", "inputs", "message"),
    [
        ("LongformerModel", {"global_attention_mask": torch.ones(2, 5)}, "global_attention_mask must have shape"),
        ("LongformerModel", {"attention_mask": torch.ones(2, 1, 8, 8)}, "attention_mask must have shape"),
        ("LongformerForQuestionAnswering", {}, "row 0 has no separator"),
        ("LongformerModel", {"input_ids": torch.full((1, 99), 7)}, "the input has 99 tokens"),
    ],
)
def test_bad_input(head, inputs, message):
    model = getattr(hf_ext, f"Ext{head}")(hf_ext.ExtLongformerConfig(**{**FIELDS, "num_labels": 2}))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.full((2, 8), 7), **inputs})


def test_bf16_and_autocast(tmp_path):
    _, ours = pair(tmp_path, "LongformerForSequenceClassification")
    ids = words(2, 30)
    mask = torch.ones_like(ids)
    mask[1, 20:] = 0
    expected = ours(ids, mask).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours.train()(ids, mask, labels=torch.tensor([0, 1])).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    half = ours.bfloat16().eval()(ids, mask).logits
    torch.testing.assert_close(half.float(), expected, rtol=0.1, atol=0.1)
