"""Small random configurations of every architecture, and what each of its heads takes.

`tests/test_contract.py` runs every registered architecture through `tests/harness.py`; an architecture becomes testable
by an entry in `CASES`. Configurations are drawn from a seed, so that sizes change with it while the choices that an
architecture offers (activations, tied or not, kinds of positions) are all covered.

Shapes: B batch, T tokens.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True)
class Head:
    """One model class.

    Args:
        kind: what labels it takes: base (none), masked, causal, pretraining, row, next_sentence, token, span, choice,
            double (causal and choice at once).
        overrides: configuration fields that this class needs.
        variants: further configurations for this class only, by name.
        without_gradient: patterns of parameters that no loss of this class reaches, in the stock class either.
        unused_when_untied: the same, for models with untied embeddings.
    """

    kind: str
    overrides: dict = field(default_factory=dict)
    variants: dict[str, dict] = field(default_factory=dict)
    without_gradient: tuple[str, ...] = ()
    unused_when_untied: tuple[str, ...] = ()


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
        wrong_in_stock: deterministic ways to generate (of `harness.MODES`) that give other tokens than greedy search in
            the stock class, by a fault of its own; ours is compared with its greedy search.
        wide: fields of a configuration large enough to measure the spread of initial values.
        segments_are_words: whether `token_type_ids` are looked up among the words, so that zeros are not the default.
        eight_bit_tolerance: for models with 8-bit layers, which round their inputs to integers: where another kernel
            than the stock class's gives another last digit, one of them may be rounded to the next integer.
        stock_quantises: whether bitsandbytes finds the linear layers of the stock class; where not, all of ours are to
            be quantised, and there is nothing to compare them with.
        assign: sets a field of a configuration that is already built, `dropout` fields above all.
        stock_name: parameter name in the stock class's memory -> name in the file.
        stock_classes: our class name -> a subclass of the stock class that takes an input on which that one fails,
            although every other class of its kind takes it.
        stock_keeps_cache: whether the stock class returns keys and values; without, it cannot be assisted.
        adapter_targets: modules for adapters, where PEFT has no default for the official type.
        inputs: head kind, configuration, padding pattern, generator -> arguments of `forward`.
    """

    is_decoder: bool
    heads: dict[str, Head]
    configs: dict[str, dict]
    dropout: dict[str, float]
    nonsense: tuple[tuple[dict, str], ...]
    wide: dict
    inexpressible: tuple[tuple[dict, str], ...] = ()
    official_files: dict[str, dict] = field(default_factory=dict)
    legacy_keys: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    depends_on_length: tuple[str, ...] = ()
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
    stock_keeps_cache: bool = True
    adapter_targets: list[str] | None = None
    inputs: Callable[..., dict[str, Tensor]] | None = None


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


