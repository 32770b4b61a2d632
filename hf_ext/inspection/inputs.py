"""Which classes to hold against each other, and seeded batches to run through them.

Legend: B batch, R rows of the embedding (B, or B times choices), T tokens, S of the encoder beside a decoder.
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


def longest_input(config: PreTrainedConfig) -> int | None:
    """Most tokens that the position table holds, None where positions are unlimited or not stated."""
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
    """One batch of token ids, or of sound features with the token ids of a decoder.

    Attributes:
        inputs: what the forward takes, without labels.
        labels: what the head's loss takes; empty for a bare model.
        real: (R, T) bool, True where there is a token and not padding; of the decoder, where there are two halves.
        encoder_real: (B, S) bool, the encoder's, where there are two halves.
    """

    inputs: dict[str, Tensor]
    real: Tensor
    labels: dict[str, Tensor] = field(default_factory=dict)
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
        return Batch(
            {name: value.to(device) for name, value in self.inputs.items()},
            self.real.to(device),
            {name: value.to(device) for name, value in self.labels.items()},
            None if self.encoder_real is None else self.encoder_real.to(device),
        )


def make_batch(
    model_class: type,
    config: PreTrainedConfig,
    lengths: Tensor,
    *,
    padding_side: str = "right",
    seed: int = 0,
) -> Batch:
    """A seeded batch of random tokens for a class: ids, mask, segment ids where it has them, and labels for its head.
    An encoder-decoder gets as many tokens for its decoder, or random sound of full length if that is what it hears.

    The same arguments give the same batch for our class and the stock class.

    Args:
        model_class: decides the labels, by the end of its name, and the inputs, by the signature of its forward.
        config: vocabulary, padding id, number of labels.
        lengths: (B,) tokens of each row.
        padding_side: "right" or "left".

    Raises:
        ValueError: the class takes no token ids, or a length exceeds the position table.
    """
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

    rows, longest = len(lengths), int(lengths.max())
    places = torch.arange(longest)
    if padding_side == "right":
        real = places < lengths[:, None]
    elif padding_side == "left":
        real = places >= longest - lengths[:, None]
    else:
        raise ValueError(f"padding_side={padding_side!r}: 'right' or 'left' is needed.")
    ids = _words(config, real, generator)
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


def _words(config: PreTrainedConfig, real: Tensor, generator: torch.Generator) -> Tensor:
    """Random ids where `real` (R, T), padding elsewhere. Ids at either end of the vocabulary are the special ones as a
    rule; none of them is to stand for a word."""
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    special = {pad}
    for name in ("bos_token_id", "eos_token_id", "sep_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        special.update(value if isinstance(value, list | tuple) else [value])
    words = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    return words[torch.randint(len(words), real.shape, generator=generator)].masked_fill(~real, pad)


def _sound(config: PreTrainedConfig, rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Random features (B, mel bins, 2 * S), and True for all of the S positions that the encoder makes of them."""
    positions = config.max_source_positions
    features = torch.randn(rows, config.num_mel_bins, 2 * positions, generator=generator)
    return {"input_features": features}, torch.ones(rows, positions, dtype=torch.bool)


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
        if config.problem_type == "multi_label_classification":
            return {"labels": draw(2, rows, config.num_labels).float()}
        if config.problem_type == "regression" or config.num_labels == 1:
            shape = (rows,) if config.num_labels == 1 else (rows, config.num_labels)
            return {"labels": torch.rand(shape, generator=generator)}
        return {"labels": draw(config.num_labels, rows)}
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
    """A scalar to differentiate where a bare model has no loss: the mean square of projections at real positions.

    Squared, because a mean of signed values cancels to almost nothing, and its relative error says nothing then.

    Args:
        outputs: `last_hidden_state` (R, T, C) and, where there is one, `pooler_output` (R, C).
        real: (R, T) bool.
    """
    states = outputs.last_hidden_state
    generator = torch.Generator().manual_seed(seed)

    def weigh(x: Tensor) -> Tensor:
        weights = torch.randn(x.shape[-1], generator=generator).to(x)
        return ((x * weights).sum(-1) / math.sqrt(x.shape[-1])).square()

    total = weigh(states)[real].mean()
    pooled = getattr(outputs, "pooler_output", None)
    return total if pooled is None else total + weigh(pooled).mean()
