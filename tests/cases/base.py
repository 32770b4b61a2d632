"""What describes an architecture to the tests, and inputs and labels for text and image models.

Configurations are drawn from a seed, so that sizes change with it while the choices that an architecture offers
(activations, tied or not, kinds of positions) are all covered.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Head:
    """One model class.

    Args:
        kind: what labels it takes: base (none), masked, causal, pretraining, row, next_sentence, token, span, choice,
            double (causal and choice at once), seq2seq (the decoder's tokens), aligned (next tokens that the caller has
            shifted); for images: image, image_teacher, image_embedding and backbone (none), image_row, masked_image;
            for texts that are pooled at their end: text and text_embedding (none); pair of texts and images (whether
            there is a loss); for speech: speech (none), speech_row, and seq2seq.
        overrides: configuration fields that this class needs.
        variants: further configurations for this class only, by name.
        without_gradient: patterns of parameters that no loss of this class reaches, in the stock class either.
        unused_when_untied: the same, for models with untied embeddings.
        positions_count_padding: for heads that generate: whether a left-padded prompt goes on differently than it does
            alone, because the stock class counts positions from the start of the row.
        stock_name: as `Case.stock_name`, where this class differs.
        unused_in_stock: patterns of tensors, by their names in the file, that the stock class writes and never uses.
    """

    kind: str
    overrides: dict = field(default_factory=dict)
    variants: dict[str, dict] = field(default_factory=dict)
    without_gradient: tuple[str, ...] = ()
    unused_when_untied: tuple[str, ...] = ()
    positions_count_padding: bool = False
    stock_name: Callable[[str], str] | None = None
    unused_in_stock: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One architecture.

    Args:
        is_decoder: whether tokens see earlier tokens only.
        heads: our class name -> what it takes.
        configs: name -> fields of the official configuration; the first one is used where a check is expensive.
        dropout: every dropout field, with a probability for the tests that want dropout.
        nonsense: fields with values that must be refused, and a word of the message besides the field.
        inexpressible: fields that the official configuration refuses, and a word of the message: ours must refuse them
            too, at the latest when exporting.
        official_files: further contents of official config.json files (older spellings), by name.
        legacy_keys: checkpoint -> the same checkpoint as older files spell it.
        depends_on_length: configurations whose result depends on the length of the whole input by design, so that
            packed and separate, or padded and alone, need not agree.
        stock_attention: configuration, or "all" -> the attention implementation of the stock class that ours is
            compared with under every implementation, where the stock class has no other or gets another one wrong. A
            stock class without sdpa is compared in eager mode anyway.
        own_padding: configuration, or "all" -> padding patterns (`PADDINGS`) whose pads, where they see nothing, hold
            other values than the stock class's: what a query that sees nothing gets is a matter of the
            implementation. Real positions are compared, and losses that read pads are not.
        reordered_dropout: configuration -> dropout fields that sdpa draws block by block and so in another order than
            the stock class; with these at zero the rest of the dropout is compared. Eager draws as the stock class.
        wrong_in_stock: deterministic ways to generate (of `harness.MODES`, `generation.DECODING`) that fail or give
            other tokens than greedy search in the stock class, by a fault of its own; ours is compared with its greedy
            search.
        blocks_of: the architecture whose blocks these are: what takes long and depends on the blocks is checked there.
        wide: fields of a configuration large enough to measure the spread of initial values.
        differs_in_training: configurations whose results in train mode, without dropout, are others by design.
        segments_are_words: whether `token_type_ids` are looked up among the words, so that zeros are not the default.
        eight_bit_tolerance: for models with 8-bit layers, which round their inputs to integers: where another kernel
            than the stock class's gives another last digit, one of them may be rounded to the next integer.
        stock_quantises: whether bitsandbytes finds the linear layers of the stock class; where not, all of ours are to
            be quantised, and there is nothing to compare them with.
        assign: sets a field of a configuration that is already built, `dropout` fields above all.
        stock_name: parameter name in the stock class's memory -> name in the file.
        stock_classes: our class name -> a subclass of the stock class that takes an input on which that one fails,
            although every other class of its kind takes it, or on which it contradicts itself.
        positions_from_ids: whether positions count the ids that are not padding. In embeddings padding is not seen: it
            is counted, and only the stock class given the same embeddings is comparable where it stands before text.
        first_position: configuration -> the position of a row's first token.
        stock_keeps_cache: whether the stock class returns keys and values; without, it cannot be assisted.
        adapter_targets: modules for adapters, where PEFT has no default for the official type.
        stock_adapter_targets: the same modules as the stock class calls them in memory, where that is not as in the
            files. Adapters are then compared under the names of the files, and not loaded across: a stock adapter has
            the names in memory.
        always_tied: patterns of parameters that are tied whatever `tie_word_embeddings` says.
        stock_always_ties: whether the stock class makes no model with a head of its own, whatever its configuration
            says; from a file it takes one, with a warning.
        read_as_written: fields that ours reads as an official file has them, while the stock configuration, which
            cannot express what they say, overrides them.
        fixed_size: whether images of another size than `image_size` need `interpolate_pos_encoding`.
        inputs: head kind, configuration, padding pattern, generator -> arguments of `forward`.
        decoder_needs_input: whether the decoder has no input by default, so that the bare model runs on no text alone.
        beside_text: head kind, what a tokenizer returned -> further arguments that the head needs for any text.
    """

    is_decoder: bool
    heads: dict[str, Head]
    configs: dict[str, dict]
    dropout: dict[str, float]
    nonsense: tuple[tuple[dict, str], ...]
    wide: dict
    blocks_of: str | None = None
    inexpressible: tuple[tuple[dict, str], ...] = ()
    official_files: dict[str, dict] = field(default_factory=dict)
    legacy_keys: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    depends_on_length: tuple[str, ...] = ()
    differs_in_training: tuple[str, ...] = ()
    segments_are_words: bool = False
    stock_attention: dict[str, str] = field(default_factory=dict)
    own_padding: dict[str, tuple[str, ...]] = field(default_factory=dict)
    reordered_dropout: dict[str, tuple[str, ...]] = field(default_factory=dict)
    wrong_in_stock: tuple[str, ...] = ()
    eight_bit_tolerance: float = 1e-5
    stock_quantises: bool = True
    assign: Callable[[object, str, object], None] = setattr
    stock_name: Callable[[str], str] = str
    stock_classes: dict[str, type] = field(default_factory=dict)
    positions_from_ids: bool = False
    first_position: Callable[[object], int] = lambda config: 0
    stock_keeps_cache: bool = True
    adapter_targets: list[str] | None = None
    stock_adapter_targets: list[str] | None = None
    always_tied: tuple[str, ...] = ()
    stock_always_ties: bool = False
    read_as_written: tuple[str, ...] = ()
    fixed_size: bool = True
    inputs: Callable[..., dict[str, Tensor]] | None = None
    decoder_needs_input: bool = False
    beside_text: Callable[[str, dict[str, Tensor]], dict[str, Tensor]] = lambda kind, encoded: {}