def text_labels(kind: str, config: object, inputs: dict[str, Tensor], *, seed: int = 1) -> dict[str, Tensor]:
    """Labels for one head; token labels stand on real tokens only, and their number differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    batch, tokens = ids.shape[0], ids.shape[-1]
    if kind == "base":
        return {}
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
    if kind == "causal":
        return {"labels": ids.masked_fill(~real, IGNORED)}
    # masked, pretraining
    chosen = torch.rand(ids.shape, generator=generator) < torch.linspace(0.2, 0.9, batch)[:, None]
    chosen[:, 0] = True
    labels = {"labels": ids.masked_fill(~(real & chosen), IGNORED)}
    if kind == "pretraining":
        labels["next_sentence_label"] = torch.randint(2, (batch,), generator=generator)
    return labels


# --- BERT ---------------------------------------------------------------------------------------------------------


def bert_configs(seed: int = 0) -> dict[str, dict]:
    """Activations, tied or not, one to three segments, padding id zero or another, odd head widths."""
    draw = random.Random(seed)
    configs = {}
    for name, act, tie, pad, segments in (
        ("gelu", "gelu", True, 0, 2),
        ("relu-untied", "relu", False, 3, 1),
        ("gelu_new-pad5", "gelu_new", True, 5, 3),
        ("untied", "gelu", False, 0, 2),
    ):
        heads = draw.choice([2, 3, 4])
        head_width = draw.choice([5, 7, 8]) if name != "gelu" else 8
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * head_width,
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "hidden_act": act,
            "max_position_embeddings": draw.randint(40, 60),
            "type_vocab_size": segments,
            "layer_norm_eps": draw.choice([1e-12, 1e-6, 1e-5]),
            "pad_token_id": pad,
            "tie_word_embeddings": tie,
            "num_labels": 2 if name == "relu-untied" else 3,
        }
    return configs


def bert_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As TensorFlow-era files: LayerNorm.gamma and beta, and position_ids as a buffer."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    prefix = "bert." if any(name.startswith("bert.") for name in old) else ""
    old[f"{prefix}embeddings.position_ids"] = torch.arange(512)[None]
    return old


_UNTIED_BIAS = (r"cls\.predictions\.bias",)

BERT = Case(
    is_decoder=False,
    heads={
        "ExtBertModel": Head(
            "base",
            variants={"decoder": {"is_decoder": True}, "cross": {"is_decoder": True, "add_cross_attention": True}},
        ),
        "ExtBertForPreTraining": Head("pretraining", unused_when_untied=_UNTIED_BIAS),
        "ExtBertForMaskedLM": Head("masked", unused_when_untied=_UNTIED_BIAS),
        "ExtBertLMHeadModel": Head(
            "causal",
            overrides={"is_decoder": True, "bos_token_id": 1, "eos_token_id": 2},
            variants={"cross": {"add_cross_attention": True}},
            unused_when_untied=_UNTIED_BIAS,
        ),
        "ExtBertForNextSentencePrediction": Head("next_sentence"),
        "ExtBertForSequenceClassification": Head("row"),
        "ExtBertForTokenClassification": Head("token"),
        "ExtBertForQuestionAnswering": Head("span", overrides={"num_labels": 2}),
        "ExtBertForMultipleChoice": Head("choice"),
    },
    configs=bert_configs(),
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"type_vocab_size": 0}, "type_vocab_size"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
        ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob"),
        ({"add_cross_attention": True}, "is_decoder"),
        ({"model_type": "llama"}, "llama"),
    ),
    official_files={
        "bert-base-uncased": {
            "architectures": ["BertForMaskedLM"],
            "attention_probs_dropout_prob": 0.1,
            "gradient_checkpointing": False,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "model_type": "bert",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "transformers_version": "4.6.0.dev0",
            "type_vocab_size": 2,
            "use_cache": True,
            "vocab_size": 30522,
        },
        "integer zeros": {"model_type": "bert", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    },
    legacy_keys=bert_legacy_keys,
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)


# --- GPT-2 --------------------------------------------------------------------------------------------------------


def gpt2_configs(seed: int = 0) -> dict[str, dict]:
    """Activations, own inner width or not, every way to scale the scores, tied or not."""
    draw = random.Random(seed)
    rows = (
        # name, fields
        ("default", {"n_inner": None}),
        ("relu-untied-inverse", {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}),
        ("gelu-upcast", {"activation_function": "gelu", "reorder_and_upcast_attn": True, "n_inner": None}),
        ("unscaled", {"scale_attn_weights": False, "tie_word_embeddings": False}),
        (
            "upcast-inverse-unscaled",
            {
                "scale_attn_weights": False,
                "scale_attn_by_inverse_layer_idx": True,
                "reorder_and_upcast_attn": True,
                "tie_word_embeddings": True,
            },
        ),
    )
    configs = {}
    for name, fields in rows:
        heads = draw.choice([2, 3, 4])
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "n_positions": draw.randint(40, 60),
            "n_embd": heads * (8 if name == "default" else draw.choice([5, 7, 8])),
            "n_layer": draw.choice([2, 3]),
            "n_head": heads,
            "n_inner": 2 * draw.randint(8, 25) + 1,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "tie_word_embeddings": "untied" not in name,
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def gpt2_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first files: the causal mask of every layer was saved."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    masks = {"bias": torch.ones(1, 1, 8, 8).tril(), "masked_bias": torch.tensor(-1e4)}
    return {**tensors, **{f"{prefix}h.{i}.attn.{name}": x.clone() for i in range(2) for name, x in masks.items()}}


def gpt2_inputs(kind: str, config: object, padding: str = "none", **kwargs: object) -> dict[str, Tensor]:
    """Segments are words; the double heads are told which token to choose by."""
    inputs = text_inputs(kind, config, padding, **kwargs)
    ids = inputs["input_ids"]
    generator = torch.Generator().manual_seed(ids.shape[-1])
    inputs["token_type_ids"] = torch.randint(7, ids.shape, generator=generator)
    if kind == "double":
        chosen = torch.rand(ids.shape, generator=generator)
        if "attention_mask" in inputs:
            chosen = chosen * (inputs["attention_mask"] + 1e-6)  # a real token, where there is one
        inputs["mc_token_ids"] = chosen.argmax(-1)
    return inputs


_CROSS = {"cross": {"add_cross_attention": True}, "cross-upcast": {"add_cross_attention": True}}
_CROSS["cross-upcast"] |= {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}

GPT2 = Case(
    is_decoder=True,
    heads={
        "ExtGPT2Model": Head("base", variants=_CROSS),
        "ExtGPT2LMHeadModel": Head("causal", variants=_CROSS),
        "ExtGPT2DoubleHeadsModel": Head(
            "double",
            variants={"summary": {"summary_activation": "tanh", "summary_first_dropout": 0}},
            without_gradient=(r"multiple_choice_head\.summary\.(weight|bias)",),
        ),
        "ExtGPT2ForSequenceClassification": Head("row"),
        "ExtGPT2ForTokenClassification": Head("token"),
        "ExtGPT2ForQuestionAnswering": Head("span"),
    },
    configs=gpt2_configs(),
    dropout={
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.15,
        "attn_pdrop": 0.2,
        "summary_first_dropout": 0.3,
        "classifier_dropout": 0.3,
    },
    nonsense=(
        ({"n_embd": 30, "n_head": 4}, "n_embd"),
        ({"hidden_size": 30, "n_head": 4}, "n_embd"),
        ({"n_head": 0}, "n_head"),
        ({"n_layer": -1}, "n_layer"),
        ({"n_inner": 0}, "n_inner"),
        ({"n_positions": 0}, "n_positions"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"resid_pdrop": 1.5}, "resid_pdrop"),
        ({"embd_pdrop": -0.1}, "embd_pdrop"),
        ({"attn_pdrop": 2.0}, "attn_pdrop"),
        ({"summary_first_dropout": 1.0}, "summary_first_dropout"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "gpt2": {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        "general names": {"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "integer zeros": {"model_type": "gpt2", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    },
    legacy_keys=gpt2_legacy_keys,
    wide={"n_embd": 96, "n_head": 4, "n_inner": 128, "vocab_size": 211, "num_labels": 7},
    segments_are_words=True,
    inputs=gpt2_inputs,
)


# --- GPT ----------------------------------------------------------------------------------------------------------


def openai_gpt_configs(seed: int = 0) -> dict[str, dict]:
    """Every activation, tied or not, odd head widths, one head."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, fields in (
        ("gelu", 4, {}),
        ("relu-untied", 3, {"afn": "relu", "tie_word_embeddings": False}),
        ("silu-one-head", 1, {"afn": "silu"}),
        ("swish-untied", 2, {"afn": "swish", "tie_word_embeddings": False}),
        ("pad5", 3, {"pad_token_id": 5}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "n_positions": draw.randint(40, 60),
            "n_embd": heads * (8 if name == "gelu" else draw.choice([5, 7, 9])),
            "n_layer": draw.choice([2, 3]),
            "n_head": heads,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def openai_gpt_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the official file: the causal mask of every layer was saved, and some writers saved the positions."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    masks = {f"{prefix}h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(2)}
    return {**tensors, **masks, f"{prefix}position_ids": torch.arange(8)}


