"""What is special to RoBERTa and its children: positions that begin after the padding id and do not count padding."""

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import hf_ext

FIELDS = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 20,
}
PADS = pytest.mark.parametrize("pad", [1, 7])


def both(name: str, pad: int, **fields: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stock class and ours with the same random weights."""
    torch.manual_seed(0)
    fields = {**FIELDS, "pad_token_id": pad, **fields}
    stock = getattr(transformers, name)(transformers.RobertaConfig(**fields)).eval()
    ours = getattr(hf_ext, f"Ext{name}")(hf_ext.ExtRobertaConfig(**fields)).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def texts(pad: int, rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(pad + 1, 40, (rows, tokens), generator=torch.Generator().manual_seed(1))


@PADS
@torch.no_grad()
def test_ids_and_mask_disagree(pad: int) -> None:
    """Padding ids are not counted where the mask shows them, and other ids are counted where it hides them."""
    stock, ours = both("RobertaModel", pad)
    ids = texts(pad, 3, 9)
    ids[0, 3], ids[1, 0] = pad, pad
    mask = torch.ones_like(ids)
    mask[1, 4:], mask[2, :2] = 0, 0
    expected = stock(ids, mask).last_hidden_state
    for skip_padding in (True, False):
        actual = ours(ids, mask, skip_padding=skip_padding).last_hidden_state
        torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=0, atol=1e-5)


@PADS
@torch.no_grad()
def test_how_long_a_row_may_be(pad: int) -> None:
    """As many tokens as there are positions after the padding id; padding takes none of them."""
    stock, ours = both("RobertaModel", pad)
    limit = 20 - pad - 1
    ids = texts(pad, 2, limit)
    message = rf"{limit + 1} tokens.* positions for {limit} \(max_position_embeddings - pad_token_id - 1.*truncate"
    for padded in (ids, torch.nn.functional.pad(ids, (5, 2), value=pad)):
        mask = (padded != pad).long()
        torch.testing.assert_close(ours(padded, mask)[0][mask == 1], stock(padded, mask)[0][mask == 1])
        with pytest.raises(ValueError, match=message):
            ours(torch.cat([padded, ids[:, :1]], dim=1))
    with pytest.raises(ValueError, match=message):
        ours(inputs_embeds=torch.zeros(1, limit + 1, 16))
    with pytest.raises(ValueError, match=r"position_ids holds 20, outside 0\.\.19 \(max_position_embeddings=20\)"):
        ours(ids[:, :1], position_ids=torch.tensor([[20]]))


@PADS
@torch.no_grad()
def test_embeddings_and_given_positions(pad: int) -> None:
    stock, ours = both("RobertaModel", pad)
    ids = texts(pad, 2, 6)
    embeds = ours.get_input_embeddings()(ids)
    for inputs in (
        {"inputs_embeds": embeds},
        {"inputs_embeds": embeds, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])},
        {"input_ids": ids, "position_ids": torch.arange(6)[None]},
        {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "attention_mask": torch.ones(2, 6)},
    ):
        real = inputs.get("attention_mask", torch.ones(2, 6)) == 1
        torch.testing.assert_close(ours(**inputs)[0][real], stock(**inputs)[0][real], rtol=0, atol=1e-5)


@PADS
@torch.no_grad()
def test_decoder_from_left_padded_prompts(pad: int) -> None:
    """Generation gives what forward passes over each whole text give; the stock `generate` has other positions."""
    stock, ours = both("RobertaForCausalLM", pad, is_decoder=True, eos_token_id=None, bos_token_id=None)
    prompts = [texts(pad, 1, n) for n in (2, 5)]
    ids = torch.cat([torch.nn.functional.pad(p, (5 - p.shape[1], 0), value=pad) for p in prompts])
    found = ours.generate(ids, attention_mask=(ids != pad).long(), max_new_tokens=5, pad_token_id=pad)[:, 5:]
    for prompt, tokens in zip(prompts, found, strict=True):
        for token in tokens:
            assert stock(prompt).logits[0, -1].argmax() == token
            prompt = torch.cat([prompt, token.view(1, 1)], dim=1)


@torch.no_grad()
def test_embeddings_after_a_cache() -> None:
    """Embeddings that follow cached tokens have the positions that the ids have."""
    _, ours = both("RobertaForCausalLM", 1, is_decoder=True)
    ids = texts(1, 1, 6)
    expected = ours(ids).logits
    cache = ours(ids[:, :4], use_cache=True).past_key_values
    embeds = ours.get_input_embeddings()(ids[:, 4:])
    torch.testing.assert_close(ours(inputs_embeds=embeds, past_key_values=cache).logits, expected[:, 4:])