# --- text inputs --------------------------------------------------------------------------------------------------

NESTED = ("choice", "double")  # heads whose inputs have shape (B, choices, T)
PADDINGS = ("none", "ones", "right", "left", "holes")


def padding_mask(pattern: str, batch: int, tokens: int) -> Tensor | None:
    """(B, T) mask of ones and zeros, or None for `none`. Rows have unequal lengths, one of them full."""
    if pattern == "none":
        return None
    mask = torch.ones(batch, tokens, dtype=torch.long)
    lengths = [tokens, max(1, tokens // 2), max(1, tokens - 2), 1]
    for row in range(batch):
        length = lengths[row % len(lengths)]
        if pattern == "right":
            mask[row, length:] = 0
        elif pattern == "left":
            mask[row, : tokens - length] = 0
        elif pattern == "holes":
            # The first token stays: a causal first row would otherwise see nothing.
            mask[row, 1 + row :: 3] = 0
    return mask


def text_inputs(
    kind: str,
    config: object,
    padding: str = "none",
    *,
    batch: int = 4,
    tokens: int = 9,
    seed: int = 0,
    choices: int = 3,
) -> dict[str, Tensor]:
    """Token ids, a mask, segments where the model has them, and an encoder's output where it attends to one."""
    generator = torch.Generator().manual_seed(seed)
    rows = batch * choices if kind in NESTED else batch
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    allowed = torch.tensor([i for i in range(config.vocab_size) if i != pad])
    ids = allowed[torch.randint(len(allowed), (rows, tokens), generator=generator)]
    inputs = {"input_ids": ids}
    mask = padding_mask(padding, rows, tokens)
    if mask is not None:
        inputs["input_ids"] = ids.masked_fill(mask == 0, pad)
        inputs["attention_mask"] = mask
    if getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = torch.randint(config.type_vocab_size, (rows, tokens), generator=generator)
    if kind in NESTED:
        inputs = {name: x.view(batch, choices, tokens) for name, x in inputs.items()}
    if getattr(config, "add_cross_attention", False):
        inputs["encoder_hidden_states"] = torch.randn(batch, 5, config.hidden_size, generator=generator)
        if mask is not None:
            inputs["encoder_attention_mask"] = torch.tensor([[1] * 5, [1] * 3 + [0] * 2] * batch)[:batch]
    return inputs


def seq2seq_inputs(
    kind: str,
    config: object,
    padding: str = "none",
    *,
    batch: int = 4,
    tokens: int = 9,
    seed: int = 0,
    **kwargs: object,
) -> dict[str, Tensor]:
    """As `text_inputs` for the encoder, and ids and a mask of the decoder, two tokens shorter than the encoder's. A
    classified row (kind row) is read by both halves and ends with the end token. A decoder on its own has the inputs
    of any other."""
    inputs = text_inputs(kind, config, padding, batch=batch, tokens=tokens, seed=seed, **kwargs)
    if not config.is_encoder_decoder:
        return inputs
    if kind == "row":
        inputs["input_ids"] = end_rows(inputs["input_ids"], inputs.get("attention_mask"), config)
        return inputs
    length = tokens if kind == "span" else max(1, tokens - 2)  # an answer is pointed at in the encoder's text
    padding = padding if padding != "left" else "right"  # a decoder starts with its start token
    decoder = text_inputs(kind, config, padding, batch=batch, tokens=length, seed=seed + 100)
    return {**inputs, **{f"decoder_{name}": value for name, value in decoder.items()}}


def end_rows(ids: Tensor, mask: Tensor | None, config: object) -> Tensor:
    """The ids (B, T) with one end token in each row, at its last real token, or at its start where none is real."""
    end = config.eos_token_id
    other = next(i for i in range(config.vocab_size) if i not in (end, config.pad_token_id))
    ids = ids.masked_fill(ids == end, other)
    places = torch.arange(ids.shape[1]) * (torch.ones_like(ids) if mask is None else (mask != 0).long())
    return ids.scatter(1, places.argmax(-1, keepdim=True), end)


def text_labels(kind: str, config: object, inputs: dict[str, Tensor], *, seed: int = 1) -> dict[str, Tensor]:
    """Labels for one head; token labels stand on real tokens only, and their number differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "base":
        return {}
    if kind == "seq2seq":
        batch, tokens = inputs["decoder_input_ids"].shape
        real = inputs.get("decoder_attention_mask", torch.ones(batch, tokens)).bool()
        targets = text_inputs(kind, config, batch=batch, tokens=tokens, seed=seed)["input_ids"]
        return {"labels": targets.masked_fill(~real, IGNORED)}
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    batch, tokens = ids.shape[0], ids.shape[-1]
    if kind == "choice":
        return {"labels": torch.randint(ids.shape[1], (batch,), generator=generator)}
    if kind in ("row", "next_sentence"):
        classes = config.num_labels if kind == "row" else 2
        return {"labels": torch.randint(classes, (batch,), generator=generator)}
    if kind == "span":
        # On real tokens, so that a start is never beyond its row's own text.
        last = mask.sum(-1) - 1 if mask is not None else torch.full((batch,), tokens - 1)
        first = mask.long().argmax(-1) if mask is not None else torch.zeros(batch, dtype=torch.long)
        return {"start_positions": first, "end_positions": first + last.clamp(max=1)}
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if kind == "token":
        labels = torch.randint(config.num_labels, ids.shape, generator=generator)
        return {"labels": labels.masked_fill(~real, IGNORED)}
    if kind == "double":
        right = torch.randint(ids.shape[1], (batch,), generator=generator)
        return {"labels": ids.masked_fill(~real, IGNORED), "mc_labels": right}
    if kind in ("causal", "aligned"):
        return {"labels": ids.masked_fill(~real, IGNORED)}
    # masked, pretraining
    chosen = torch.rand(ids.shape, generator=generator) < torch.linspace(0.2, 0.9, batch)[:, None]
    chosen[:, 0] = True
    labels = {"labels": ids.masked_fill(~(real & chosen), IGNORED)}
    if kind == "pretraining":
        labels["next_sentence_label"] = torch.randint(2, (batch,), generator=generator)
    return labels


# --- speech inputs ------------------------------------------------------------------------------------------------

SPEECH = ("speech", "speech_row")  # kinds of heads that take spectrograms, besides seq2seq


def spectrograms(config: object, batch: int, *, seed: int = 0) -> Tensor:
    """(B, mel bins, frames) of the configured length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)


def speech_inputs(
    kind: str,
    config: object,
    padding: str = "none",
    *,
    batch: int = 4,
    tokens: int = 9,
    seed: int = 0,
    **kwargs: object,
) -> dict[str, Tensor]:
    """Spectrograms for the encoder; ids and a mask of the decoder as `seq2seq_inputs` has them. A decoder on its own
    has the inputs of any other."""
    if kind == "aligned":
        return text_inputs(kind, config, padding, batch=batch, tokens=tokens, seed=seed, **kwargs)
    inputs = {"input_features": spectrograms(config, batch, seed=seed)}
    if kind == "speech_row":
        return inputs
    padding = padding if padding != "left" else "right"  # a decoder starts with its start token
    decoder = text_inputs(kind, config, padding, batch=batch, tokens=max(1, tokens - 2), seed=seed + 100)
    return {**inputs, **{f"decoder_{name}": value for name, value in decoder.items()}}


def speech_labels(kind: str, config: object, inputs: dict[str, Tensor], *, seed: int = 1) -> dict[str, Tensor]:
    """A class per clip."""
    if kind != "speech_row":
        return {}
    generator = torch.Generator().manual_seed(seed)
    rows = inputs["input_features"].shape[0]
    return {"labels": torch.randint(config.num_labels, (rows,), generator=generator)}


# --- image inputs -------------------------------------------------------------------------------------------------

# Kinds that take images.
IMAGES = ("image", "image_row", "image_teacher", "image_embedding", "masked_image", "backbone")
POOLED = ("text", "text_embedding", "pair")  # kinds that take texts with an end, at which they are pooled


def image_inputs(
    kind: str, config: object, padding: str = "none", *, batch: int = 4, seed: int = 0, **_: object
) -> dict[str, Tensor]:
    """Images of the configured size; they have no padding and no length."""
    generator = torch.Generator().manual_seed(seed)
    config = getattr(config, "vision_config", config)
    return {"pixel_values": torch.randn(batch, config.num_channels, *sides(config.image_size), generator=generator)}


def image_labels(kind: str, config: object, inputs: dict[str, Tensor], *, seed: int = 1) -> dict[str, Tensor]:
    """Labels for one head: a class per image, or which patches are masked, equally many in every image."""
    generator = torch.Generator().manual_seed(seed)
    batch = inputs["pixel_values"].shape[0]
    if kind == "image_row":
        return {"labels": torch.randint(config.num_labels, (batch,), generator=generator)}
    if kind == "masked_image":
        (height, width), (patch_height, patch_width) = sides(config.image_size), sides(config.patch_size)
        patches = -(-height // patch_height) * -(-width // patch_width)
        order = torch.rand(batch, patches, generator=generator).argsort(-1)
        return {"bool_masked_pos": order < max(1, patches // 2)}
    return {}


def sides(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """A size as configurations give it -> height and width."""
    return (size, size) if isinstance(size, int) else tuple(size)