class OpenAIGPTDoubleHeadsModel(transformers.OpenAIGPTDoubleHeadsModel):
    """The stock class takes ids with choices, but fails on a mask with choices: it is given one of a row each."""

    @functools.wraps(transformers.OpenAIGPTDoubleHeadsModel.forward)
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: object) -> object:
        if attention_mask is not None:
            attention_mask = attention_mask.flatten(0, -2)
        return super().forward(input_ids, attention_mask=attention_mask, **kwargs)


OPENAI_GPT = Case(
    is_decoder=True,
    heads={
        "ExtOpenAIGPTModel": Head("base"),
        "ExtOpenAIGPTLMHeadModel": Head("causal"),
        "ExtOpenAIGPTDoubleHeadsModel": Head(
            "double",
            variants={"summary": {"summary_activation": "tanh", "summary_first_dropout": 0}},
            without_gradient=(r"multiple_choice_head\.summary\.(weight|bias)",),
        ),
        "ExtOpenAIGPTForSequenceClassification": Head("row"),
    },
    configs=openai_gpt_configs(),
    dropout={"resid_pdrop": 0.1, "embd_pdrop": 0.15, "attn_pdrop": 0.2, "summary_first_dropout": 0.3},
    nonsense=(
        ({"n_embd": 30, "n_head": 4}, "n_embd"),
        ({"hidden_size": 30, "n_head": 4}, "n_embd"),
        ({"n_head": 0}, "n_head"),
        ({"n_layer": -1}, "n_layer"),
        ({"n_positions": 0}, "n_positions"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"afn": "gelu_new"}, "afn"),
        ({"afn": "tanh"}, "afn"),
        ({"resid_pdrop": 1.5}, "resid_pdrop"),
        ({"embd_pdrop": -0.1}, "embd_pdrop"),
        ({"attn_pdrop": 2.0}, "attn_pdrop"),
        ({"summary_first_dropout": 1.0}, "summary_first_dropout"),
        ({"model_type": "gpt2"}, "gpt2"),
    ),
    official_files={
        "openai-gpt": {
            "afn": "gelu",
            "architectures": ["OpenAIGPTLMHeadModel"],
            "attn_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "openai-gpt",
            "n_ctx": 512,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 512,
            "n_special": 0,
            "predict_special_tokens": True,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 40478,
        },
        "general names": {
            "model_type": "openai-gpt",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "with a cache": {"model_type": "openai-gpt", "use_cache": True},
        "integer zeros": {"model_type": "openai-gpt", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    },
    legacy_keys=openai_gpt_legacy_keys,
    stock_classes={"ExtOpenAIGPTDoubleHeadsModel": OpenAIGPTDoubleHeadsModel},
    stock_keeps_cache=False,
    own_padding={"all": ("left",)},
    adapter_targets=["c_attn", "c_proj"],
    wide={"n_embd": 96, "n_head": 4, "vocab_size": 211, "num_labels": 7},
    segments_are_words=True,
    inputs=gpt2_inputs,
)


# --- LLaMA --------------------------------------------------------------------------------------------------------


def llama_configs(seed: int = 0) -> dict[str, dict]:
    """Multi-head, grouped and multi-query attention; own head width; biases; tied or not; every rope type.

    The inputs of the tests have 9 tokens, more than the length from which dynamic and longrope change.
    """
    draw = random.Random(seed)
    eight = {"rope_theta": 10000.0}
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0 + 0.1 * i for i in range(4)],
        "long_factor": [1.5 + 0.5 * i for i in range(4)],
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    rows = (
        # name, heads, key/value heads, head width, own width, fields
        ("grouped", 4, 2, 8, False, {"rope_parameters": {"rope_type": "default", **eight}}),
        (
            "linear-bias-multihead",
            3,
            3,
            12,
            True,
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **eight}, "attention_bias": True},
        ),
        (
            "dynamic-multiquery-tied",
            4,
            1,
            8,
            False,
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **eight},
                "max_position_embeddings": 6,
                "mlp_bias": True,
                "tie_word_embeddings": True,
            },
        ),
        (
            "yarn-tied",
            6,
            3,
            6,
            True,
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 12,
                    **eight,
                },
                "max_position_embeddings": 48,
                "tie_word_embeddings": True,
            },
        ),
        ("longrope", 4, 2, 8, False, {"rope_parameters": longrope, "max_position_embeddings": 32}),
        (
            "llama3-biases",
            2,
            1,
            16,
            True,
            {"rope_parameters": llama3, "attention_bias": True, "mlp_bias": True, "max_position_embeddings": 128},
        ),
        ("no-pad-relu", 4, 4, 8, False, {"rope_parameters": None, "hidden_act": "relu"}),
    )
    configs = {}
    for name, heads, kv_heads, width, own, fields in rows:
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width if not own else heads * draw.choice([4, 7, 9]),
            "intermediate_size": draw.randint(17, 50),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
        if own:
            configs[name]["head_dim"] = width
    return configs


