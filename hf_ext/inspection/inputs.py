"""Which classes to hold against each other, and seeded batches to run through them: of texts, of images, of pairs.

Legend: B batch, R rows of the embedding (B, or B times choices), T tokens, S of the encoder beside a decoder, N patches
of an image.
"""

import inspect
import math
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

IGNORED = -100  # the label that every loss of the library leaves out

# Heads that predict one token per position, by the end of their class name.
CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
# Heads of an encoder-decoder that predict the tokens of the decoder.
SEQ2SEQ_HEADS = ("ForConditionalGeneration", "MTModel")
# Encoders whose positions start after the padding id, so that the table holds that many fewer tokens.
_OFFSET_POSITIONS = ("roberta", "camembert", "xlm-roberta", "xlm_roberta", "longformer")


# ------------------------------------------------------------------------------------------------- classes


def stock_class(class_name: str) -> type:
    """The stock class that one of ours stands for: `ExtBertForMaskedLM` -> `transformers.BertForMaskedLM`."""
    official = class_name.removeprefix("Ext")
    if not hasattr(transformers, official):
        raise ValueError(f"transformers {transformers.__version__} has no class {official!r} to compare with.")
    return getattr(transformers, official)


def require_stock(architecture) -> None:
    """Raise ValueError for an architecture of this package only."""
    if architecture.official_model_type is None:
        raise ValueError(
            f"{architecture.model_type} is an architecture of this package only: transformers has no class to compare "
            "it with."
        )


def attention_for(model_class: type, wanted: str) -> str:
    """The attention implementation to ask a class for: `wanted`, or eager for an old stock class that lacks sdpa."""
    return "eager" if wanted == "sdpa" and not model_class._supports_sdpa else wanted


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def resolve_head(architecture, head: str | None, wanted: list[str] | None = None) -> str:
    """Name of our class for a head.

    Args:
        architecture: an `hf_ext` architecture.
        head: an Auto class (`AutoModelForMaskedLM`), a class name (`BertForMaskedLM`, with or without `Ext`), or the
            end of one in any spelling (`masked-lm`). None takes the first name of `wanted` that the architecture has,
            and the bare model where `wanted` is empty.
        wanted: `config.architectures` of the checkpoint.

    Raises:
        ValueError: no head fits, or several do; the message lists them.
    """
    heads = architecture.heads
    names = list(architecture.class_names())
    if head is None:
        for name in wanted or ():
            ours = "Ext" + name.removeprefix("Ext")
            if ours in names:
                return ours
        if not wanted:
            return heads["AutoModel"]
        raise ValueError(
            f"the checkpoint was saved from {', '.join(wanted)}, which {architecture.name} does not have here; "
            f"choose a head: {', '.join(names)}."
        )
    if head in heads:
        return heads[head]
    if "Ext" + head.removeprefix("Ext") in names:
        return "Ext" + head.removeprefix("Ext")
    if _plain(head) in ("model", "base", "automodel"):
        return heads["AutoModel"]
    # By the Auto class too: "causal-lm" is BertLMHeadModel.
    by_name = [name for name in names if _plain(name).endswith(_plain(head))]
    fitting = by_name or list(dict.fromkeys(v for k, v in heads.items() if _plain(k).endswith(_plain(head))))
    if len(fitting) == 1:
        return fitting[0]
    problem = "has no head" if not fitting else "has several heads that end in"
    raise ValueError(f"{architecture.name} {problem} {head!r}; choose one of {', '.join(fitting or names)}.")


def is_causal_head(class_name: str) -> bool:
    return class_name.endswith(CAUSAL_HEADS)


def is_seq2seq_head(class_name: str) -> bool:
    return class_name.endswith(SEQ2SEQ_HEADS)


def generates(model) -> bool:
    """Whether `generate()` makes sense for this model: a causal head, and no encoder that merely owns the method, or
    the head of an encoder-decoder."""
    if is_seq2seq_head(type(model).__name__):
        return model.can_generate()
    # An encoder that may be used as a decoder has both fields; GPT-NeoX carries `is_decoder` without any meaning.
    encoder = hasattr(model.config, "add_cross_attention") and not getattr(model.config, "is_decoder", True)
    return model.can_generate() and is_causal_head(type(model).__name__) and not encoder


def complete_config(config: PreTrainedConfig, class_name: str) -> PreTrainedConfig:
    """Fills in what a head needs for a batch: a classifier finds the last real token by the padding id, a decoder
    beside an encoder starts with an id of its own."""
    if class_name.endswith("ForSequenceClassification") and config.pad_token_id is None:
        config.pad_token_id = 0
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    return config


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that is about texts: the configuration itself, unless it is one of a pair."""
    return getattr(config, "text_config", None) or config


def image_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part that is about images."""
    return getattr(config, "vision_config", None) or config