def llama_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first files: the rotary frequencies of every layer were saved."""
    prefix = next((p for p in ("model.", "transformer.") if any(n.startswith(p) for n in tensors)), "")
    return {**tensors, f"{prefix}layers.0.self_attn.rotary_emb.inv_freq": torch.rand(4)}


LLAMA = Case(
    is_decoder=True,
    heads={
        "ExtLlamaModel": Head("base"),
        "ExtLlamaForCausalLM": Head("causal"),
        "ExtLlamaForSequenceClassification": Head("row"),
        "ExtLlamaForTokenClassification": Head("token"),
        "ExtLlamaForQuestionAnswering": Head("span"),
    },
    configs=llama_configs(),
    dropout={"attention_dropout": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"attention_dropout": 2.0}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "Llama-2-7b": {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        "Llama-3.2-1B": {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008],
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        "old scaling": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000},
    },
    inexpressible=(
        ({"hidden_size": 26, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12}, "hidden_size"),
    ),
    legacy_keys=llama_legacy_keys,
    depends_on_length=("dynamic-multiquery-tied", "longrope"),
    wide={"hidden_size": 96, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)

# --- GPT-NeoX -----------------------------------------------------------------------------------------------------


def gpt_neox_configs(seed: int = 0) -> dict[str, dict]:
    """Parallel and sequential blocks, a part of each head or all of it rotated, biases, tied or not, linear rope."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, width, share, fields in (
        ("parallel", 4, 8, 0.25, {}),
        ("sequential-tied", 2, 10, 0.4, {"use_parallel_residual": False, "tie_word_embeddings": True}),
        ("whole-head-no-bias", 3, 6, 1.0, {"attention_bias": False, "hidden_act": "gelu_new"}),
        ("odd-share-linear", 2, 12, 0.25, {"rope": {"rope_type": "linear", "factor": 2.0}, "hidden_act": "relu"}),
    ):
        rope = {"rope_type": "default", "rope_theta": 10000.0, **fields.pop("rope", {})}
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "intermediate_size": draw.randint(17, 50),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "max_position_embeddings": 64,
            "layer_norm_eps": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            "rope_parameters": {**rope, "partial_rotary_factor": share},
            **fields,
        }
    return configs


def gpt_neox_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first files: causal masks and frequencies of every layer were saved."""
    prefix = "gpt_neox." if any(name.startswith("gpt_neox.") for name in tensors) else ""
    layer = f"{prefix}layers.0.attention"
    return {
        **tensors,
        f"{layer}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        f"{layer}.masked_bias": torch.tensor(-1e9),
        f"{layer}.rotary_emb.inv_freq": torch.rand(4),
    }


GPT_NEOX = Case(
    is_decoder=True,
    heads={
        "ExtGPTNeoXModel": Head("base"),
        "ExtGPTNeoXForCausalLM": Head("causal"),
        "ExtGPTNeoXForSequenceClassification": Head("row"),
        "ExtGPTNeoXForTokenClassification": Head("token"),
        "ExtGPTNeoXForQuestionAnswering": Head("span"),
    },
    configs=gpt_neox_configs(),
    dropout={"attention_dropout": 0.2, "hidden_dropout": 0.1, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.0}}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor"),
        ({"model_type": "llama"}, "llama"),
    ),
    official_files={
        "pythia-70m": {
            "architectures": ["GPTNeoXForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "hidden_size": 512,
            "initializer_range": 0.02,
            "intermediate_size": 2048,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 8,
            "num_hidden_layers": 6,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.24.0",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    },
    legacy_keys=gpt_neox_legacy_keys,
    stock_name=lambda name: name.replace("lm_head.", "embed_out."),
    wide={"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)

# --- Mistral ------------------------------------------------------------------------------------------------------


def mistral_configs(seed: int = 0) -> dict[str, dict]:
    """Windows smaller than, as long as, and longer than the 9 tokens of the tests, and none; grouped, multi-query and
    multi-head attention; own head width; tied or not; rope types. Smaller windows are computed block by block."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, kv_heads, width, window, fields in (
        ("grouped", 4, 2, 8, 4, {}),
        ("window2-multiquery-tied", 3, 1, 6, 2, {"tie_word_embeddings": True}),
        ("full", 4, 4, 8, None, {"hidden_act": "gelu_new"}),
        ("window-longer", 2, 1, 8, 64, {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}}),
        ("window9-own-width", 4, 2, 6, 9, {"head_dim": 6, "hidden_size": 20}),
        (
            "window5-yarn",
            6,
            2,
            4,
            5,
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "intermediate_size": draw.randint(17, 50),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 64,
            "rms_norm_eps": draw.choice([1e-6, 1e-5]),
            "sliding_window": window,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


MISTRAL = Case(
    is_decoder=True,
    heads={
        "ExtMistralModel": Head("base"),
        "ExtMistralForCausalLM": Head("causal"),
        "ExtMistralForSequenceClassification": Head("row"),
        "ExtMistralForTokenClassification": Head("token"),
        "ExtMistralForQuestionAnswering": Head("span"),
    },
    configs=mistral_configs(),
    dropout={"attention_dropout": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": -3}, "sliding_window"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 4, "hidden_size": 32, "num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"attention_dropout": 2.0}, "attention_dropout"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"model_type": "llama"}, "llama"),
    ),
    official_files={
        "Mistral-7B-v0.1": {
            "architectures": ["MistralForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        "Mistral-Nemo-Base-2407": {
            "architectures": ["MistralForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 128000,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 131072,
        },
    },
    legacy_keys=llama_legacy_keys,
    reordered_dropout=dict.fromkeys(("grouped", "window2-multiquery-tied", "window5-yarn"), ("attention_dropout",)),
    wide={"hidden_size": 96, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
)

# --- GPT-Neo ------------------------------------------------------------------------------------------------------


def gpt_neo_configs(seed: int = 0) -> dict[str, dict]:
    """Alternating, all local, all global, the local layer first; windows smaller and longer than the 9 tokens of the
    tests; own inner width or not; tied or not."""
    draw = random.Random(seed)
    configs = {}
    for name, types, window, fields in (
        ("alternating", [[["global", "local"], 1]], 4, {}),
        ("local-window2-untied", [[["local"], 2]], 2, {"tie_word_embeddings": False, "activation_function": "relu"}),
        ("global", [[["global"], 2]], 3, {"intermediate_size": None}),
        ("local-first-window5", [[["local"], 1], [["global", "local"], 1]], 5, {"activation_function": "gelu"}),
        ("window-longer", [[["global", "local"], 1]], 256, {}),
    ):
        heads = draw.choice([2, 3, 4])
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "max_position_embeddings": draw.randint(40, 60),
            "hidden_size": heads * draw.choice([5, 7, 8]) if name != "alternating" else heads * 8,
            "num_layers": sum(len(kinds) * repeats for kinds, repeats in types),
            "attention_types": types,
            "num_heads": heads,
            "intermediate_size": draw.randint(17, 50),
            "window_size": window,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def gpt_neo_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the official files: the mask of every layer was saved."""
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    masks = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), "masked_bias": torch.tensor(-1e9)}
    return {
        **tensors,
        **{f"{prefix}h.{i}.attn.attention.{name}": x.clone() for i in range(2) for name, x in masks.items()},
    }


def gpt_neo_inputs(kind: str, config: object, padding: str = "none", **kwargs: object) -> dict[str, Tensor]:
    """Segments are words."""
    inputs = text_inputs(kind, config, padding, **kwargs)
    generator = torch.Generator().manual_seed(inputs["input_ids"].shape[-1])
    inputs["token_type_ids"] = torch.randint(7, inputs["input_ids"].shape, generator=generator)
    return inputs


GPT_NEO = Case(
    is_decoder=True,
    heads={
        "ExtGPTNeoModel": Head("base"),
        "ExtGPTNeoForCausalLM": Head("causal"),
        "ExtGPTNeoForSequenceClassification": Head("row"),
        "ExtGPTNeoForTokenClassification": Head("token"),
        "ExtGPTNeoForQuestionAnswering": Head("span"),
    },
    configs=gpt_neo_configs(),
    dropout={"resid_dropout": 0.1, "embed_dropout": 0.15, "attention_dropout": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": 3, "attention_types": [[["global", "local"], 1]]}, "attention_types"),
        ({"num_layers": 2, "attention_types": [[["global", "sparse"], 1]]}, "sparse"),
        ({"num_layers": 2, "attention_types": ["global", "local"]}, "attention_types"),
        (
            {"num_layers": 2, "attention_types": [[["global"], 2]], "attention_layers": ["local", "local"]},
            "attention_layers",
        ),
        ({"window_size": 0}, "window_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"resid_dropout": 1.5}, "resid_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"model_type": "gpt_neox"}, "gpt_neox"),
    ),
    official_files={
        "gpt-neo-125m": {
            "activation_function": "gelu_new",
            "architectures": ["GPTNeoForCausalLM"],
            "attention_dropout": 0,
            "attention_layers": ["global", "local"] * 6,
            "attention_types": [[["global", "local"], 6]],
            "bos_token_id": 50256,
            "embed_dropout": 0,
            "eos_token_id": 50256,
            "gradient_checkpointing": False,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": None,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neo",
            "num_heads": 12,
            "num_layers": 12,
            "resid_dropout": 0,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "transformers_version": "4.9.0.dev0",
            "use_cache": True,
            "vocab_size": 50257,
            "window_size": 256,
        },
        "general names": {
            "model_type": "gpt_neo",
            "hidden_size": 64,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
        },
    },
    legacy_keys=gpt_neo_legacy_keys,
    segments_are_words=True,
    own_padding={"all": ("left", "right", "holes")},
    wrong_in_stock=("static",),
    reordered_dropout=dict.fromkeys(
        ("alternating", "local-window2-untied", "local-first-window5"), ("attention_dropout",)
    ),
    wide={"hidden_size": 96, "num_heads": 4, "intermediate_size": 128, "vocab_size": 211, "num_labels": 7},
    inputs=gpt_neo_inputs,
)

# --- BLOOM --------------------------------------------------------------------------------------------------------


def bloom_configs(seed: int = 0) -> dict[str, dict]:
    """Numbers of heads that are a power of two and not, residuals before and behind the norm, tied or not."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, width, fields in (
        ("four-heads", 4, 8, {}),
        ("three-heads-untied", 3, 7, {"tie_word_embeddings": False}),
        ("post-layernorm", 2, 10, {"apply_residual_connection_post_layernorm": True}),
        ("six-heads-split", 6, 4, {"pretraining_tp": 2}),
        ("one-head-wide", 1, 24, {"apply_residual_connection_post_layernorm": True, "tie_word_embeddings": False}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "n_layer": draw.choice([2, 3]),
            "n_head": heads,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def without_prefix(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the files of a bare base model: without the prefix, or with it for the base model itself."""
    if any(name.startswith("transformer.") for name in tensors):
        return {name.removeprefix("transformer."): x for name, x in tensors.items()}
    return {f"transformer.{name}": x for name, x in tensors.items()}


BLOOM = Case(
    is_decoder=True,
    heads={
        "ExtBloomModel": Head("base"),
        "ExtBloomForCausalLM": Head("causal"),
        "ExtBloomForSequenceClassification": Head("row"),
        "ExtBloomForTokenClassification": Head("token"),
        "ExtBloomForQuestionAnswering": Head("span"),
    },
    configs=bloom_configs(),
    dropout={"attention_dropout": 0.2, "hidden_dropout": 0.1, "classifier_dropout": 0.3},
    nonsense=(
        ({"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
        ({"hidden_size": 30, "n_head": 4}, "hidden_size"),
        ({"n_embed": 30, "n_head": 4}, "hidden_size"),
        ({"n_head": 0}, "n_head"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"n_layer": -1}, "n_layer"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"model_type": "mpt"}, "mpt"),
    ),
    official_files={
        "bloom-560m": {
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 3,
            "unk_token_id": 0,
            "hidden_dropout": 0.0,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "model_type": "bloom",
            "n_embed": 1024,
            "n_inner": None,
            "n_layer": 24,
            "num_attention_heads": 16,
            "offset_alibi": 100,
            "pretraining_tp": 1,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "transformers_version": "4.20.0",
            "use_cache": True,
            "vocab_size": 250880,
        },
        "bloom": {
            "architectures": ["BloomForCausalLM"],
            "hidden_size": 14336,
            "model_type": "bloom",
            "n_head": 112,
            "n_layer": 70,
            "pretraining_tp": 4,
            "slow_but_exact": False,
            "attention_dropout": 0,
            "hidden_dropout": 0,
        },
    },
    legacy_keys=without_prefix,
    stock_attention={"all": "eager"},
    eight_bit_tolerance=0.05,
    wide={"hidden_size": 96, "n_head": 4, "vocab_size": 211, "num_labels": 7},
)

# --- MPT ----------------------------------------------------------------------------------------------------------


def mpt_configs(seed: int = 0) -> dict[str, dict]:
    """Numbers of heads, bounds on the projections, a scale of one's own, tied or not."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, width, attention, fields in (
        ("four-heads", 4, 8, {}, {"use_cache": True}),
        ("three-heads-clipped-untied", 3, 7, {"clip_qkv": 0.4}, {"tie_word_embeddings": False}),
        ("two-heads-scaled", 2, 10, {"softmax_scale": 0.7}, {"norm_type": "layernorm"}),
        ("six-heads-flash", 6, 4, {"attn_impl": "flash", "attn_uses_sequence_id": True}, {}),
        ("one-head", 1, 24, {"clip_qkv": 1.5, "softmax_scale": 0.3}, {"learned_pos_emb": False}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "d_model": heads * width,
            "n_layers": draw.choice([2, 3]),
            "n_heads": heads,
            "max_seq_len": 64,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            "attn_config": attention,
            **fields,
        }
    return configs


def mpt_assign(config: object, name: str, value: object) -> None:
    """Attention's dropout is a field of `attn_config`; the stock configuration takes integers only, its layers any."""
    if name == "attn_pdrop":
        vars(config.attn_config)[name] = value
    else:
        setattr(config, name, value)


MPT = Case(
    is_decoder=True,
    heads={
        "ExtMptModel": Head("base"),
        "ExtMptForCausalLM": Head("causal"),
        "ExtMptForSequenceClassification": Head("row"),
        "ExtMptForTokenClassification": Head("token"),
        "ExtMptForQuestionAnswering": Head("span"),
    },
    configs=mpt_configs(),
    dropout={"attn_pdrop": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"d_model": 30, "n_heads": 4}, "d_model"),
        ({"n_heads": 0}, "n_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"n_layers": -1}, "n_layers"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"expansion_ratio": 2}, "expansion_ratio"),
        ({"no_bias": False}, "no_bias"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ({"norm_type": "rmsnorm"}, "norm_type"),
        ({"emb_pdrop": 0.1}, "emb_pdrop"),
        ({"resid_pdrop": 0.1}, "attn_config.attn_pdrop"),
        ({"attn_config": {"attn_pdrop": 1.5}}, "attn_pdrop"),
        ({"attn_config": {"clip_qkv": -1.0}}, "clip_qkv"),
        ({"attn_config": {"softmax_scale": 0}}, "softmax_scale"),
        ({"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln"),
        ({"attn_config": {"alibi": False}}, "alibi"),
        ({"model_type": "bloom"}, "bloom"),
    ),
    inexpressible=(({"attn_config": {"attn_pdrop": 0.1}}, "attn_pdrop"),),
    official_files={
        "mpt-7b": {
            "architectures": ["MPTForCausalLM"],
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_impl": "torch",
                "attn_pdrop": 0,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "clip_qkv": None,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "d_model": 4096,
            "emb_pdrop": 0,
            "embedding_fraction": 1.0,
            "expansion_ratio": 4,
            "init_config": {"init_div_is_residual": True, "init_gain": 0, "name": "kaiming_normal_"},
            "init_device": "cpu",
            "learned_pos_emb": True,
            "logit_scale": None,
            "max_seq_len": 2048,
            "model_type": "mpt",
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "resid_pdrop": 0,
            "tokenizer_name": "EleutherAI/gpt-neox-20b",
            "torch_dtype": "bfloat16",
            "transformers_version": "4.28.1",
            "use_cache": False,
            "verbose": 0,
            "vocab_size": 50432,
        },
        "long and clipped": {
            "model_type": "mpt",
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 6.0, "attn_uses_sequence_id": False},
            "d_model": 4096,
            "max_seq_len": 8192,
            "n_heads": 32,
            "n_layers": 32,
            "vocab_size": 50432,
        },
    },
    legacy_keys=without_prefix,
    stock_attention={"all": "eager"},
    eight_bit_tolerance=0.05,
    own_padding={"all": ("left",)},  # hidden scores are replaced there, so that they get no gradient
    assign=mpt_assign,
    wide={"d_model": 96, "n_heads": 4, "vocab_size": 211, "num_labels": 7},
)

# --- Falcon -------------------------------------------------------------------------------------------------------


def falcon_configs(seed: int = 0) -> dict[str, dict]:
    """One, grouped and all key/value heads; rotary positions and linear biases; parallel blocks with one norm and two,
    sequential ones; biases; tied or not."""
    draw = random.Random(seed)
    new = {"new_decoder_architecture": True}
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    configs = {}
    for name, heads, width, fields in (
        ("multi-query", 4, 8, {}),
        ("grouped-two-norms-untied", 6, 6, {**new, "num_kv_heads": 3, "tie_word_embeddings": False}),
        (
            "grouped-one-norm-bias",
            4,
            10,
            {**new, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True, "rope_parameters": rope},
        ),
        ("sequential-multi-head", 3, 8, {"multi_query": False, "parallel_attn": False, "activation": "relu"}),
        ("alibi", 3, 10, {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
        ("alibi-multi-query", 4, 8, {"alibi": True, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False}),
        ("alibi-grouped", 6, 4, {**new, "alibi": True, "num_kv_heads": 2, "activation": "gelu_new"}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "hidden_size": heads * width,
            "ffn_hidden_size": draw.choice([17, 33, 50]),
            "num_hidden_layers": draw.choice([2, 3]),
            "num_attention_heads": heads,
            "max_position_embeddings": 64,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            **fields,
        }
    return configs


def falcon_legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Prefix or not, and the rotary frequencies of every layer, as they were once saved."""
    tensors = without_prefix(tensors)
    prefix = "transformer." if any(name.startswith("transformer.") for name in tensors) else ""
    return {**tensors, f"{prefix}h.0.self_attention.rotary.inv_freq": torch.rand(4)}


_FALCON_ALIBI = ("alibi", "alibi-multi-query", "alibi-grouped")

FALCON = Case(
    is_decoder=True,
    heads={
        "ExtFalconModel": Head("base"),
        "ExtFalconForCausalLM": Head("causal"),
        "ExtFalconForSequenceClassification": Head("row"),
        "ExtFalconForTokenClassification": Head("token"),
        "ExtFalconForQuestionAnswering": Head("span"),
    },
    configs=falcon_configs(),
    dropout={"attention_dropout": 0.2, "hidden_dropout": 0.3, "classifier_dropout": 0.3},
    nonsense=(
        ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"n_embed": 30, "num_attention_heads": 4}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": 28, "num_attention_heads": 4}, "hidden_size"),
        ({"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 3, "new_decoder_architecture": True}, "num_kv"),
        ({"hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2, "multi_query": False}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"hidden_dropout": 1.0}, "hidden_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        ({"num_ln_in_parallel_attn": 2}, "new_decoder_architecture"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type"),
        ({"model_type": "bloom"}, "bloom"),
    ),
    official_files={
        "falcon-7b": {
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "architectures": ["FalconForCausalLM"],
            "attention_dropout": 0.0,
            "bias": False,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "hidden_dropout": 0.0,
            "hidden_size": 4544,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "falcon",
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.27.4",
            "use_cache": True,
            "vocab_size": 65024,
        },
        "falcon-40b": {
            "model_type": "falcon",
            "alibi": False,
            "bias": False,
            "hidden_size": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "parallel_attn": True,
            "vocab_size": 65024,
        },
        "falcon-11B": {
            "model_type": "falcon",
            "ff_factor": 4,
            "ffn_hidden_size": 16384,
            "hidden_size": 4096,
            "max_position_embeddings": 8192,
            "new_decoder_architecture": True,
            "num_attention_heads": 32,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "num_ln_in_parallel_attn": 1,
            "rope_scaling": None,
            "rope_theta": 500042.0,
            "tie_word_embeddings": False,
        },
        "falcon-rw-1b": {
            "model_type": "falcon",
            "alibi": True,
            "bias": True,
            "hidden_size": 2048,
            "multi_query": False,
            "new_decoder_architecture": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "parallel_attn": False,
            "vocab_size": 50304,
        },
        "old name, integer zeros": {
            "model_type": "falcon",
            "n_embed": 64,
            "num_attention_heads": 4,
            "hidden_dropout": 0,
        },
    },
    legacy_keys=falcon_legacy_keys,
    # With "eager" the stock class adds linear biases twice.
    stock_attention=dict.fromkeys(_FALCON_ALIBI, "sdpa"),
    own_padding=dict.fromkeys(_FALCON_ALIBI, ("left",)),
    stock_quantises=False,  # its layers are of a class of their own
    wide={"hidden_size": 96, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": 211, "num_labels": 7},
)


CASES: dict[str, Case] = {
    "ext_bert": BERT,
    "ext_bloom": BLOOM,
    "ext_falcon": FALCON,
    "ext_gpt2": GPT2,
    "ext_openai_gpt": OPENAI_GPT,
    "ext_gpt_neo": GPT_NEO,
    "ext_gpt_neox": GPT_NEOX,
    "ext_llama": LLAMA,
    "ext_mistral": MISTRAL,
    "ext_mpt": MPT,
}