def takes(model_class: type, name: str) -> bool:
    """Whether a class has an input of this name."""
    return name in inspect.signature(model_class.forward).parameters


def longest_input(config: PreTrainedConfig) -> int | None:
    """Most tokens that the position table holds, None where positions are unlimited or not stated."""
    config = text_part(config)
    positions = getattr(config, "max_position_embeddings", getattr(config, "max_target_positions", None))
    if positions is None or positions <= 0:
        return None
    if config.model_type.removeprefix("ext_") in _OFFSET_POSITIONS:
        return positions - (config.pad_token_id or 0) - 1
    return positions


# ------------------------------------------------------------------------------------------------- batches


def ragged_lengths(batch_size: int, longest: int, *, fill: float = 1 / 3, seed: int = 0) -> Tensor:
    """Log-normal lengths, as texts have them: the longest is `longest`, and about `fill` of the padded area is filled.

    A small batch cannot reach a small `fill`, because its longest row is full; the others are then 2 tokens long.

    Args:
        batch_size: number of rows B.
        longest: tokens of the longest row, T.
        fill: share of the B x T positions that hold a token.

    Returns:
        (B,) int64, longest first is not guaranteed.
    """
    if batch_size < 1 or longest < 2:
        raise ValueError(f"batch_size={batch_size} and longest={longest}: at least 1 row of 2 tokens is needed.")
    if not 0 < fill <= 1:
        raise ValueError(f"fill={fill}: a share above 0 and at most 1 is needed.")
    generator = torch.Generator().manual_seed(seed)
    shape = torch.exp(0.7 * torch.randn(batch_size, generator=generator, dtype=torch.float64))
    top = int(shape.argmax())
    target = fill * batch_size * longest

    def lengths(scale: float) -> Tensor:
        rows = (scale * shape).round().clamp(2, longest).long()
        rows[top] = longest
        return rows

    low, high = 0.0, float(longest / shape.min()) + 1
    for _ in range(60):  # bisection: the total grows with the scale
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).sum() < target else (low, middle)
    return lengths(high)


@dataclass
class Batch:
    """One batch of token ids, of images, of both, or of sound features with the token ids of a decoder.

    Attributes:
        inputs: what the forward takes, without labels.
        labels: what the head's loss takes; empty for a bare model.
        real: (R, T) bool, True where there is a token and not padding; of the decoder, where there are two halves; of
            images alone (B, N), all True.
        encoder_real: (B, S) bool, the encoder's, where there are two halves.
    """

    inputs: dict[str, Tensor]
    real: Tensor
    labels: dict[str, Tensor | bool] = field(default_factory=dict)
    encoder_real: Tensor | None = None

    @property
    def prompt(self) -> dict[str, Tensor]:
        """What `generate` takes: the inputs, without those of a decoder beside an encoder."""
        return {name: value for name, value in self.inputs.items() if name != "decoder_input_ids"}

    @property
    def real_tokens(self) -> int:
        return sum(int(real.sum()) for real in (self.real, self.encoder_real) if real is not None)

    @property
    def padded_tokens(self) -> int:
        return sum(real.numel() for real in (self.real, self.encoder_real) if real is not None)

    def to(self, device: torch.device | str) -> "Batch":
        inputs, labels = (
            {name: value.to(device) if isinstance(value, Tensor) else value for name, value in part.items()}
            for part in (self.inputs, self.labels)
        )
        encoder_real = None if self.encoder_real is None else self.encoder_real.to(device)
        return Batch(inputs, self.real.to(device), labels, encoder_real)


def make_batch(
    model_class: type,
    config: PreTrainedConfig,
    lengths: Tensor,
    *,
    padding_side: str = "right",
    seed: int = 0,
) -> Batch:
    """A seeded batch for a class: random tokens with mask and, where it has them, segment ids, random images, or both,
    and labels for its head. An encoder-decoder gets as many tokens for its decoder, or random sound of full length if
    that is what it hears.

    The same arguments give the same batch for our class and the stock class.

    Args:
        model_class: decides the labels, by the end of its name, and the inputs, by the signature of its forward.
        config: vocabulary, padding id, size of images, number of labels.
        lengths: (B,) tokens of each row; for images only B counts.
        padding_side: "right" or "left".

    Raises:
        ValueError: the class takes neither one sequence of token ids nor images, or a length exceeds the position
            table.
    """
    name = model_class.__name__
    if not takes(model_class, "pixel_values"):
        return _text_batch(model_class, config, lengths, padding_side, seed)
    if name.endswith("Backbone"):
        raise ValueError(f"{name} has neither one output nor a loss; take the model that it is the backbone of.")
    images = _image_batch(model_class, config, len(lengths), seed)
    if not takes(model_class, "input_ids"):
        return images
    texts = _text_batch(model_class, text_part(config), lengths, padding_side, seed)
    return Batch({**texts.inputs, **images.inputs}, texts.real, {"return_loss": True})


def _image_batch(model_class: type, config: PreTrainedConfig, rows: int, seed: int) -> Batch:
    part, name = image_part(config), model_class.__name__
    size, patch = ((x, x) if isinstance(x, int) else tuple(x) for x in (part.image_size, part.patch_size))
    count = math.ceil if "swin" in part.model_type else math.floor  # Swin fills the last patches up
    patches = math.prod(count(side / step) for side, step in zip(size, patch))
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(rows, part.num_channels, *size, generator=generator)
    labels = {}
    if name.endswith("ForImageClassification"):
        labels = _class_labels(config, rows, generator)
    elif name.endswith("ForMaskedImageModeling"):  # the mask is what there is to predict; half of the patches
        labels = {"bool_masked_pos": torch.rand(rows, patches, generator=generator) < 0.5}
    return Batch({"pixel_values": pixels}, torch.ones(rows, patches, dtype=torch.bool), labels)


def _text_batch(model_class: type, config: PreTrainedConfig, lengths: Tensor, padding_side: str, seed: int) -> Batch:
    accepted, name = inspect.signature(model_class.forward).parameters, model_class.__name__
    hears = "input_features" in accepted and "decoder_input_ids" in accepted
    if getattr(config, "vocab_size", None) is None or not ("input_ids" in accepted or hears):
        raise ValueError(f"{name} does not take one sequence of token ids; no batch is known for it.")
    limit = longest_input(config)
    if limit is not None and int(lengths.max()) > limit:
        raise ValueError(f"length {int(lengths.max())} exceeds the {limit} positions of this model; use a shorter one.")
    generator = torch.Generator().manual_seed(seed)
    if name.endswith("ForMultipleChoice"):
        lengths = lengths.repeat_interleave(2)  # two choices of one length per example
    separated = _separates(name, config)
    if separated:
        lengths = lengths.clamp(min=4)

    rows, longest = len(lengths), int(lengths.max())
    places = torch.arange(longest)
    if padding_side == "right":
        real = places < lengths[:, None]
    elif padding_side == "left":
        real = places >= longest - lengths[:, None]
    else:
        raise ValueError(f"padding_side={padding_side!r}: 'right' or 'left' is needed.")
    ids = _words(config, real, generator)
    end = _text_end(config)
    if end is not None:
        ids[torch.arange(rows), places.masked_fill(~real, -1).amax(1)] = end
    if separated:
        first = real.int().argmax(1)
        for place in (first + lengths // 4, first + lengths // 4 + 1, first + lengths - 1):
            ids[torch.arange(rows), place] = config.sep_token_id
    inputs = {"input_ids": ids, "attention_mask": real.long()}
    if "token_type_ids" in accepted and (getattr(config, "type_vocab_size", 0) or 0) > 1:
        inputs["token_type_ids"] = ((places >= longest // 2) & real).long()
    if "decoder_input_ids" not in accepted:
        batch = Batch(inputs, real, _labels(name, config, ids, real, generator))
    elif name.endswith(("ForSequenceClassification", "ForQuestionAnswering")):
        # The decoder reads the same tokens; a label is read at the end token, one in each row.
        ids = ids.scatter(1, lengths[:, None] - 1, config.eos_token_id)
        batch = Batch({**inputs, "input_ids": ids}, real, _labels(name, config, ids, real, generator), real)
    else:
        encoder_real = real
        if hears:
            inputs, encoder_real = _sound(config, rows, generator)
        real = places < lengths[:, None]
        ids = _words(config, real, generator)
        start = torch.full((rows, 1), config.decoder_start_token_id)
        inputs["decoder_input_ids"] = torch.cat([start, ids[:, :-1]], dim=1)
        batch = Batch(inputs, real, _labels(name, config, ids, real, generator), encoder_real)
    if name.endswith("ForMultipleChoice"):
        batch.inputs = {name: value.view(rows // 2, 2, longest) for name, value in batch.inputs.items()}
    return batch


def _special(config: PreTrainedConfig) -> set[int | None]:
    """The ids that are not to stand for a word."""
    names = ("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id")
    return {config.pad_token_id or 0}.union(*(_listed(getattr(config, name, None)) for name in names))


def _text_end(config: PreTrainedConfig) -> int | None:
    """The id at whose place CLIP pools a text, None for any other model. Early files say 2 and mean the highest id."""
    if "clip" not in config.model_type:
        return None
    if config.eos_token_id == 2:
        return config.vocab_size - 1
    return min(_special(config) & set(_listed(config.eos_token_id)))


def _separates(name: str, config: PreTrainedConfig) -> bool:
    """Whether the head takes a question and a text, </s></s> between them and </s> at the end: Longformer's make the
    tokens of one of them global, and its official class demands three separators."""
    return "longformer" in config.model_type and name.endswith(("ForQuestionAnswering", "ForMultipleChoice"))


def _words(config: PreTrainedConfig, real: Tensor, generator: torch.Generator) -> Tensor:
    """Random ids where `real` (R, T), padding elsewhere. Ids at either end of the vocabulary are the special ones as a
    rule; none of them is to stand for a word."""
    special = _special(config) | {_text_end(config)}
    words = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    return words[torch.randint(len(words), real.shape, generator=generator)].masked_fill(~real, pad)


def _sound(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Random features (B, mel bins, 2 * S), and True for all of the S positions that the encoder makes of them."""
    positions = config.max_source_positions
    features = torch.randn(rows, config.num_mel_bins, 2 * positions, generator=generator)
    return {"input_features": features}, torch.ones(rows, positions, dtype=torch.bool)


def _listed(value: object) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def _class_labels(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Labels of whole rows: a class each, several, or a number."""
    if config.problem_type == "multi_label_classification":
        return {"labels": torch.randint(2, (rows, config.num_labels), generator=generator).float()}
    if config.problem_type == "regression" or config.num_labels == 1:
        shape = (rows,) if config.num_labels == 1 else (rows, config.num_labels)
        return {"labels": torch.rand(shape, generator=generator)}
    return {"labels": torch.randint(config.num_labels, (rows,), generator=generator)}


def _labels(name: str, config, ids: Tensor, real: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    rows = len(ids)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    def masked() -> Tensor:  # 15 % of the real tokens, as BERT does; never none at all
        chosen = (torch.rand(ids.shape, generator=generator) < 0.15) & real
        if not chosen.any():
            chosen[0, real[0].nonzero()[0]] = True
        return ids.masked_fill(~chosen, IGNORED)

    if is_causal_head(name):
        # With padding on the left the first token would be predicted at a padding position, where no output is defined.
        predicted = real.clone()
        predicted[:, 1:] &= real[:, :-1]
        return {"labels": ids.masked_fill(~predicted, IGNORED)}
    if is_seq2seq_head(name):
        return {"labels": ids.masked_fill(~real, IGNORED)}
    if name.endswith("ForMaskedLM"):
        return {"labels": masked()}
    if name.endswith("ForPreTraining"):
        return {"labels": masked(), "next_sentence_label": draw(2, rows)}
    if name.endswith("ForNextSentencePrediction"):
        return {"labels": draw(2, rows)}
    if name.endswith("ForSequenceClassification"):
        return _class_labels(config, rows, generator)
    if name.endswith("ForTokenClassification"):
        return {"labels": draw(config.num_labels, *ids.shape).masked_fill(~real, IGNORED)}
    if name.endswith("ForQuestionAnswering"):
        first = real.int().argmax(dim=1)
        last = first + real.sum(dim=1) - 1
        middle = torch.div(first + last, 2, rounding_mode="floor")
        return {"start_positions": middle, "end_positions": last}
    if name.endswith("ForMultipleChoice"):
        return {"labels": draw(2, rows // 2)}
    return {}


def generate_greedily(model, batch: Batch, new_tokens: int) -> Tensor:
    """Ids (B, ...) of greedy search that makes `new_tokens` tokens, whatever the checkpoint's own settings are: they
    may ask for sampling, or stop at an end token. Of Whisper the search only, without the cutting of long clips."""
    config = model.config
    settings = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=config.pad_token_id if config.pad_token_id is not None else 0,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
    )
    return GenerationMixin.generate(model, **batch.prompt, generation_config=settings)


def bare_objective(outputs, real: Tensor, seed: int = 0) -> Tensor:
    """A scalar to differentiate where a model has no loss: the mean square of projections of all that it returns.

    Squared, because a mean of signed values cancels to almost nothing, and its relative error says nothing then.

    Args:
        outputs: `last_hidden_state` (R, T, C), of which padding is left out, `pooler_output`, `text_embeds`,
            `image_embeds` (R, C) and `logits`, whichever there are.
        real: (R, T) bool.
    """
    generator = torch.Generator().manual_seed(seed)

    def weigh(x: Tensor) -> Tensor:
        weights = torch.randn(x.shape[-1], generator=generator).to(x)
        return ((x * weights).sum(-1) / math.sqrt(x.shape[-1])).square()

    total = 0.0
    for name in ("last_hidden_state", "pooler_output", "text_embeds", "image_embeds", "logits"):
        value = getattr(outputs, name, None)
        if value is not None:
            weighed = weigh(value)
            total = total + (weighed[real] if weighed.shape == real.shape else weighed).mean()
    return total
