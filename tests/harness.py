"""The contract that every architecture of the package keeps, one function per check.

Each check takes a `Subject`: one of our classes in one configuration. The stock class of the same name is the
reference, and everything is compared through files: a tiny stock model with random values in every parameter is saved,
and our class loads it. Nothing is downloaded.

Shapes: B batch, T tokens, V vocabulary, C model width.
"""

import contextlib
import copy
import functools
import gc
import inspect
import io
import json
import logging
import math
import pickle
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType

import PIL.Image
import pytest
import torch
import transformers
from cases import (
    CASES,
    IGNORED,
    IMAGES,
    NESTED,
    PADDINGS,
    POOLED,
    SPEECH,
    Case,
    Head,
    end_rows,
    image_inputs,
    image_labels,
    padding_mask,
    sides,
    spectrograms,
    speech_labels,
    text_inputs,
    text_labels,
)
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.utils import ModelOutput, find_labels

import hf_ext

TOLERANCE = 1e-5  # fp32, relative to the largest value of the tensor where that exceeds 1
IMPLEMENTATIONS = ("eager", "sdpa")
BASES = ("base", "image", "text", "pair", "speech")  # kinds of classes without a head


# --- subjects -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """One of our classes in one configuration."""

    model_type: str
    class_name: str
    config_name: str

    def __str__(self) -> str:
        return f"{self.class_name}-{self.config_name}"

    @property
    def architecture(self) -> hf_ext.Architecture:
        return hf_ext.architectures()[self.model_type]

    @property
    def case(self) -> Case:
        return CASES[self.model_type]

    @property
    def head(self) -> Head:
        return self.case.heads[self.class_name]

    @property
    def kind(self) -> str:
        return self.head.kind

    @property
    def ours(self) -> type[PreTrainedModel]:
        return self.architecture.load(self.class_name)

    @property
    def stock(self) -> type[PreTrainedModel]:
        """The class to compare with. An architecture of the package's own has none: it is compared with itself, so that
        what remains are the checks of loading, kernels, padding, packing, caches, training; what it computes is tested
        in a file of its own."""
        if self.architecture.official_model_type is None:
            return self.ours
        repaired = self.case.stock_classes.get(self.class_name)
        return repaired or getattr(transformers, self.class_name.removeprefix("Ext"))

    @property
    def as_stock(self) -> dict:
        """What makes a class that is compared with itself compute as a stock class would: padding too."""
        return {} if self.architecture.official_model_type else {"skip_padding": False}

    @property
    def our_config(self) -> type:
        return self.architecture.config_class

    @property
    def stock_config(self) -> type:
        if self.architecture.official_model_type is None:
            return self.our_config
        return getattr(transformers, self.architecture.config.removeprefix("Ext"))

    @property
    def fields(self) -> dict:
        """Fields of the official configuration, as given by the case."""
        fields = dict(self.case.configs.get(self.config_name) or next(iter(self.case.configs.values())))
        return {**fields, **self.head.overrides, **self.head.variants.get(self.config_name, {})}

    @property
    def stock_name(self) -> Callable[[str], str]:
        """A parameter's name in the stock class's memory -> the name in the file."""
        return self.head.stock_name or self.case.stock_name

    def used(self, tensors: dict) -> dict:
        """The tensors of a file without those that the stock class never uses."""
        unused = self.head.unused_in_stock
        return {n: x for n, x in tensors.items() if not any(re.fullmatch(pattern, n) for pattern in unused)}

    @property
    def generates(self) -> bool:
        return issubclass(self.ours, GenerationMixin)

    @property
    def causal(self) -> bool:
        return self.case.is_decoder or self.fields.get("is_decoder", False)

    @property
    def seq2seq(self) -> bool:
        """Whether an encoder reads and a decoder answers."""
        return self.stock_config(**self.fields).is_encoder_decoder and self.kind != "speech_row"

    @property
    def nested(self) -> bool:
        """Whether inputs have shape (B, choices, T)."""
        return self.kind in NESTED

    @property
    def is_image(self) -> bool:
        """Whether the class takes images, which have no padding."""
        return self.kind in IMAGES

    @property
    def is_speech(self) -> bool:
        """Whether the class takes spectrograms, which have no padding; a decoder's text may have."""
        return self.kind in SPEECH or self.reads == "input_features"

    @property
    def is_text(self) -> bool:
        """Whether the class takes token ids."""
        return not (self.is_image or self.is_speech)

    @property
    def reads(self) -> str:
        """The input that is not the decoder's."""
        return self.stock.main_input_name

    def patterns(self, *paddings: str) -> tuple[str, ...]:
        """Those padding patterns, of which images and clips that are classified have one only: none."""
        return ("none",) if self.is_image or self.kind == "speech_row" else paddings

    @property
    def depends_on_length(self) -> bool:
        return self.config_name in self.case.depends_on_length

    def always_tied(self, parameter: str) -> bool:
        """Whether a parameter is tied whatever `tie_word_embeddings` says."""
        return any(re.fullmatch(pattern, parameter) for pattern in self.case.always_tied)

    def stock_attention(self, attn: str) -> str:
        """The attention implementation of the stock class to compare with."""
        if attn == "sdpa" and not self.stock._supports_sdpa:
            return "eager"  # an old class: the one implementation that it has is the reference for all of ours
        return self.case.stock_attention.get(self.config_name, self.case.stock_attention.get("all", attn))

    def own_padding(self, attn: str) -> tuple[str, ...]:
        """Padding patterns whose pads hold other values than the stock class's."""
        patterns = self.case.own_padding.get(self.config_name, self.case.own_padding.get("all", ()))
        return patterns if self.stock_attention(attn) == attn else (*patterns, "left")

    def compared(self, inputs: dict[str, Tensor], padding: str, attn: str = "sdpa") -> Tensor | None:
        """(B, T) positions at which the stock class's values must be met where padding is computed; None for all."""
        return real_positions(inputs) if padding in self.own_padding(attn) else None

    def comparable_paddings(self, *patterns: str, attn: str) -> tuple[str, ...]:
        """Those patterns on which the loss must be that of the stock class: a span's loss is over all positions, and
        what a decoder pools from may be padding."""
        reads_pads = self.kind == "span" or self.pools_from_pads("left")
        return tuple(p for p in self.patterns(*patterns) if not (reads_pads and p in self.own_padding(attn)))

    def pools_from_pads(self, padding: str) -> bool:
        """Whether a decoder with a pooler pools from a pad, which sees nothing: the implementation decides what it
        gets."""
        return self.kind == "base" and self.causal and not self.case.is_decoder and padding == "left"

    def inputs(self, config: object, padding: str = "none", **kwargs: object) -> dict[str, Tensor]:
        default = image_inputs if self.is_image else text_inputs
        return (self.case.inputs or default)(self.kind, config, padding, **kwargs)

    def masked(self, config: object, inputs: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """Unpadded inputs with the padding of a mask."""
        ids = inputs["input_ids"].masked_fill(mask == 0, config.pad_token_id)
        if self.seq2seq and self.kind == "row":
            ids = end_rows(ids, mask, config)
        return {**inputs, "input_ids": ids, "attention_mask": mask}

    def labels(self, config: object, inputs: dict[str, Tensor], **kwargs: object) -> dict[str, Tensor]:
        if self.kind in POOLED:
            return {"return_loss": True} if self.kind == "pair" else {}
        if self.is_image:
            return image_labels(self.kind, config, inputs, **kwargs)
        if self.kind in SPEECH:
            return speech_labels(self.kind, config, inputs, **kwargs)
        labels = text_labels(self.kind, config, inputs, **kwargs)
        own = self.own_padding("sdpa") or self.own_padding("eager")
        if own and self.kind in ("causal", "double") and "attention_mask" in inputs:
            # The pad before a row's text, which sees nothing, predicts its first token.
            from_padding = inputs["attention_mask"][..., :-1] == 0
            labels["labels"][..., 1:] = labels["labels"][..., 1:].masked_fill(from_padding, IGNORED)
        return labels


def subjects(*kinds: str, configs: str = "all", where: Callable[[Subject], bool] | None = None) -> list[Subject]:
    """Every registered class in its configurations.

    Args:
        kinds: kinds of heads, all when none is given.
        configs: "all"; or "first" for the first configuration and the class's own variants; or "one".
        where: keeps a subject when true.
    """
    found = []
    for model_type, architecture in hf_ext.architectures().items():
        case = CASES.get(model_type)
        if case is None:
            continue  # reported by check_case_exists
        for class_name in architecture.class_names():
            head = case.heads.get(class_name)
            if head is None or (kinds and head.kind not in kinds):
                continue
            names = [*case.configs, *head.variants]
            names = names[:1] if configs == "one" else names
            found += [Subject(model_type, class_name, name) for name in names]
    return [s for s in found if (configs != "first" or is_first(s)) and (where is None or where(s))]


def base_subject(model_type: str) -> Subject:
    """The class without a head in the first configuration."""
    return subjects(*BASES, configs="one", where=lambda s: s.model_type == model_type)[0]


def broad(*kinds: str, where: Callable[[Subject], bool] | None = None) -> list[Subject]:
    """The base model and the language models in every configuration, the other heads in the first one."""
    main = (*BASES, "masked", "causal", "seq2seq", "masked_image")
    every = [s for s in subjects(*kinds, where=where) if s.kind in main]
    return every + [s for s in subjects(*kinds, configs="first", where=where) if s.kind not in main]


def one_per_architecture(*kinds: str, where: Callable[[Subject], bool] | None = None) -> list[Subject]:
    """For each architecture, the first head of the first of these kinds that it has; `where` as in `subjects`."""
    found = []
    for model_type in hf_ext.architectures():
        candidates = [s for s in subjects(*kinds, configs="one", where=where) if s.model_type == model_type]
        candidates.sort(key=lambda s: kinds.index(s.kind))
        found += candidates[:1]
    return found


def slow_unless(quick: Callable[[Subject], bool], found: list[Subject]) -> list:
    """Parameters: some subjects in every run, the others when slow tests are asked for."""
    return [s if quick(s) else pytest.param(s, marks=pytest.mark.slow) for s in found]


def of_architectures(*model_types: str) -> Callable[[Subject], bool]:
    """Whether a subject is of one of these architectures, by official name."""
    return lambda subject: subject.model_type.removeprefix("ext_") in model_types


def is_first(subject: Subject) -> bool:
    """Whether it is the first configuration of a class, or a variant of the class's own."""
    return subject.config_name in (next(iter(subject.case.configs)), *subject.head.variants)


# --- building and comparing ---------------------------------------------------------------------------------------

_folder: Path | None = None


def set_folder(folder: Path) -> None:
    """Where the stock checkpoints of this run are kept."""
    global _folder
    _folder = folder
    stock_folder.cache_clear()
    _models.clear()


def scratch() -> Path:
    """A new empty folder."""
    return Path(tempfile.mkdtemp(dir=_folder))


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, rename: Callable[[str], str] = str) -> None:
    """Random values in every parameter: zeros and ones would hide a bias or a norm that is wired wrongly."""
    generator = torch.Generator().manual_seed(seed)
    computed = getattr(model, "_keys_to_ignore_on_save", None) or ()  # in no file
    named = {rename(name): parameter for name, parameter in model.named_parameters() if name not in computed}
    for name, parameter in sorted(named.items()):  # by name: the order of registration may differ
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        is_norm = re.search(r"norm|\bln_", name.lower()) and name.endswith("weight")
        parameter.copy_(1 + 0.1 * noise if is_norm else 0.15 * noise)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in sorted(model.state_dict().items()):  # buffers that are in the file
        if name not in parameters and name not in computed and buffer.is_floating_point():
            buffer.copy_(0.15 * torch.randn(buffer.shape, generator=generator))


@functools.cache
def stock_folder(subject: Subject) -> Path:
    """A saved stock model with random values; its first file of weights is the reference for all checks."""
    seed_torch(0)
    model = subject.stock(subject.stock_config(**subject.fields))
    randomise(model)
    folder = scratch()
    model.save_pretrained(folder)
    return folder


def write_official(model: PreTrainedModel, folder: Path, *, tokenizer: object | None = None) -> None:
    """Write what the stock class reads; where there is none, what ours reads."""
    if model.config.official_model_type:
        hf_ext.export_official(model, folder, tokenizer=tokenizer)
        return
    for part in (model, tokenizer):
        if part is not None:
            part.save_pretrained(folder)


@dataclass
class Alarm:
    """What was logged or warned."""

    messages: list[str]


@contextlib.contextmanager
def no_warning(allow: tuple[str, ...] = ()) -> Iterator[Alarm]:
    """Fails if anything is logged at warning level, or warned, inside the block."""
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.name}: {record.getMessage()}")

    transformers.utils.logging.get_logger("transformers")  # the library sets its root logger up on first use
    for once in ("warning_once", "info_once"):
        getattr(transformers.utils.logging, once).cache_clear()
    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("transformers", "hf_ext", "peft", "accelerate")]
    for logger in loggers:
        logger.addHandler(listener)
    alarm = Alarm(records)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield alarm
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
    records += [f"{w.category.__name__}: {w.message}" for w in caught]
    unexpected = [m for m in records if not any(re.search(pattern, m) for pattern in allow)]
    assert not unexpected, f"warned: {unexpected}"


class Mould(pickle.Pickler):
    """What copies of a model are cast from, in a fifth of the time that `copy.deepcopy` takes: thousands of checks
    would spend a good part of theirs on it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(file := io.BytesIO())
        self.kept: dict[int, Tensor | FunctionType] = {}  # by address: what is tied stays so
        self.dump(model)
        self.rest = file.getvalue()

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, Tensor | FunctionType):  # hooks are functions within functions: no pickle has them
            return None
        self.kept[id(value)] = value
        return id(value)

    def cast(self) -> PreTrainedModel:
        """A new model with tensors of its own."""
        unpickler = pickle.Unpickler(io.BytesIO(self.rest))
        unpickler.persistent_load = copy.deepcopy(self.kept).__getitem__
        return unpickler.load()


KEPT_MODELS = 500
_models: dict[tuple, Mould] = {}


def build(cls: type, subject: Subject, *, attn: str = "sdpa", folder: Path | None = None, **fields: object):
    """Load the checkpoint of a subject into a class, with some fields of the configuration changed.

    A copy of what was loaded before, where it was: thousands of checks start from the same few hundred models, and
    loading one takes longer than most checks.
    """
    if cls is subject.stock:
        attn = subject.stock_attention(attn)
    key = (cls, folder or stock_folder(subject), attn, repr(sorted(fields.items())))
    if key not in _models:
        if len(_models) >= KEPT_MODELS:
            del _models[next(iter(_models))]
        config_class = subject.stock_config if cls is subject.stock else subject.our_config
        config = config_class.from_pretrained(key[1])
        for name, value in fields.items():
            subject.case.assign(config, name, value)
        _models[key] = Mould(cls.from_pretrained(key[1], config=config, attn_implementation=attn))
        if len(_models) % 50 == 0:  # as in conftest.py
            gc.collect()
            gc.freeze()
    return _models[key].cast()


def pair(subject: Subject, *, attn: str = "sdpa", ours: dict | None = None, **fields: object):
    """The stock model and ours from the same file; `fields` for both configurations, `ours` for ours only."""
    return (
        build(subject.stock, subject, attn=attn, **fields, **subject.as_stock),
        build(subject.ours, subject, attn=attn, **fields, **(ours or {})),
    )


def seed_torch(seed: int) -> None:
    """`torch.manual_seed` for the CPU; without a GPU, that keeps a stack trace of every call for the GPU's sake."""
    torch.default_generator.manual_seed(seed)


def no_dropout(subject: Subject) -> dict[str, float]:
    """Every dropout field at zero."""
    return dict.fromkeys(subject.case.dropout, 0.0)


def assert_close(actual: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Equal shapes, and no difference above `tolerance` times the largest expected value (at least 1)."""
    assert actual is not None, f"{what} is None"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double(), expected.detach().double()
    if not expected.numel():
        return
    difference = (actual - expected).abs().max().item()
    limit = tolerance * max(1.0, expected.abs().max().item())
    assert difference <= limit, f"{what}: differs by {difference:.3e}, allowed {limit:.1e}"  # False for NaN too


def tensors_of(output: object) -> dict[str, Tensor]:
    """The tensors of an output by name; tuples as name.0, name.1; no loss, no cache."""
    found = {}
    for name, value in output.items():
        if name in ("loss", "past_key_values") or value is None:
            continue
        if isinstance(value, ModelOutput):
            found |= {f"{name}.{inner}": x for inner, x in tensors_of(value).items()}
        elif isinstance(value, Tensor):
            found[name] = value
        else:
            found |= {f"{name}.{i}": x for i, x in enumerate(value)}
    return found


def compare_outputs(
    actual: object,
    expected: object,
    what: str,
    real: Tensor | None = None,
    tolerance: float = TOLERANCE,
    *,
    real_queries: bool = False,
) -> int:
    """All tensors of two outputs; where `real` (B, T) is given, per-token tensors at real positions only, attention
    weights (B, H, T, K) too if `real_queries`.

    Returns:
        How many tensors were compared.
    """
    ours, theirs = tensors_of(actual), tensors_of(expected)
    assert ours.keys() == theirs.keys(), f"{what}: {sorted(ours)} instead of {sorted(theirs)}"
    for name, value in theirs.items():
        mine, reference = ours[name], value
        if real is not None and "attentions" not in name:
            assert mine.shape == reference.shape
            mine, reference = at_real_positions(mine, real), at_real_positions(reference, real)
        elif real is not None and real_queries:
            mine, reference = mine.transpose(1, 2)[real], reference.transpose(1, 2)[real]
        assert_close(mine, reference, f"{what}: {name}", tolerance)
    return len(theirs)


def real_positions(inputs: dict[str, Tensor]) -> Tensor | None:
    """(B, T) True at real tokens; for multiple choice rows and choices are one dimension, as in hidden states."""
    mask = inputs.get("attention_mask")
    return None if mask is None else mask.flatten(0, -2).bool()


def at_real_positions(value: Tensor, real: Tensor) -> Tensor:
    """A per-token tensor, (rows, T, ...) or (B, choices, T, ...), at the real positions; any other as it is."""
    if value.dim() > 2 and value.shape[2:3] == real.shape[1:] and value.shape[:2].numel() == real.shape[0]:
        value = value.flatten(0, 1)
    return value[real] if value.shape[:2] == real.shape else value


def loss_of(model: nn.Module, subject: Subject, inputs: dict, labels: dict, **kwargs: object) -> Tensor:
    """The loss; for a class without labels, a fixed random projection of everything it returns for real tokens."""
    if labels:
        loss = model(**inputs, **labels, **kwargs).loss
        assert loss is not None, f"{subject}: no loss although {sorted(labels)} were given"
        return loss
    output = model(**inputs)
    total = 0.0
    real = real_positions(inputs)
    for name, value in sorted(tensors_of(output).items()):
        generator = torch.Generator().manual_seed(len(name))
        if real is not None and value.shape[:2] == real.shape:
            value = value * real[..., None]
        total = total + (value * torch.randn(value.shape, generator=generator)).mean()
    return total


def gradients(model: nn.Module, rename: Callable[[str], str] = str) -> dict[str, Tensor]:
    """Gradients by name, for the parameters that have one."""
    return {rename(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def loss_and_gradients(
    model: nn.Module,
    subject: Subject,
    inputs: dict,
    labels: dict,
    *,
    seed: int = 0,
    rename: Callable[[str], str] = str,
    **kwargs: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One training step without the step."""
    model.train()
    model.zero_grad(set_to_none=True)
    seed_torch(seed)
    loss = loss_of(model, subject, inputs, labels, **kwargs)
    loss.backward()
    return loss.detach(), gradients(model, rename)


def compare_gradients(actual: dict, expected: dict, what: str, tolerance: float = TOLERANCE) -> None:
    """Same parameters have gradients, and they are equal."""
    assert expected, f"{what}: nothing has a gradient"
    assert actual.keys() == expected.keys(), (
        f"{what}: gradients only in ours {sorted(actual.keys() - expected.keys())}, "
        f"only in the reference {sorted(expected.keys() - actual.keys())}"
    )
    for name, value in expected.items():
        assert_close(actual[name], value, f"{what}: gradient of {name}", tolerance)


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Same names, same values to the last bit."""
    assert actual.keys() == expected.keys(), f"{what}: {sorted(actual.keys() ^ expected.keys())} in one only"
    different = [n for n in expected if not torch.equal(actual[n], expected[n])]
    assert not different, f"{what}: different values in {different}"


# --- 0: the harness itself ----------------------------------------------------------------------------------------


def check_case_exists(model_type: str) -> None:
    """A registered architecture, or one of its classes, that nobody described would go untested."""
    architecture = hf_ext.architectures()[model_type]
    assert model_type in CASES, f"add {model_type} to tests/cases/"
    described = set(CASES[model_type].heads)
    assert described == set(architecture.class_names()), (
        f"tests/cases/ and the table of architectures disagree on {described ^ set(architecture.class_names())}"
    )
    for class_name in architecture.class_names() if architecture.official_model_type else ():
        assert hasattr(transformers, class_name.removeprefix("Ext")), f"{class_name} has no stock class to compare with"


# --- 1: configuration ---------------------------------------------------------------------------------------------


def plain(config: object) -> dict:
    """`to_dict()` without what says who wrote it."""
    content = config.to_dict()
    ours = getattr(config, "runtime_fields", ())
    for name in ("model_type", "transformers_version", "architectures", *ours):
        content.pop(name, None)
    for name in content:
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            content[name] = plain(getattr(config, name))
    return content


def check_config_reads_official(subject: Subject) -> None:
    """A field with another default or name than the official one would change a model that is merely loaded."""
    folder = stock_folder(subject)
    with no_warning():
        config = subject.our_config.from_pretrained(folder)
    assert config.model_type == subject.model_type == type(config).model_type
    official = subject.stock_config.from_pretrained(folder)
    assert plain(config) == plain(official)


def check_official_files(model_type: str) -> None:
    """Older official files, spelled differently, would be read with a warning or to other values than stock reads."""
    subject = base_subject(model_type)
    for name, content in subject.case.official_files.items():
        folder = scratch()
        (folder / "config.json").write_text(json.dumps(content))
        with no_warning():
            config = subject.our_config.from_pretrained(folder)
        assert config.model_type == model_type
        expected = plain(subject.stock_config.from_pretrained(folder))
        expected |= {field: content[field] for field in subject.case.read_as_written if field in content}
        assert plain(config) == expected, name
    assert plain(subject.our_config()) == plain(subject.stock_config()), "defaults"


def check_config_round_trips(subject: Subject) -> None:
    """A configuration that changes when copied, pickled or saved twice makes a model that cannot be rebuilt."""
    cls = subject.our_config
    config = cls(**subject.fields, harness_extra={"kept": [1, 2]})
    reference = config.to_dict()
    assert reference["model_type"] == subject.model_type
    assert reference["harness_extra"] == {"kept": [1, 2]}
    for name, value in config.to_diff_dict().items():
        if name in config.sub_configs:
            assert value.items() <= reference[name].items(), name
        elif name != "transformers_version":
            assert value == reference[name], name
    for name, other in (
        ("from_dict", cls.from_dict(reference)),
        ("keywords", cls(**{k: v for k, v in reference.items() if k != "transformers_version"})),
        ("deepcopy", copy.deepcopy(config)),
        ("pickle", pickle.loads(pickle.dumps(config))),
    ):
        assert type(other) is cls
        assert other.to_dict() == reference, name
    folders = [scratch(), scratch()]
    config.save_pretrained(folders[0])
    with no_warning():
        again = AutoConfig.from_pretrained(folders[0])
    assert type(again) is cls
    again.save_pretrained(folders[1])
    first, second = ((folder / "config.json").read_bytes() for folder in folders)
    assert first == second
    assert json.loads(first)["model_type"] == subject.model_type


def check_config_refuses(model_type: str, fields: dict, named: str) -> None:
    """Nonsense that is accepted fails much later, in a tensor operation, with a message about shapes."""
    try:
        hf_ext.architectures()[model_type].config_class(**fields)
    except ValueError as error:
        assert named in str(error), f"the message does not name {named}: {error}"
    else:
        raise AssertionError(f"{fields} were accepted")


def check_inexpressible(model_type: str, fields: dict, named: str) -> None:
    """An official folder that the official class refuses to read is no export."""
    subject = base_subject(model_type)
    config_class, base = subject.our_config, subject.fields
    try:
        model = subject.ours(config_class(**{**base, **fields}))
        hf_ext.export_official(model, scratch() / "export")
    except ValueError as error:
        assert named in str(error), f"the message does not name {named}: {error}"
    else:
        raise AssertionError(f"{fields} were exported, and the official class does not take them")


def check_signature(model_type: str) -> None:
    """Arguments given by position would land elsewhere than in the stock class; `Trainer` drops columns not named."""
    architecture = hf_ext.architectures()[model_type]
    for class_name in architecture.class_names() if architecture.official_model_type else ():
        stock = getattr(transformers, class_name.removeprefix("Ext"))
        ours, stock = (inspect.signature(cls.forward).parameters for cls in (architecture.load(class_name), stock))
        official = [name for name, p in stock.items() if p.kind is not p.VAR_KEYWORD]
        assert list(ours)[: len(official)] == official, class_name


# --- 2: loading ---------------------------------------------------------------------------------------------------


def check_loads_official(subject: Subject) -> None:
    """A missing key is a random tensor in a model that is believed to be pretrained; an unexpected one is lost."""
    folder = stock_folder(subject)
    with no_warning():
        model, info = subject.ours.from_pretrained(folder, output_loading_info=True)
    for problem, names in info.items():
        assert not names, f"{problem}: {names}"
    assert model.config.model_type == subject.model_type
    weights = subject.used(load_file(folder / "model.safetensors"))
    loaded = model.state_dict()
    for name, value in weights.items():
        assert torch.equal(loaded[name], value), f"{name} is not what the file says"


# --- 3: forward in eval mode --------------------------------------------------------------------------------------


@torch.no_grad()
def check_forward(subject: Subject, attn: str) -> None:
    """Any difference means that a checkpoint gives other predictions here than with the stock class."""
    stock, ours = pair(subject, attn=attn)
    for padding in subject.patterns(*PADDINGS):
        inputs = subject.inputs(ours.config, padding)
        real = real_positions(inputs)
        from_pads = subject.pools_from_pads(padding) and padding in subject.own_padding(attn)

        def run(model: nn.Module, inputs: dict = inputs, from_pads: bool = from_pads, **wanted: bool) -> dict:
            output = dict(model(**inputs, **wanted))
            if from_pads:
                output.pop("pooler_output", None)
            return output

        # Encoders leave padding out, so pad positions are zero: real positions are compared.
        wanted = {"output_hidden_states": True}
        if attn == "eager" and subject.stock_attention(attn) == attn:
            wanted["output_attentions"] = True
        expected = run(stock, **wanted)
        where = subject.compared(inputs, padding, attn)
        own = where is not None
        compare_outputs(run(ours), run(stock), padding, real)
        compared = compare_outputs(run(ours, **wanted), expected, f"{padding}, all", real, real_queries=own)
        assert compared > getattr(ours.config, "num_hidden_layers", 2)
        # With padding computed, everything is compared. Attention weights are those of the padded layout.
        computed = run(ours, **wanted, skip_padding=False)
        compare_outputs(computed, expected, f"{padding}, padding computed", where, real_queries=own)
    ours.config.skip_padding = False  # by configuration, in the last of the layouts
    compare_outputs(run(ours, **wanted), computed, f"{padding}, by configuration", tolerance=0.0)


@torch.no_grad()
def check_embeds(subject: Subject) -> None:
    """Embeddings passed in (soft prompts, adversarial training) must mean the same as the ids they came from."""
    model = build(subject.ours, subject)
    if subject.kind == "row" and subject.seq2seq:
        return  # the end token is looked for among the ids; documented, and an error
    for padding in ("none", "right", "holes"):
        if subject.case.is_decoder and subject.kind == "row" and padding != "none":
            continue  # which token is the last real one cannot be told from embeddings; documented
        inputs = subject.inputs(model.config, padding)
        expected = model(**inputs)
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
        if subject.case.positions_from_ids and padding == "holes":
            expected = build(subject.stock, subject)(inputs_embeds=embeddings, **inputs)
        compare_outputs(model(inputs_embeds=embeddings, **inputs), expected, padding, real_positions(inputs))


@torch.no_grad()
def check_eager_equals_sdpa(subject: Subject) -> None:
    """A scale or a mask that only one backend honours would make results depend on the installed kernel."""
    eager, sdpa = build(subject.ours, subject, attn="eager"), build(subject.ours, subject, attn="sdpa")
    for padding in subject.patterns(*PADDINGS):
        for skip_padding in (True, False):
            inputs = {**subject.inputs(eager.config, padding), "skip_padding": skip_padding}
            outputs = [dict(model(**inputs)) for model in (sdpa, eager)]
            if subject.pools_from_pads(padding) or (subject.kind in POOLED and padding == "left"):
                for output in outputs:  # pooled from padding that sees nothing; each backend has its own way there
                    output.pop("pooler_output", None)
            compare_outputs(*outputs, f"{padding}, {skip_padding=}", real_positions(inputs))


@torch.no_grad()
def check_attention_switches(subject: Subject) -> None:
    """A model that stays on its kernel when told to change returns no attention weights, or wastes a GPU."""
    eager, model = build(subject.ours, subject, attn="eager"), build(subject.ours, subject, attn="sdpa")
    inputs = subject.inputs(eager.config, "holes")
    before = model(**inputs)
    with no_warning(allow=("without finding the associated sub-model",)):  # a head over one part of a pair
        model.set_attn_implementation("eager")
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}
    compare_outputs(model(**inputs), eager(**inputs), "switched to eager", tolerance=0.0)
    assert any("attentions.0" in name for name in tensors_of(model(**inputs, output_attentions=True)))
    model.set_attn_implementation("sdpa")
    compare_outputs(model(**inputs), before, "and back", tolerance=0.0)


# --- 4: train mode ------------------------------------------------------------------------------------------------


def check_training_step(subject: Subject, attn: str) -> None:
    """A wrong loss or gradient trains to another model, which no test in eval mode notices."""
    stock, ours = pair(subject, attn=attn, **no_dropout(subject))
    for padding in subject.comparable_paddings("none", "right", "left", attn=attn):
        inputs = subject.inputs(ours.config, padding)
        labels = subject.labels(ours.config, inputs)
        expected, reference = loss_and_gradients(stock, subject, inputs, labels, rename=subject.stock_name)
        for skip_padding in (True, False):
            ours.config.skip_padding = skip_padding
            loss, found = loss_and_gradients(ours, subject, inputs, labels)
            what = f"{padding}, {skip_padding=}"
            assert_close(loss, expected, f"{what}: loss")
            compare_gradients(found, reference, what)


def check_training_step_with_dropout(subject: Subject, attn: str) -> None:
    """Dropout at another place, or drawn in another order, would make training curves incomparable."""
    reordered = subject.case.reordered_dropout.get(subject.config_name, ()) if attn == "sdpa" else ()
    dropout = {**subject.case.dropout, **dict.fromkeys(reordered, 0.0)}
    stock, ours = pair(subject, attn=attn, ours={"skip_padding": False}, **dropout)
    for padding in subject.comparable_paddings("none", "right", attn=attn):
        inputs = subject.inputs(ours.config, padding)
        labels = subject.labels(ours.config, inputs)
        expected, reference = loss_and_gradients(stock, subject, inputs, labels, seed=3, rename=subject.stock_name)
        other, _ = loss_and_gradients(stock, subject, inputs, labels, seed=4)
        if not reordered:  # else there may be no other dropout left
            assert (other - expected).abs() > 1e-4, "dropout does nothing, the comparison would be empty"
        loss, found = loss_and_gradients(ours, subject, inputs, labels, seed=3)
        assert_close(loss, expected, f"{padding}: loss")
        compare_gradients(found, reference, padding)


def check_logits_in_training(subject: Subject) -> None:
    """Logits that are returned unasked cost the memory the package saves; logits refused when asked break users."""
    model = build(subject.ours, subject, **no_dropout(subject))
    inputs = subject.inputs(model.config)
    labels = subject.labels(model.config, inputs)
    name = "prediction_logits" if subject.kind == "pretraining" else "logits"
    evaluated = model(**inputs, **labels)
    model.train()
    lean, full = model(**inputs, **labels), model(**inputs, **labels, output_logits=True)
    assert getattr(lean, name) is None
    assert torch.equal(lean.loss, full.loss)
    if subject.config_name not in subject.case.differs_in_training:
        assert_close(getattr(full, name), getattr(evaluated, name), "logits asked for by argument")
        assert_close(lean.loss, evaluated.loss, "loss")
    assert_close(getattr(model(**inputs), name), getattr(full, name), "logits without labels")
    model.config.output_logits = True
    assert_close(getattr(model(**inputs, **labels), name), getattr(full, name), "logits asked for by config")
    assert_close(getattr(model.eval()(**inputs, **labels, output_logits=False), name), evaluated[name], "eval")


def check_problem_types(subject: Subject) -> None:
    """Regression and several labels per row go by another loss; the wrong one still goes down."""
    for problem, num_labels, labels in (
        ("regression", 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ("regression", 2, torch.tensor([[0.5, -1.0], [2.0, 0.0], [1.0, 1.0], [0.3, 0.7]])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]])),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
    ):
        folder = stock_folder(subject)
        models, renames = [], []
        for cls, config_class in ((subject.stock, subject.stock_config), (subject.ours, subject.our_config)):
            config = config_class.from_pretrained(folder, num_labels=num_labels, **no_dropout(subject))
            seed_torch(0)
            model = cls.from_pretrained(folder, config=config, ignore_mismatched_sizes=True)
            renames.append(subject.stock_name if cls is subject.stock else str)
            randomise(model, seed=2, rename=renames[-1])
            models.append(model)
        inputs = subject.inputs(config, "right")
        for model in models:
            model.config.problem_type = problem if num_labels == 2 else None  # found out from the labels where it can
        stock, ours = (
            loss_and_gradients(model, subject, inputs, {"labels": labels}, rename=rename)
            for model, rename in zip(models, renames, strict=True)
        )
        assert_close(ours[0], stock[0], f"{problem}, {num_labels} labels: loss")
        compare_gradients(ours[1], stock[1], f"{problem}, {num_labels} labels")
        assert models[1].config.problem_type == models[0].config.problem_type == problem


# --- 5: files -----------------------------------------------------------------------------------------------------


def assert_same_weights(subject: Subject, folder: Path, stock_path: Path) -> None:
    """Byte-equal files; where the stock class writes tensors that it does not use, equal but for those."""
    ours, stock = (path / "model.safetensors" for path in (folder, stock_path))
    if subject.head.unused_in_stock:
        assert_identical(load_file(ours), subject.used(load_file(stock)), "weights")
    else:
        assert ours.read_bytes() == stock.read_bytes()


def check_files_equal_stock(subject: Subject) -> None:
    """A file that differs from the stock one is no official checkpoint; what else reads those would not read it."""
    stock_path = stock_folder(subject)
    ours = subject.ours.from_pretrained(stock_path)
    folder = scratch()
    with no_warning():
        ours.save_pretrained(folder)
    assert_same_weights(subject, folder, stock_path)

    export = scratch() / "export"
    with no_warning():
        write_official(ours, export)
    assert_same_weights(subject, export, stock_path)
    with no_warning():
        stock, info = subject.stock.from_pretrained(export, output_loading_info=True)
    assert not any(info.values()), info
    # Of a loaded model: loading writes the type of the weights into nested configurations as well.
    written, original = stock.config.to_dict(), subject.stock.from_pretrained(stock_path).config.to_dict()
    for config in (written, original):
        config.pop("_name_or_path", None)  # which folder it was read from
    assert written == original
    assert set(json.loads((export / "config.json").read_text())) >= {"model_type", "architectures"}
    inputs = subject.inputs(ours.config, "right")
    with torch.no_grad():
        actual = ours(**inputs, skip_padding=False)
        compare_outputs(
            actual, stock.eval()(**inputs, **subject.as_stock), "exported", subject.compared(inputs, "right")
        )


# --- 6: generation ------------------------------------------------------------------------------------------------


def generation_pair(subject: Subject, **kwargs: object):
    """Both models, ready to generate without stopping early."""
    models = pair(subject, **kwargs)
    for model in models:
        model.generation_config.pad_token_id = model.config.pad_token_id
        model.generation_config.eos_token_id = None  # every row runs to the end, so that more steps are compared
        model.generation_config.forced_eos_token_id = None
        model.generation_config.bos_token_id = 1
    return models


def prompts(subject: Subject, config: object, lengths: tuple[int, ...] = (2, 5, 9)) -> tuple[list[Tensor], dict]:
    """Prompts alone, (1, T) each, and as a left-padded batch; padded on the right where an encoder reads them.
    Spectrograms have one length."""
    if subject.is_speech:
        features = spectrograms(config, len(lengths), seed=5)
        return list(features.split(1)), {"input_features": features}
    pad = config.pad_token_id
    generator = torch.Generator().manual_seed(5)
    words = (pad + 1, config.vocab_size) if pad < config.vocab_size // 2 else (3, pad)
    rows = [torch.randint(*words, (1, n), generator=generator) for n in lengths]
    longest = max(lengths)
    sides = [(0, longest - n) if subject.seq2seq else (longest - n, 0) for n in lengths]
    ids = torch.cat([nn.functional.pad(row, side, value=pad) for row, side in zip(rows, sides, strict=True)])
    mask = torch.cat([nn.functional.pad(torch.ones_like(r), side) for r, side in zip(rows, sides, strict=True)])
    extra = {}
    if getattr(config, "add_cross_attention", False):
        extra["encoder_hidden_states"] = torch.randn(len(rows), 5, config.hidden_size, generator=generator)
    return rows, {"input_ids": ids, "attention_mask": mask, **extra}


def as_prompt(subject: Subject, row: Tensor) -> dict[str, Tensor]:
    """A prompt alone, as `prompts` gives it -> arguments of `generate`."""
    return {"input_features": row} if subject.is_speech else {"input_ids": row, "attention_mask": torch.ones_like(row)}


def prompt_length(subject: Subject, row: Tensor) -> int:
    """Tokens before the first new one in what `generate` returns: the prompt, or the decoder's start token, which
    Whisper leaves out."""
    if subject.is_speech:
        return 0
    return 1 if subject.seq2seq else row.shape[1]


MODES = {
    "greedy": {},
    "beam": {"num_beams": 4, "num_return_sequences": 4},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beam-sampled": {"do_sample": True, "num_beams": 3},
    "static": {"cache_implementation": "static"},
    "contrast": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


def check_generation_equals_stock(subject: Subject, attn: str) -> None:
    """Other tokens than the stock class gives, although the logits of one forward pass are equal."""
    stock, ours = generation_pair(subject, attn=attn)
    _, batch = prompts(subject, ours.config)
    for mode, options in MODES.items():
        if "encoder_hidden_states" in batch:
            if mode == "static":
                continue
            stock.generation_config.use_cache = False  # the stock class fails with a cache and cross-attention here
        results = []
        for model in (stock, ours):
            seed_torch(7)
            wrong = model is stock and mode in subject.case.wrong_in_stock
            asked = MODES["greedy"] if wrong else options
            results.append(
                model.generate(**batch, max_new_tokens=14, return_dict_in_generate=True, output_logits=True, **asked)
            )
        assert torch.equal(results[1].sequences, results[0].sequences), mode
        start = 1 if subject.is_speech else prompt_length(subject, batch[subject.reads])  # in full results it is there
        assert results[1].sequences.shape[1] == start + 14
        for step, (mine, reference) in enumerate(zip(results[1].logits, results[0].logits, strict=True)):
            assert_close(mine, reference, f"{mode}, logits of step {step}")


def check_generation_after_resize(subject: Subject) -> None:
    """A bias, a head or a start token of the old vocabulary sends generation astray from the first new word on."""
    _, ours = generation_pair(subject)
    _, batch = prompts(subject, ours.config)
    vocab = ours.config.vocab_size
    ours.resize_token_embeddings(vocab + 5, mean_resizing=False)
    randomise(ours, seed=9)  # of seed 8 a model has two tokens of exactly the same score
    if "input_ids" in batch:
        batch["input_ids"][:, 0 if subject.seq2seq else -1] = vocab + 2
    write_official(ours, folder := scratch())
    stock = subject.stock.from_pretrained(folder, **subject.as_stock).eval()
    stock.generation_config = copy.deepcopy(ours.generation_config)
    if "encoder_hidden_states" in batch:
        stock.generation_config.use_cache = False  # as above
    for options in (MODES["greedy"], MODES["beam"]):
        tokens = [model.generate(**batch, max_new_tokens=8, **options) for model in (ours, stock)]
        assert torch.equal(*tokens), options
        assert tokens[0].max() < vocab + 5


def check_cache(subject: Subject, attn: str) -> None:
    """A cache that is off by one position, or is not reordered with the beams, gives fluent but other text."""
    _, ours = generation_pair(subject, attn=attn)
    _, batch = prompts(subject, ours.config)
    for mode in ("greedy", "beam", "sampled"):
        results = []
        for use_cache in (True, False):
            seed_torch(7)
            results.append(
                ours.generate(
                    **batch,
                    max_new_tokens=14,
                    use_cache=use_cache,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **MODES[mode],
                )
            )
        assert torch.equal(results[0].sequences, results[1].sequences), mode
        for step, (cached, plain_) in enumerate(zip(results[0].logits, results[1].logits, strict=True)):
            assert_close(cached, plain_, f"{mode}, logits of step {step}")
    # Step by step, in pieces of several tokens too.
    name = "decoder_input_ids" if subject.seq2seq else "input_ids"
    tokens = 14 if subject.seq2seq else 12  # the decoder's are two less
    inputs = as_rows(subject, subject.inputs(ours.config, "none", tokens=tokens))
    inputs.pop("mc_token_ids", None)
    encoder = {k: v for k, v in inputs.items() if k.startswith("encoder") or (subject.seq2seq and k == subject.reads)}
    ids = inputs[name]
    segments = inputs.get("token_type_ids")
    with torch.no_grad():
        expected = ours(**inputs).logits
        cache, pieces = None, []
        for piece in ((0, 5), (5, 6), (6, 10), (10, 12)):
            window = slice(*piece)
            output = ours(
                **{name: ids[:, window]},
                **({"token_type_ids": segments[:, window]} if segments is not None else {}),
                past_key_values=cache,
                use_cache=True,
                **encoder,
            )
            cache = output.past_key_values
            pieces.append(output.logits)
    assert_close(torch.cat(pieces, 1), expected, "in pieces")


def as_rows(subject: Subject, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of shape (B, choices, ...) as (B * choices, ...), as generation gives them."""
    return {name: x.flatten(0, 1) for name, x in inputs.items()} if subject.nested else inputs


def check_left_padding(subject: Subject, attn: str) -> None:
    """Positions shared over a batch make every shorter prompt go on differently than it does alone."""
    _, ours = generation_pair(subject, attn=attn)
    rows, batch = prompts(subject, ours.config)
    encoder = batch.get("encoder_hidden_states")
    for use_cache in (True, False):
        start = prompt_length(subject, batch[subject.reads])
        together = ours.generate(**batch, max_new_tokens=20, use_cache=use_cache)[:, start:]
        for i, row in enumerate(rows):
            extra = {} if encoder is None else {"encoder_hidden_states": encoder[i : i + 1]}
            alone = ours.generate(**as_prompt(subject, row), max_new_tokens=20, use_cache=use_cache, **extra)
            alone = alone[0, prompt_length(subject, row) :]
            assert torch.equal(together[i], alone), f"prompt of {row.shape[1]}, {use_cache=}"


def check_assisted(subject: Subject) -> None:
    """Assisted generation crops the cache; a model whose state does not follow gives other tokens."""
    stock, ours = generation_pair(subject)
    rows, _ = prompts(subject, ours.config)
    helpers = []
    for model in (stock, ours):
        helper = copy.deepcopy(model)
        with torch.no_grad():  # near enough that some proposals are accepted and some refused
            generator = torch.Generator().manual_seed(11)
            for parameter in helper.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        helpers.append(helper)
    common = {**as_prompt(subject, rows[-1]), "max_new_tokens": 16}
    plain_ = ours.generate(**common)
    ours_assisted = ours.generate(**common, assistant_model=helpers[1])
    assert torch.equal(ours_assisted, plain_)
    if not subject.case.stock_keeps_cache:
        assert torch.equal(plain_, stock.generate(**common))
        return
    assert torch.equal(ours_assisted, stock.generate(**common, assistant_model=helpers[0]))


@torch.no_grad()
def check_logits_to_keep(subject: Subject) -> None:
    """Trainers that need only the last logits would get those of other positions."""
    model = build(subject.ours, subject, **no_dropout(subject))
    inputs = as_rows(subject, subject.inputs(model.config, "right"))
    for train in (False, True):
        model.train(train)
        full = model(**inputs).logits
        assert torch.equal(model(**inputs, logits_to_keep=0).logits, full)
        assert_close(model(**inputs, logits_to_keep=3).logits, full[:, -3:], "the last three", 1e-6)
        chosen = torch.tensor([0, 4, 5])
        assert_close(model(**inputs, logits_to_keep=chosen).logits, full[:, chosen], "by index", 1e-6)


# --- 7: packed sequences, padding-free encoders -------------------------------------------------------------------


def check_packed(subject: Subject, attn: str) -> None:
    """Sequences in one row that see each other train on text that does not exist."""
    model = build(subject.ours, subject, attn=attn, **no_dropout(subject))
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 6, 1, 5, 5)
    vocab = model.config.vocab_size
    rows = [torch.randint(4, vocab, (n,), generator=generator) for n in lengths]
    features = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]

    labelled = sum(n - 1 for n in lengths)
    if subject.kind == "causal":
        model.eval()
        with torch.no_grad():
            separate = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
        model.train().zero_grad()
        total = sum(model(input_ids=row[None], labels=row[None]).loss * (len(row) - 1) for row in rows if len(row) > 1)
        expected = total / labelled
        expected.backward()
        reference = gradients(model)
    else:
        model.eval()
        with torch.no_grad():
            separate = torch.cat([model(input_ids=row[None])[0][0] for row in rows])

    for with_boundaries in (False, True):
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=with_boundaries)(features)
        what = "boundaries given" if with_boundaries else "positions restart"
        labels = batch.pop("labels")
        first = subject.case.first_position(model.config)
        batch["position_ids"] = batch["position_ids"] + first
        model.eval()
        with torch.no_grad():
            packed = model(**batch)
        assert_close(packed[0][0] if subject.kind != "causal" else packed.logits[0], separate, what)
        if subject.kind != "causal":
            continue
        model.train().zero_grad()
        loss = model(**batch, labels=labels).loss
        loss.backward()
        assert_close(loss, expected, f"{what}: loss")
        compare_gradients(gradients(model), reference, what)

    # Two rows, each with sequences of its own.
    ids = torch.cat(rows)[None].view(2, -1) if sum(lengths) % 2 == 0 else None
    assert ids is not None
    positions = torch.cat([torch.arange(first, first + n) for n in lengths]).view(2, -1)  # 3 6 1 | 5 5
    model.eval()
    with torch.no_grad():
        both = model(input_ids=ids, position_ids=positions)
    both = both.logits if subject.kind == "causal" else both[0]
    assert_close(both.flatten(0, 1), separate, "two packed rows")


def length_patterns() -> dict[str, Tensor]:
    """(B, T) masks that a packing could get wrong."""
    generator = torch.Generator().manual_seed(2)
    holes = (torch.rand(4, 9, generator=generator) < 0.6).long()
    holes[:, 0] = 1
    empty = torch.ones(4, 9, dtype=torch.long)
    empty[2] = 0
    empty[0, 3:] = 0
    single = torch.tensor([[1, 1, 1, 0, 0, 0]])
    ones = torch.zeros(3, 5, dtype=torch.long)
    ones[:, 0] = 1
    far = torch.zeros(3, 40, dtype=torch.long)
    for row, length in enumerate((40, 36, 2)):
        far[row, :length] = 1
    return {
        "right": padding_like("right"),
        "left": padding_like("left"),
        "holes": holes,
        "an empty row": empty,
        "one row": single,
        "one token each": ones,
        "one token in one row": torch.tensor([[1, 0, 0]]),
        "unequal lengths": far,
        "holes at the start": torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]),
        "boolean": padding_like("right").bool(),
    }


def padding_like(pattern: str) -> Tensor:
    """(4, 9) mask."""
    return padding_mask(pattern, 4, 9)


def check_padding_free(subject: Subject, attn: str) -> None:
    """Leaving padding out is only allowed to save time: same numbers at real tokens, same loss, same gradients."""
    model = build(subject.ours, subject, attn=attn, **no_dropout(subject))
    if subject.nested:
        patterns = {name: mask for name, mask in length_patterns().items() if mask.shape[0] in (1, 3)}
    else:
        patterns = length_patterns()
    if subject.seq2seq and attn == "eager":  # to nothing, eager attends evenly, padding included
        patterns.pop("an empty row")
    for name, mask in patterns.items():
        batch, tokens = mask.shape
        inputs = subject.inputs(model.config, "none", batch=batch if not subject.nested else 1, tokens=tokens)
        if subject.nested:
            inputs = {k: v[:, :batch] for k, v in inputs.items()}
            mask = mask[None]
        inputs = subject.masked(model.config, inputs, mask)
        labels = subject.labels(model.config, inputs)
        real = real_positions(inputs)
        outputs, steps = [], []
        for skip_padding in (True, False):
            model.config.skip_padding = skip_padding
            model.eval()
            with torch.no_grad():
                outputs.append(model(**inputs, output_hidden_states=True))
            steps.append(loss_and_gradients(model, subject, inputs, labels))
        compare_outputs(outputs[0], outputs[1], name, real)
        hidden = outputs[0]["encoder_hidden_states" if subject.seq2seq else "hidden_states"][-1]
        assert hidden[real].abs().sum() > 0 or not real.any()
        assert_close(steps[0][0], steps[1][0], f"{name}: loss")
        compare_gradients(steps[0][1], steps[1][1], name)


def check_padding_is_skipped(subject: Subject) -> None:
    """The promise that padding costs nothing would be void: the blocks must see real tokens only."""
    model = build(subject.ours, subject)
    inputs = subject.inputs(model.config, "right")
    seen = []
    block = model.base_model.blocks()[0]
    handle = block.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    with torch.no_grad():
        model(**inputs)
        model(**inputs, skip_padding=False)
        model(**{k: v for k, v in inputs.items() if k != "attention_mask"})
    handle.remove()
    mask = inputs["attention_mask"].flatten(0, -2)
    rows, tokens = mask.shape
    width = model.config.hidden_size
    assert seen == [(1, int(mask.sum()), width), (rows, tokens, width), (rows, tokens, width)]


# --- encoder-decoders ---------------------------------------------------------------------------------------------


@torch.no_grad()
def check_encoder_outputs(subject: Subject) -> None:
    """An encoder's output that is given must be used as it is, in every form that it is handed over in."""
    model = build(subject.ours, subject)
    inputs = subject.inputs(model.config, "right")
    recorded = {"output_hidden_states": True}
    expected = model(**inputs, **recorded)
    rest = {name: x for name, x in inputs.items() if name != subject.reads}
    encoded = model.get_encoder()(
        inputs[subject.reads], attention_mask=inputs.get("attention_mask"), return_dict=True, **recorded
    )
    calls = []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    for form in (encoded, (encoded.last_hidden_state, encoded.hidden_states), encoded.to_tuple()):
        compare_outputs(model(encoder_outputs=form, **rest, **recorded), expected, type(form).__name__, tolerance=0.0)
    alone = model(encoder_outputs=(encoded.last_hidden_state,), **rest)
    assert_close(alone[0], expected[0], "hidden states alone", 0.0)
    assert not calls
    assert isinstance(model(**inputs, return_dict=False), tuple)


@torch.no_grad()
def check_decoder_embeds(subject: Subject) -> None:
    """The decoder's embeddings passed in must mean the same as the ids they came from."""
    model = build(subject.ours, subject)
    inputs = subject.inputs(model.config, "right")
    expected = model(**inputs)
    embeddings = model.get_decoder().get_input_embeddings()(inputs.pop("decoder_input_ids"))
    compare_outputs(model(decoder_inputs_embeds=embeddings, **inputs), expected, "embeddings", tolerance=0.0)


def check_decoder_mask(subject: Subject) -> None:
    """Rows of the decoder with padding on either side must give what their real tokens give, cached or not."""
    stock, model = pair(subject)
    inputs = subject.inputs(model.config, "right")
    ids = inputs["decoder_input_ids"]
    for name, mask in (("right", padding_mask("right", *ids.shape)), ("holes", padding_mask("holes", *ids.shape))):
        inputs["decoder_attention_mask"] = mask
        other = inputs | {"decoder_input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id)}
        with torch.no_grad():
            expected, found = stock(**inputs), model(**inputs)
            assert_close(found[0], expected[0], name)
            assert_close(model(**other)[0][mask.bool()], found[0][mask.bool()], f"{name}, other pads")
            half = ids.shape[1] // 2
            parts = [inputs | {"decoder_input_ids": ids[:, :half], "decoder_attention_mask": mask[:, :half]}]
            first = model(**parts[0], use_cache=True)
            rest = inputs | {"decoder_input_ids": ids[:, half:]}
            second = model(**rest, past_key_values=first.past_key_values, use_cache=True)
        assert_close(torch.cat([first[0], second[0]], 1), found[0], f"{name}, in two parts")


def check_labels_are_shifted_once(subject: Subject) -> None:
    """Labels alone: a decoder that reads what it is to predict learns to copy, one that is two behind learns nothing
    of the next token; both losses go down."""
    stock, ours = pair(subject, **no_dropout(subject))
    inputs = subject.inputs(ours.config, "right")
    labels = subject.labels(ours.config, inputs)["labels"]
    labels[0, 2] = IGNORED
    for name in ("decoder_input_ids", "decoder_attention_mask"):
        inputs.pop(name)
    expected, reference = loss_and_gradients(stock, subject, inputs, {"labels": labels})
    loss, found = loss_and_gradients(ours, subject, inputs, {"labels": labels})
    assert_close(loss, expected, "labels alone")
    compare_gradients(found, reference, "labels alone")
    shifted = ours.prepare_decoder_input_ids_from_labels(labels)
    if hasattr(stock, "prepare_decoder_input_ids_from_labels"):
        assert torch.equal(shifted, stock.prepare_decoder_input_ids_from_labels(labels))
    both, _ = loss_and_gradients(ours, subject, {**inputs, "decoder_input_ids": shifted}, {"labels": labels})
    assert_close(both, expected, "the shifted labels given as well")
    ours.eval()
    with torch.no_grad():
        output = ours(**inputs, labels=labels)
        assert output.past_key_values is None
        plain_ = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert_close(plain_, expected, "from the logits")


# --- 8: gradient checkpointing ------------------------------------------------------------------------------------


def check_gradient_checkpointing(subject: Subject) -> None:
    """Recomputing a block with other dropout, another mask or a filled cache gives wrong gradients in silence."""
    model = build(subject.ours, subject, **subject.case.dropout)
    for padding in subject.patterns("none", "right"):
        inputs = subject.inputs(model.config, padding)
        labels = subject.labels(model.config, inputs)
        model.activation_checkpointing_disable()
        expected, reference = loss_and_gradients(model, subject, inputs, labels)
        for use_reentrant in (False, True):
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            calls = count_block_calls(model)
            loss, found = loss_and_gradients(model, subject, inputs, labels)
            what = f"{padding}, {use_reentrant=}"
            assert calls() == 2 * len(model.base_model.blocks()), f"{what}: blocks are not recomputed"
            assert_close(loss, expected, what, 1e-6)
            compare_gradients(found, reference, what, 1e-6)


def count_block_calls(model: nn.Module) -> Callable[[], int]:
    """Counts how often the blocks compute until the returned function is called."""
    count = 0

    def counted(module: nn.Module, args: tuple) -> None:
        nonlocal count
        count += 1

    def first(module: nn.Module) -> nn.Module:
        child = next(module.children())
        return first(child) if isinstance(child, nn.ModuleList) else child

    # A hook on the block itself stays outside the checkpoint; one on its first child is inside.
    handles = [first(block).register_forward_pre_hook(counted) for block in model.base_model.blocks()]

    def stop() -> int:
        for handle in handles:
            handle.remove()
        return count

    return stop


def check_cache_in_training(subject: Subject) -> None:
    """With checkpointing a block runs twice: an explicit cache would be filled twice, with wrong lengths."""
    model = build(subject.ours, subject, **no_dropout(subject))
    inputs = subject.inputs(model.config)
    labels = subject.labels(model.config, inputs)
    expected, reference = loss_and_gradients(model, subject, inputs, labels)
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        given = {**inputs, "past_key_values": DynamicCache(config=model.config)}
        loss, found = loss_and_gradients(model, subject, given, labels)
        assert_close(loss, expected, f"{checkpointing=}")
        compare_gradients(found, reference, f"{checkpointing=}")


# --- 9: Trainer ---------------------------------------------------------------------------------------------------


def trainer(
    model: nn.Module, rows: list[dict], *, batch: int = 8, accumulate: int = 1, collator: object = None, **arguments
) -> Trainer:
    """A quiet Trainer: plain SGD of rate 1 without clipping, so that weights show the gradient itself."""
    defaults = {
        "output_dir": str(scratch()),
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "max_steps": 1,
        "learning_rate": 1.0,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    trained = Trainer(
        model=model,
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=collator or default_data_collator,
    )
    trained.remove_callback(PrinterCallback)
    return trained


def training_rows(subject: Subject, config: object, count: int = 8, *, unequal: bool = True) -> list[dict]:
    """`count` padded rows with labels, of which rows have very unequal numbers if `unequal`."""
    # The same row lengths recur every four rows; the labels are thinned out below.
    inputs = subject.inputs(config, "right", batch=count)
    labels = subject.labels(config, inputs)
    if unequal and "labels" in labels and labels["labels"].dim() == 2:
        for row in range(count):
            labels["labels"][row, 1 + row :] = IGNORED
    return [{name: value[row] for name, value in {**inputs, **labels}.items()} for row in range(count)]


def collator_for(subject: Subject, rows_per_step: int) -> Callable[[list[dict]], dict] | None:
    """Pre-training heads are told how many rows the whole step has, for the loss that counts rows."""
    if subject.kind != "pretraining":
        return None
    return lambda rows: {**default_data_collator(rows), "num_sequences_in_batch": rows_per_step}


def check_accumulation(subject: Subject) -> None:
    """Gradient accumulation must not change the step: with a loss averaged per micro-batch, rows with few labels
    count for more, and a loss that ignores the number of labels of the step is several times too large."""
    reference = None
    for batch, accumulate in ((8, 1), (1, 8)):
        model = build(subject.ours, subject, **no_dropout(subject))
        rows = training_rows(subject, model.config)
        start = state(model)
        trainer(model, rows, batch=batch, accumulate=accumulate, collator=collator_for(subject, 8)).train()
        after = state(model)
        if reference is None:
            reference = after
            model = build(subject.ours, subject, **no_dropout(subject))
            _, expected = loss_and_gradients(model, subject, *split_batch(subject, rows))
            for name, gradient in expected.items():
                assert_close(start[name] - after[name], gradient, f"step of {name}")
        else:
            for name, value in reference.items():
                assert_close(after[name], value, f"{batch} rows, {accumulate} micro-batches: {name}")


def split_batch(subject: Subject, rows: list[dict]) -> tuple[dict, dict]:
    """Rows -> inputs and labels of one batch."""
    batch = default_data_collator(rows)
    known = ("labels", "mc_labels", "next_sentence_label", "start_positions", "end_positions", "bool_masked_pos")
    names = [n for n in batch if n in known]
    return {n: v for n, v in batch.items() if n not in names}, {n: batch[n] for n in names}


def check_resume(subject: Subject) -> None:
    """A run that was interrupted and resumed must end at the same weights as one that was not."""
    folder = str(scratch())
    arguments = {
        "output_dir": folder,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 3,
        "max_grad_norm": 1.0,
    }

    def run(resume: bool) -> dict[str, Tensor]:
        model = build(subject.ours, subject, **subject.case.dropout)
        rows = training_rows(subject, model.config, 12)
        runner = trainer(model, rows, batch=4, **arguments)
        runner.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
        return state(model)

    straight, resumed = run(False), run(True)
    assert_identical(resumed, straight, "resumed")
    start = state(build(subject.ours, subject))
    assert any(not torch.equal(start[n], straight[n]) for n in start)
    # The checkpoint is what from_pretrained reads, and the best model is found again.
    with no_warning():
        model = subject.ours.from_pretrained(f"{folder}/checkpoint-6")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, straight[name]), name


def check_evaluate(subject: Subject) -> None:
    """Without labels in the signature, the Trainer finds no eval loss and best-model selection fails."""
    assert find_labels(subject.ours) == find_labels(subject.stock)
    stock, bare = pair(subject, **no_dropout(subject))
    rows = training_rows(subject, bare.config)
    wrapped = get_peft_model(
        build(subject.ours, subject, **no_dropout(subject)), LoraConfig(r=2, target_modules="all-linear")
    )
    expected = trainer(stock, rows, batch=8).predict(rows)
    # Not the loss that Trainer reports for the stock class: it divides BertLMHeadModel's by unshifted labels.
    inputs, labels = split_batch(subject, rows)
    with torch.no_grad():
        reads_padding = "right" not in subject.comparable_paddings("right", attn="sdpa")
        loss = (bare if reads_padding else stock)(**inputs, **labels).loss.item()
    for name, model in (("bare", bare), ("LoRA", wrapped)):
        runner = trainer(model, rows, batch=8)
        metrics = runner.evaluate()
        assert abs(metrics["eval_loss"] - loss) < TOLERANCE, name
        predicted = runner.predict(rows)
        compared = [predicted.predictions, expected.predictions]
        compared = [x if isinstance(x, tuple) else (x,) for x in compared]
        assert len(compared[0]) == len(compared[1]), name
        real = real_positions(inputs)
        for mine, reference in zip(*(map(torch.as_tensor, x) for x in compared), strict=True):
            if real is not None:
                mine, reference = at_real_positions(mine, real), at_real_positions(reference, real)
            assert_close(mine, reference, f"{name}: predictions")


# --- 10: buffers, ties, resizing ----------------------------------------------------------------------------------


@contextlib.contextmanager
def dirty_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or absurd integers, as it may in a process that has run for a while."""
    junk = [torch.full((1 << 20,), float("nan")) for _ in range(4)]
    del junk
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}

    def dirty(original: Callable) -> Callable:
        @functools.wraps(original)
        def make(*args: object, **kwargs: object) -> Tensor:
            tensor = original(*args, **kwargs)
            if tensor.device.type != "meta":
                with torch.no_grad():
                    if tensor.is_floating_point():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype in (torch.int32, torch.int64):
                        tensor.fill_(1 << 30)
            return tensor

        return make

    for name, original in originals.items():
        setattr(torch, name, dirty(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def check_reload(subject: Subject) -> None:
    """What no file holds must be computed when loading: otherwise buffers are whatever was in memory before."""
    seed_torch(0)
    built = subject.ours(subject.our_config(**subject.fields))
    with torch.no_grad():
        for i, (name, parameter) in enumerate(built.named_parameters()):
            if name not in (built._keys_to_ignore_on_save or ()):
                parameter.fill_(0.1 * (i + 1))  # a value that no initialisation gives
    folder = scratch()
    built.save_pretrained(folder)
    with dirty_memory(), no_warning():
        loaded, info = subject.ours.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_identical(state(loaded), state(built), "reloaded")

    with torch.device("meta"):
        late = subject.ours(subject.our_config(**subject.fields))
    with dirty_memory():
        late = late.to_empty(device="cpu")
    late.initialize_weights()
    late.tie_weights()
    expected = dict(built.named_buffers())
    assert_identical(dict(late.named_buffers()), expected, "buffers of a model built on the meta device")
    for name, parameter in late.named_parameters():
        assert parameter.isfinite().all(), f"{name} was not initialised"
    missing = "a missing tensor is initialised, the rest is kept"
    weights = load_file(folder / "model.safetensors")
    dropped = sorted(weights)[len(weights) // 2]
    if len(weights) > 1:
        kept = {n: t for n, t in weights.items() if n != dropped}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with dirty_memory():
            partial, info = subject.ours.from_pretrained(folder, output_loading_info=True)
        assert info["missing_keys"] == {dropped}, missing
        assert_identical({n: partial.state_dict()[n] for n in kept}, kept, missing)
        assert partial.state_dict()[dropped].isfinite().all(), missing


def check_base_into_head(subject: Subject) -> None:
    """A head over a pretrained base model must keep the base model; only the head itself is new."""
    base = base_subject(subject.model_type)
    fields = {k: v for k, v in subject.fields.items() if base.fields.get(k, None) != v}
    folder = scratch()
    seed_torch(0)
    model = base.ours(base.our_config(**{**base.fields, **fields}))
    randomise(model, seed=4)
    model.save_pretrained(folder)
    config = subject.our_config(**subject.fields)
    with dirty_memory():
        head, info = subject.ours.from_pretrained(folder, config=config, output_loading_info=True)
    stock_config = subject.stock_config(**subject.fields)
    export = scratch() / "export"
    write_official(model, export)
    _, reference = subject.stock.from_pretrained(export, config=stock_config, output_loading_info=True)
    assert set(info["missing_keys"]) == {subject.stock_name(name) for name in reference["missing_keys"]}
    assert info["unexpected_keys"] <= reference["unexpected_keys"]  # ours may know that they are another part's
    assert not info["mismatched_keys"]
    prefix = subject.ours.base_model_prefix
    loaded = head.state_dict()
    compared = 0
    for name, value in load_file(folder / "model.safetensors").items():
        inside = subject.kind not in BASES and name not in loaded and hasattr(head, prefix)
        full = f"{prefix}.{name}" if inside else name
        if full in loaded:
            assert torch.equal(loaded[full], value), f"{full} changed"
            compared += 1
    assert compared >= len(loaded) / 2
    for name, parameter in head.named_parameters():
        assert parameter.isfinite().all(), f"{name} was not initialised"


def check_ties(subject: Subject) -> None:
    """A tie that is silently missing doubles the parameters and trains the two halves apart."""
    for tie in (True, False):
        fields = {**subject.fields, "tie_word_embeddings": tie}
        model = subject.ours(subject.our_config(**fields))
        stock = subject.stock(subject.stock_config(**fields))
        folder, stock_path = scratch(), scratch()
        model.save_pretrained(folder)
        stock.save_pretrained(stock_path)
        names = set(load_file(folder / "model.safetensors"))
        if tie or not subject.case.stock_always_ties:
            assert names == set(load_file(stock_path / "model.safetensors")), f"{tie=}"
        with no_warning():
            loaded, info = subject.ours.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), f"{tie=}: {info}"
        for candidate in (model, loaded):
            for target, source in (candidate._tied_weights_keys or {}).items():
                one, other = candidate.get_parameter(target), candidate.get_parameter(source)
                tied = tie or subject.always_tied(target)
                assert (one is other) == tied, f"{target} and {source}, {tie=}"
                assert (target in names and source in names) == (not tied), f"copies in the file, {tie=}"


def check_resize(subject: Subject) -> None:
    """After new tokens are added or removed, embedding, head, bias, configuration and ties must agree."""
    for tie in (True, False):
        fields = {**subject.fields, "tie_word_embeddings": tie, **no_dropout(subject)}
        model = subject.ours(subject.our_config(**fields)).eval()
        randomise(model, seed=6)
        model.tie_weights()
        vocab = model.config.vocab_size
        inputs = subject.inputs(model.config, "right")
        for ids in (name for name in ("input_ids", "decoder_input_ids") if name in inputs):
            inputs[ids] = inputs[ids].clamp(max=vocab - 10)
        with torch.no_grad():
            before = model(**inputs)
        table = model.get_input_embeddings().weight.detach().clone()
        sizes = []
        for step, (tokens, multiple) in enumerate(((vocab + 3, None), (vocab - 3, None), (vocab - 2, 8))):
            model.resize_token_embeddings(tokens, pad_to_multiple_of=multiple, mean_resizing=step == 0)
            size = tokens if multiple is None else -(-tokens // multiple) * multiple
            sizes.append(size)
            what = f"{vocab} -> {size}, {tie=}"
            assert model.config.vocab_size == size, what
            weight = model.get_input_embeddings().weight
            assert weight.shape[0] == size, what
            kept = min([vocab, *sizes])
            assert torch.equal(weight[:kept], table[:kept]), what
            output = model.get_output_embeddings()
            if output is not None:
                assert output.weight.shape[0] == output.out_features == size, what
                assert output.bias is None or output.bias.shape[0] == size, what
                for target, source in model._tied_weights_keys.items():
                    if not tie and target.endswith("bias"):
                        continue  # the stock class joins them here, and so do we
                    tied = tie or subject.always_tied(target)
                    assert (model.get_parameter(target) is model.get_parameter(source)) == tied, f"{what}: {target}"
            with torch.no_grad():
                after = model(**inputs)
            for name, value in tensors_of(before).items():
                reached = tensors_of(after)[name]
                if value.shape[-1] == vocab:
                    assert reached.shape[-1] == size, what
                    reached, value = reached[..., :kept], value[..., :kept]
                assert_close(reached, value, f"{what}: {name}")
            labels = subject.labels(model.config, inputs)
            _, found = loss_and_gradients(model, subject, inputs, labels)
            assert all(g.isfinite().all() for g in found.values()), what
            model.eval()
        folder = scratch()
        model.save_pretrained(folder)
        with no_warning():
            again, info = subject.ours.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert_identical(state(again), state(model), "saved after resizing")
        export = scratch() / "export"
        write_official(model, export)
        allow = ("we will NOT tie",) if subject.case.stock_always_ties else ()
        with no_warning(allow), torch.no_grad():
            stock = subject.stock.from_pretrained(export).eval()
            actual = model(**inputs, skip_padding=False)
            compare_outputs(
                actual,
                stock(**inputs, **subject.as_stock),
                "exported after resizing",
                subject.compared(inputs, "right"),
            )


def reads_folders(architecture: hf_ext.Architecture) -> list[str]:
    """The Auto classes that load a folder: AutoBackbone takes repositories of the Hub only."""
    return [auto for auto in architecture.heads if auto != "AutoBackbone"]


def check_keys_are_stable(subject: Subject) -> None:
    """Names that change with every save end in a checkpoint that nothing loads."""
    autos = [
        getattr(transformers, a)
        for a in reads_folders(subject.architecture)
        if subject.architecture.heads[a] == subject.class_name
    ]
    config = subject.our_config(**subject.fields)
    model = autos[0].from_config(config) if autos else subject.ours(config)
    assert type(model) is subject.ours
    sets = []
    for _ in range(2):
        folder = scratch()
        model.save_pretrained(folder)
        sets.append(set(load_file(folder / "model.safetensors")))
        model = (autos[0] if autos else subject.ours).from_pretrained(folder)
        assert type(model) is subject.ours
    assert sets[0] == sets[1]
    assert sets[0] == set(subject.used(load_file(stock_folder(subject) / "model.safetensors")))


def check_legacy_keys(subject: Subject) -> None:
    """Old official files name some tensors differently, or hold buffers; they are still on the Hub."""
    source = stock_folder(subject)
    folder = scratch()
    weights = load_file(source / "model.safetensors")
    old = subject.case.legacy_keys(subject.used(weights))
    assert old.keys() != weights.keys()
    save_file(old, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    with no_warning():
        model, info = subject.ours.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert_identical(state(model), state(subject.ours.from_pretrained(source)), "old names")


# --- 11: initial values -------------------------------------------------------------------------------------------


def check_initial_values(subject: Subject) -> None:
    """Training from scratch starts from the distribution that the architecture was tuned for."""
    fields = {**subject.fields, **subject.case.wide, "initializer_range": 0.05}
    models = []
    for seed, (cls, config_class) in enumerate(
        ((subject.stock, subject.stock_config), (subject.ours, subject.our_config))
    ):
        seed_torch(seed)
        overrides = {"num_labels": 2} if subject.kind == "span" else {}
        models.append(cls(config_class(**{**fields, **overrides})))
    reference = subject.used({subject.stock_name(n): p for n, p in models[0].named_parameters()})
    found = dict(models[1].named_parameters())
    assert found.keys() == reference.keys()
    for name, expected in reference.items():
        value, expected = found[name].detach().double(), expected.detach().double()
        assert value.shape == expected.shape, name
        assert torch.equal(value == 0, expected == 0), f"{name}: zeros are elsewhere"
        count, spread = expected.numel(), expected.std().item() if expected.numel() > 1 else 0.0
        if spread == 0.0 or count == 1:
            assert torch.equal(value, expected), f"{name} is not constant {expected.flatten()[0]}"
            continue
        # Six standard errors of a difference of two samples; the seeds are fixed, so this does not flicker.
        assert abs(value.mean() - expected.mean()) < 6 * spread * math.sqrt(2 / count), f"{name}: mean"
        assert abs(value.std() / spread - 1) < 6 / math.sqrt(count), f"{name}: {value.std()} instead of {spread}"


# --- 12: adapters -------------------------------------------------------------------------------------------------

PEFT_WARNINGS = (
    "is_gradient_checkpointing",  # PEFT asks under the old name
    "fan_in_fan_out",  # PEFT finds out by itself that a layer is a Conv1D, and says so
)
TASKS = {
    "causal": "CAUSAL_LM",
    "aligned": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
    "row": "SEQ_CLS",
    "token": "TOKEN_CLS",
    "span": "QUESTION_ANS",
}


def adapter(subject: Subject, **options: object) -> LoraConfig:
    """LoRA with the default targets; its second matrix starts at random values, so that it does something."""
    task = None if subject.is_speech else TASKS.get(subject.kind)  # PEFT's seq2seq wrapper knows token ids only
    return LoraConfig(r=4, lora_alpha=8, task_type=task, init_lora_weights=False, **options)


def stock_adapter(subject: Subject) -> LoraConfig:
    """The same adapter for the stock class."""
    case = subject.case
    return adapter(subject, target_modules=case.stock_adapter_targets or case.adapter_targets)


@torch.no_grad()
def settle(model: nn.Module, rename: Callable[[str], str] = str) -> None:
    """Random values in all trainable parameters."""
    generator = torch.Generator().manual_seed(8)
    named = {rename(name): parameter for name, parameter in model.named_parameters()}
    for _, parameter in sorted(named.items()):  # by name: the order of registration may differ
        if parameter.requires_grad:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def check_lora(subject: Subject) -> None:
    """Adapters are found by module names and saved under them: a name of our own would cut us off from all others."""
    stock, ours = pair(subject, **no_dropout(subject))
    inputs = subject.inputs(ours.config, "right")
    if subject.kind == "span":
        inputs.pop("token_type_ids", None)  # PEFT's own wrapper for question answering does not pass them on
    labels = subject.labels(ours.config, inputs)
    with torch.no_grad():
        untouched = ours(**inputs)
    with no_warning(PEFT_WARNINGS):
        tuned, official = get_peft_model(ours, adapter(subject)), get_peft_model(stock, stock_adapter(subject))
    names = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (tuned, official)]
    rename = subject.stock_name
    assert names[0] == {rename(name) for name in names[1]}
    assert any("lora_A" in n for n in names[0])

    before = state(tuned)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.05)
    loss, found = loss_and_gradients(tuned, subject, inputs, labels)
    optimizer.step()
    reached = {n for n in names[0] if not any(re.search(pattern, n) for pattern in subject.head.without_gradient)}
    assert found.keys() == reached, "adapter parameters without a gradient"
    changed = {n for n, value in state(tuned).items() if not torch.equal(value, before[n])}
    # A gradient near zero (a bias that softmax does not see) may vanish when it is added.
    assert {n for n, g in found.items() if g.abs().max() > 1e-5} <= changed <= found.keys()
    assert len(changed) > len(found) / 2
    assert loss_of(tuned, subject, inputs, labels) < loss, "one step does not lower the loss"
    tuned.eval()
    settle(tuned)
    settle(official, rename)
    official.eval()
    with torch.no_grad():
        expected, reference = tuned(**inputs), official(**inputs)
    real = real_positions(inputs)
    compare_outputs(expected, reference, "with the same adapter", real)
    first = next(iter(tensors_of(expected)))
    changed_by = (tensors_of(expected)[first] - tensors_of(untouched)[first]).abs().max()
    assert changed_by > 1e-3, "the adapter does nothing"

    folders = [scratch(), scratch()]
    tuned.save_pretrained(folders[0])
    official.save_pretrained(folders[1])
    saved = [set(load_file(folder / "adapter_model.safetensors")) for folder in folders]
    assert saved[0] == {rename(name) for name in saved[1]}
    across = [
        (subject.ours, folders[1], "the stock adapter in ours"),
        (subject.stock, folders[0], "our adapter in the stock class"),
    ]
    if subject.case.stock_adapter_targets is not None:
        across = []
    for cls, folder, name in [(subject.ours, folders[0], "ours reloaded"), *across]:
        with no_warning(PEFT_WARNINGS), torch.no_grad():
            loaded = PeftModel.from_pretrained(build(cls, subject, **no_dropout(subject)), folder).eval()
            compare_outputs(loaded(**inputs), expected, name, real)
    with torch.no_grad():
        merged = tuned.merge_and_unload().eval()
        assert type(merged) is subject.ours
        compare_outputs(merged(**inputs), expected, "merged", real)
        export = scratch() / "export"
        write_official(merged, export)
        compare_outputs(subject.stock.from_pretrained(export).eval()(**inputs), expected, "merged and exported", real)


def check_lora_with_checkpointing(subject: Subject) -> None:
    """With frozen embeddings nothing that enters the first block needs a gradient; adapters must still get theirs."""
    results = []
    for checkpointing in (None, False, True):
        model = get_peft_model(build(subject.ours, subject, **no_dropout(subject)), adapter(subject))
        settle(model)
        if checkpointing is not None:
            model.base_model.model.activation_checkpointing_enable({"use_reentrant": checkpointing})
        inputs = subject.inputs(model.config, "right")
        results.append(loss_and_gradients(model, subject, inputs, subject.labels(model.config, inputs)))
    for name, (loss, found) in zip(("not reentrant", "reentrant"), results[1:], strict=True):
        assert_close(loss, results[0][0], name)
        compare_gradients(found, results[0][1], name)


# --- 13: quantisation ---------------------------------------------------------------------------------------------


HEADS_OF_THEIR_OWN = (
    "row",
    "token",
    "span",
    "choice",
    "image_row",
    "speech_row",
)  # a new head over a pretrained base model


def nf4(**more: object) -> BitsAndBytesConfig:
    """QLoRA's 4-bit layers, computing in fp32 to be comparable."""
    precise = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return BitsAndBytesConfig(load_in_4bit=True, **precise, **more)


def check_quantised(subject: Subject, bits: int) -> None:
    """Quantising the head or a tied matrix costs quality; quantising less than the stock class costs memory."""
    import bitsandbytes

    fields = {**subject.fields, **subject.case.wide, **no_dropout(subject)}
    if subject.kind == "span":
        fields["num_labels"] = 2
    seed_torch(0)
    source = subject.stock(subject.stock_config(**fields))
    randomise(source)
    folder = scratch()
    source.save_pretrained(folder)
    options = nf4() if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
    comparable = subject.case.stock_quantises
    models = []
    for cls in (subject.stock, subject.ours) if comparable else (subject.ours,):
        with no_warning(allow=("MatMul8bitLt",)):
            models.append(cls.from_pretrained(folder, quantization_config=options, dtype=torch.float32).eval())
    stock, ours = models[0], models[-1]
    quantised = [{n for n, m in model.named_modules() if isinstance(m, kinds)} for model in (stock, ours)]
    if comparable:  # the pattern may end with the dot that follows a module in a parameter's name
        quantised[0] = {subject.stock_name(f"{n}.").removesuffix(".") for n in quantised[0]}
    # The stock classes quantise a classifier with a bias, which neither trains nor can be replaced by PEFT.
    inside = (f"{subject.ours.base_model_prefix}.",)
    if not hasattr(ours, subject.ours.base_model_prefix):  # its modules stand beside the head
        base = base_subject(subject.model_type)
        inside = tuple(f"{name}." for name, _ in base.ours(base.our_config(**base.fields)).named_children())
    heads = {n for n in quantised[0] if not n.startswith(inside)} if subject.kind in HEADS_OF_THEIR_OWN else set()
    if not comparable:
        quantised[0] = {n for n, m in source.named_modules() if isinstance(m, nn.Linear) and n.startswith(inside)}
    assert quantised[1] == quantised[0] - heads
    assert len(quantised[1]) >= 4 * len(ours.base_model.blocks())
    head = ours.get_output_embeddings()
    assert head is None or not isinstance(head, kinds)
    inputs = subject.inputs(ours.config, "right")
    with torch.no_grad():
        if comparable and not heads:
            expected = stock(**inputs, **subject.as_stock)
            tolerance = subject.case.eight_bit_tolerance if bits == 8 else TOLERANCE
            actual = ours(**inputs, skip_padding=False)
            compare_outputs(actual, expected, f"{bits} bit", subject.compared(inputs, "right"), tolerance)
            real = real_positions(inputs)
            compare_outputs(ours(**inputs), expected, f"{bits} bit, padding left out", real, tolerance)
        full = subject.ours.from_pretrained(folder, dtype=torch.float32)
        compared = 0
        for name in quantised[1]:  # layer by layer: over layers of random weights any error grows
            layer, reference = ours.get_submodule(name), full.get_submodule(name)
            if bits == 4 and layer.in_features % layer.weight.blocksize:
                continue  # with AVX512, bitsandbytes 0.50 takes a neighbour's scale where a block ends within a row
            compared += 1
            x = torch.randn(32, 1, layer.in_features)
            expected = reference(x) - reference(torch.zeros_like(x))
            error = (layer(x) - reference(x)).norm() / expected.norm()
            # Of weights and inputs that are normally distributed NF4 gives 0.09, and integers of 8 bits 0.01.
            assert 0 < error < (0.15 if bits == 4 else 0.02), f"{name}: {error:.3f} of fp32's values"
        assert compared
    ours = prepare_model_for_kbit_training(ours, use_gradient_checkpointing=False)
    tuned = get_peft_model(ours, adapter(subject))
    labels = subject.labels(ours.config, inputs)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.01)
    loss, found = loss_and_gradients(tuned, subject, inputs, labels)
    assert found and all(g.isfinite().all() for g in found.values())
    assert sum(g.abs().sum() for g in found.values()) > 0
    optimizer.step()
    assert loss_of(tuned, subject, inputs, labels) < loss


# --- 14: export and compile ---------------------------------------------------------------------------------------


@torch.no_grad()
def check_export(subject: Subject) -> None:
    """A graph that was traced for one shape, or with padding decided at trace time, gives wrong answers later."""
    model = build(subject.ours, subject)
    model.config.use_cache = False
    for padding in subject.patterns("none", "right"):
        sample = subject.inputs(model.config, padding, batch=3, tokens=8)
        # The classifiers of encoder-decoders shift the ids: of two tokens one is left, which torch traces by itself.
        least = 3 if subject.seq2seq and subject.kind == "row" else 2
        batch, tokens = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("tokens", min=least, max=32)
        decoder_tokens = torch.export.Dim("decoder_tokens", min=2, max=32)
        shapes = {}
        for name, value in sample.items():
            not_of_tokens = ("encoder_hidden_states", "encoder_attention_mask", "mc_token_ids", "question_lengths")
            if name in (*not_of_tokens, "pixel_values", "input_features"):
                shapes[name] = {0: batch}
            elif name.startswith("decoder_"):
                shapes[name] = {0: batch, value.dim() - 1: decoder_tokens}
            else:
                shapes[name] = {0: batch, value.dim() - 1: tokens}
        program = torch.export.export(model, (), sample, dynamic_shapes=shapes, strict=False).module()
        for pattern in (padding,) if padding == "none" else ("right", "left", "ones"):
            for rows, length in ((3, 8), (2, 11)):
                inputs = subject.inputs(model.config, pattern, batch=rows, tokens=length, seed=rows)
                for name in sample.keys() - inputs.keys():  # global tokens are given in some patterns only
                    inputs[name] = torch.zeros_like(inputs["input_ids"])
                what = f"traced {padding}, {pattern}, {rows} x {length}"
                compare_outputs(program(**inputs), model(**inputs, skip_padding=False), what)


def check_compile(subject: Subject, backend: str = "eager") -> None:
    """A break in the graph, or a new graph for every length, makes compilation slower than none."""
    model = build(subject.ours, subject, **no_dropout(subject))
    graphs = 0

    def counting(graph: object, inputs: list) -> Callable:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    # Of images the batch alone varies; what follows from their size, as Swin's windows, is slow to trace for any size.
    dynamic = None if subject.is_image else True
    backend = counting if backend == "eager" else backend
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
    model.config.use_cache = False
    for padding in subject.patterns("none", "ones", "right"):
        for step, (rows, length) in enumerate(((4, 9), (3, 7), (2, 11))):
            inputs = subject.inputs(model.config, padding, batch=rows, tokens=length, seed=rows)
            if subject.is_image:
                torch._dynamo.mark_dynamic(inputs["pixel_values"], 0)
            before = graphs
            with torch.no_grad():
                actual = compiled(**inputs)
                expected = model(**inputs, skip_padding=False)
            compare_outputs(actual, expected, f"{padding}, {rows} x {length}")
            assert step == 0 or graphs == before, f"{padding}: compiled again for {rows} x {length}"
    if subject.kind not in BASES:
        inputs = subject.inputs(model.config, "right")
        labels = subject.labels(model.config, inputs)
        expected, reference = loss_and_gradients(model, subject, inputs, labels)
        loss, _ = loss_and_gradients(compiled, subject, inputs, labels)
        assert_close(loss, expected, "compiled loss")
        compare_gradients(gradients(model), reference, "compiled training step")


# --- 15: Auto classes, pipelines ----------------------------------------------------------------------------------

SENTENCES = "the a cat dog sat ran on under mat tree . and then it was very big small red blue one two three"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words of one line, with the special tokens that encoders and decoders need."""
    special = ["[PAD]", "<s>", "</s>", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *SENTENCES.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        unk_token="[UNK]",
        model_max_length=32,
    )


def image_processor(subject: Subject) -> BaseImageProcessor | None:
    """The stock image processor of the type, for images of the configured size; None where it has none."""
    if subject.stock_config not in IMAGE_PROCESSOR_MAPPING:
        return None
    found = IMAGE_PROCESSOR_MAPPING[subject.stock_config]
    found = found["pil"] if isinstance(found, dict) else found
    height, width = sides(subject.fields.get("vision_config", subject.fields)["image_size"])
    return found(size={"height": height, "width": width}, do_center_crop=False)


def feature_extractor(subject: Subject) -> SequenceFeatureExtractor:
    """The stock feature extractor of the type: a second is as many frames as the configuration has."""
    config = subject.our_config(**subject.fields)
    hop = 16_000 // (2 * config.max_source_positions)
    return FEATURE_EXTRACTOR_MAPPING[subject.stock_config](config.num_mel_bins, hop_length=hop, chunk_length=1)


def ours_and_official_folders(subject: Subject) -> tuple[Path, Path]:
    """One model with a tokenizer or image processor, saved as ours and exported as official."""
    takes_images = subject.is_image or subject.kind == "pair"
    special = {} if takes_images else {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = subject.ours(subject.our_config(**{**subject.fields, **special})).eval()
    randomise(model, seed=9)
    model.tie_weights()
    if subject.generates:
        model.generation_config.pad_token_id = 0
    tokenizer = image_processor(subject) if takes_images else tiny_tokenizer()
    ours, official = scratch(), scratch() / "export"
    model.save_pretrained(ours)
    if tokenizer is not None:
        tokenizer.save_pretrained(ours)
    write_official(model, official, tokenizer=tokenizer)
    if subject.is_speech:
        for folder in (ours, official):
            feature_extractor(subject).save_pretrained(folder)
    return ours, official


def check_auto_classes(model_type: str) -> None:
    """Scripts and pipelines name no class of ours: the Auto classes must find them all, and still find the stock ones
    for official folders."""
    architecture = hf_ext.architectures()[model_type]
    for auto, class_name in architecture.heads.items():
        subject = next(s for s in subjects(configs="one") if s.class_name == class_name)
        ours, official = ours_and_official_folders(subject)
        auto_class = getattr(transformers, auto)
        with no_warning():
            assert type(auto_class.from_config(AutoConfig.from_pretrained(ours))) is subject.ours, auto
            if auto not in reads_folders(architecture):
                continue
            assert type(auto_class.from_pretrained(ours)) is subject.ours, auto
            with hf_ext.takeover():
                assert type(auto_class.from_pretrained(official)) is subject.ours, f"{auto} in a takeover"
            if subject.stock_config in auto_class._model_mapping:  # ours may be reached by more Auto classes
                found = type(auto_class.from_pretrained(official))
                stock = getattr(transformers, class_name.removeprefix("Ext"), subject.stock)
                assert found is stock, f"{auto} after a takeover"
    assert type(AutoConfig.from_pretrained(ours)) is subject.our_config
    if subject.is_image or subject.kind == "pair":
        if image_processor(subject) is None:
            return
        found = [type(AutoImageProcessor.from_pretrained(folder)) for folder in (ours, official)]
        assert found[0] is found[1] is type(image_processor(subject))
        return
    if subject.is_speech:
        found = [type(AutoFeatureExtractor.from_pretrained(folder)) for folder in (ours, official)]
        assert found[0] is found[1] is type(feature_extractor(subject))
    tokenizer = tiny_tokenizer()
    assert AutoTokenizer.from_pretrained(ours)("the cat").input_ids == tokenizer("the cat").input_ids
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    official_tokenizer = TOKENIZER_MAPPING.get(subject.stock_config, None)
    assert TOKENIZER_MAPPING.get(subject.our_config, None) == official_tokenizer


PIPELINES = {
    "masked": ("fill-mask", "the [MASK] sat on the mat"),
    "row": ("text-classification", "the cat sat"),
    "token": ("token-classification", "the cat sat on the mat"),
    "causal": ("text-generation", "the cat sat on"),
    "aligned": ("text-generation", "the cat sat on"),
    "base": ("feature-extraction", "the cat sat"),
}


def flat(value: object) -> list:
    """Nested lists and dictionaries -> one list of what they hold."""
    if isinstance(value, dict):
        return [x for name in sorted(value) for x in flat(value[name])]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in flat(item)]
    if hasattr(value, "tolist"):
        return flat(value.tolist())
    return [value]


def pipeline(subject: Subject, task: str, folder: Path, *, repaired: bool) -> transformers.Pipeline:
    """The library's pipeline over a folder; with the case's repaired stock class where it has one."""
    model, tokenizer = str(folder), None
    if repaired and subject.class_name in subject.case.stock_classes:
        model, tokenizer = subject.stock.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


def check_pipeline(subject: Subject) -> None:
    """A pipeline that refuses the class, warns about it, or gives another result than with the stock class."""
    ours, official = ours_and_official_folders(subject)
    task, text = PIPELINES[subject.kind]
    ends = " </s>" if subject.seq2seq and task == "text-classification" else ""  # the label is read from it
    texts = [
        text + ends,
        "a dog ran" + ends,
        "it was very big and then it was very small" + (" [MASK]" * (task == "fill-mask")) + ends,
    ]
    if task == "fill-mask":
        texts[1] += " [MASK]"
    options = {"max_new_tokens": 6, "do_sample": False} if task == "text-generation" else {}
    results = []
    # Features are returned for padding as well, where ours are zero; one text at a time has none.
    size = 1 if subject.kind == "base" else 3
    for folder in (ours, official):
        with no_warning() if folder == ours else contextlib.nullcontext():  # what stock classes say is theirs
            pipe = pipeline(subject, task, folder, repaired=folder == official)
            results.append(flat([pipe(texts[0], **options), pipe(texts, batch_size=size, **options)]))
    assert len(results[0]) == len(results[1]) > 2
    for mine, reference in zip(*results, strict=True):
        if isinstance(reference, float):
            assert abs(mine - reference) <= TOLERANCE * max(1.0, abs(reference))
        else:
            assert mine == reference


def check_speech_pipeline(subject: Subject) -> None:
    """A pipeline that refuses the class, warns about it, or gives another result than with the stock class."""
    ours, official = ours_and_official_folders(subject)
    generator = torch.Generator().manual_seed(4)
    clips = [0.3 * torch.randn(n, generator=generator).numpy() for n in (16_000, 9_000)]
    results = []
    for folder in (ours, official):
        with no_warning() if folder == ours else contextlib.nullcontext():
            pipe = transformers.pipeline("audio-classification", model=str(folder), device="cpu")
            results.append(flat([pipe(clips[0].copy()), pipe([clip.copy() for clip in clips], batch_size=2)]))
    assert len(results[0]) == len(results[1]) > 2
    for mine, reference in zip(*results, strict=True):
        if isinstance(reference, float):
            assert abs(mine - reference) <= TOLERANCE * max(1.0, abs(reference))
        else:
            assert mine == reference


IMAGE_PIPELINES = {"image_row": "image-classification", "image": "image-feature-extraction"}


def check_image_pipeline(subject: Subject) -> None:
    """A pipeline that refuses the class, warns about it, or gives another result than with the stock class."""
    ours, official = ours_and_official_folders(subject)
    pixels = torch.randint(256, (3, 20, 30, 3), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)
    images = [PIL.Image.fromarray(image.numpy()) for image in pixels]
    results = []
    for folder in (ours, official):
        with no_warning() if folder == ours else contextlib.nullcontext():
            pipe = transformers.pipeline(IMAGE_PIPELINES[subject.kind], model=str(folder), device="cpu")
            results.append(flat([pipe(images[0]), pipe(images, batch_size=3)]))
    assert len(results[0]) == len(results[1]) > 2
    for mine, reference in zip(*results, strict=True):
        if isinstance(reference, float):
            assert abs(mine - reference) <= TOLERANCE * max(1.0, abs(reference))
        else:
            assert mine == reference


# --- 16: every parameter is trained -------------------------------------------------------------------------------


def check_every_parameter_is_trained(subject: Subject) -> None:
    """A parameter that no loss reaches stops distributed training, or is a module that was never wired in."""
    stock, ours = pair(subject, **no_dropout(subject))
    inputs = subject.inputs(ours.config, "right")
    labels = subject.labels(ours.config, inputs)
    missing = []
    for model, rename in ((stock, subject.stock_name), (ours, str)):
        loss_and_gradients(model, subject, inputs, labels)
        missing.append(set(subject.used({rename(n): 0 for n, p in model.named_parameters() if p.grad is None})))
    allowed = subject.head.without_gradient
    if not getattr(ours.config, "tie_word_embeddings", True):
        allowed += subject.head.unused_when_untied
    assert missing[0] == missing[1], "other parameters without a gradient than in the stock class"
    unknown = [n for n in missing[1] if not any(re.fullmatch(pattern, n) for pattern in allowed)]
    assert not unknown, f"no gradient for {unknown}"
    moved = {n for n, p in ours.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    still = {n for n, p in ours.named_parameters() if p.grad is not None} - moved
    # A key's bias adds the same number to all scores of a query: softmax does not see it. Nor does the softmax over
    # choices see the one bias that they share, or that over tokens the one of all starts.
    unseen = r"\bk(ey|_proj|_lin)\.bias$" + {"choice": r"|^classifier\.bias$", "span": r"|^qa_outputs\.bias$"}.get(
        subject.kind, ""
    )
    still = {n for n in still if not re.search(unseen, n)}
    assert not still, f"gradients of zero everywhere: {still}"


# --- 17: numerics and interface -----------------------------------------------------------------------------------


def check_finite(subject: Subject, dtype: torch.dtype, attn: str) -> None:
    """A row that sees nothing must stay finite: one NaN in it reaches every weight through the gradient."""
    model = build(subject.ours, subject, attn=attn, **no_dropout(subject)).to(dtype)
    batch, tokens = 3, 8
    left = torch.ones(batch, tokens, dtype=torch.long)
    left[0, :7] = 0
    empty = left.clone()
    empty[1] = 0
    masks = {"left padding of 7 in 8": left, "an empty row": empty} if subject.is_text else {"no padding": None}
    for name, mask in masks.items():
        rows = batch if not subject.nested else 1
        inputs = subject.inputs(model.config, "none", batch=rows, tokens=tokens)
        if mask is not None:
            inputs = subject.masked(model.config, inputs, mask if not subject.nested else mask[None])
        inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        labels = subject.labels(model.config, inputs)
        for skip_padding in (True, False):
            model.config.skip_padding = skip_padding
            what = f"{name}, {skip_padding=}"
            with torch.no_grad():
                for key, value in tensors_of(model.eval()(**inputs, output_hidden_states=True)).items():
                    assert value.isfinite().all(), f"{what}: {key}"
            loss, found = loss_and_gradients(model, subject, inputs, labels)
            assert loss.isfinite(), what
            assert found
            for key, gradient in found.items():
                assert gradient.isfinite().all(), f"{what}: gradient of {key}"


def check_loss_by_hand(subject: Subject) -> None:
    """A loss shifted twice, or not at all, goes down as well; the model learns to skip a token or to copy."""
    model = build(subject.ours, subject, **no_dropout(subject))
    ids = torch.tensor([[4, 5, 6, 7]])
    labels = torch.tensor([[5, 6, 7, IGNORED]])
    extra = subject.inputs(model.config, batch=1, tokens=4)
    inputs = {**extra, "decoder_input_ids" if subject.kind == "seq2seq" else "input_ids": ids}
    with torch.no_grad():
        output = model(**inputs)
        logits = output["prediction_logits" if subject.kind == "pretraining" else "logits"][0]
        log_probabilities = logits.double().log_softmax(-1)
        unshifted = -sum(log_probabilities[t, labels[0, t]] for t in (0, 1, 2)) / 3
        shifted = -sum(log_probabilities[t, labels[0, t + 1]] for t in (0, 1)) / 2
        assert abs(unshifted - shifted) > 1e-3
        expected = shifted if subject.kind == "causal" else unshifted
        for train in (False, True):
            model.train(train)
            assert_close(model(**inputs, labels=labels).loss, expected, f"{train=}")
            assert_close(
                model(**inputs, labels=labels, num_items_in_batch=5).loss,
                expected * (2 if subject.kind == "causal" else 3) / 5,
                f"{train=}, num_items_in_batch",
            )
            nothing = model(**inputs, labels=torch.full_like(labels, IGNORED)).loss
            assert nothing == 0, "no label at all"
            if subject.kind == "causal":
                loss = model(**inputs, labels=ids, shift_labels=labels).loss
                assert_close(loss, unshifted, f"{train=}, shift_labels")


@torch.no_grad()
def check_token_type_ids(subject: Subject) -> None:
    """Tokenizers made for encoders return token types; a model without them must take them and not change.

    Where segments are words, zeros are the first word: the stock class says what that changes.
    """
    model = build(subject.ours, subject)
    encoded = dict(tiny_tokenizer()(["the cat sat </s>", "a dog </s>"], padding=True, return_tensors="pt"))
    if subject.nested:
        encoded = {k: v[None] for k, v in encoded.items()}
    encoded["input_ids"] = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, model.config.pad_token_id)
    if getattr(model.config, "add_cross_attention", False):
        encoded["encoder_hidden_states"] = torch.randn(2, 5, model.config.hidden_size)
    encoded |= subject.case.beside_text(subject.kind, encoded)
    encoded["token_type_ids"] = torch.zeros_like(encoded["input_ids"])
    if subject.case.segments_are_words:
        expected = build(subject.stock, subject)(**encoded)
    else:
        expected = model(**{name: x for name, x in encoded.items() if name != "token_type_ids"})
    tolerance = TOLERANCE if subject.case.segments_are_words else 0.0
    compare_outputs(model(**encoded), expected, "segments of zero", real_positions(encoded), tolerance)


def check_rotary(subject: Subject) -> None:
    """In bf16, 256 and 257 are one number: angles computed in half precision confuse distant positions."""

    def rotary(model: nn.Module) -> nn.Module | None:
        return next((m for m in model.modules() if hasattr(m, "inv_freq")), None)

    reference = rotary(build(subject.ours, subject))
    # Where the angles depend on the length, positions within the original one.
    positions = torch.arange(5 if subject.depends_on_length else 5001)[None]
    parameters = reference.config.rope_parameters
    angles = positions[..., None].double() * reference.inv_freq.double()
    if parameters["rope_type"] == "default":
        width = subject.fields.get("head_dim") or reference.config.hidden_size // reference.config.num_attention_heads
        width = int(width * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = positions[..., None].double() / parameters["rope_theta"] ** exponents
    expected = (angles.cos() * reference.attention_scaling, angles.sin() * reference.attention_scaling)

    def loaded(dtype: torch.dtype) -> nn.Module:
        return subject.ours.from_pretrained(stock_folder(subject), dtype=dtype)

    def round_trip() -> nn.Module:
        folder = scratch()
        loaded(torch.bfloat16).save_pretrained(folder)
        return subject.ours.from_pretrained(folder)

    for name, make, autocast in (
        ("as built", lambda: build(subject.ours, subject), False),
        ("bfloat16()", lambda: build(subject.ours, subject).bfloat16(), False),
        ("half()", lambda: build(subject.ours, subject).half(), False),
        ("bfloat16().float()", lambda: build(subject.ours, subject).bfloat16().float(), False),
        ("loaded in bf16", lambda: loaded(torch.bfloat16), False),
        ("saved and loaded in bf16", round_trip, False),
        ("autocast", lambda: build(subject.ours, subject), True),
    ):
        model = make()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            turned = rotary(model)(positions, model.dtype)
        # The output is cast; the angles are exact to fp32, of which 5000 leaves four digits.
        limit = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}[model.dtype]
        # Either one value per pair or the two halves side by side, sin negative in the first: what `rotate` takes.
        cos, sin = (part.reshape(positions.shape[1], -1) for part in turned)
        cos, sin = cos[:, -expected[0].shape[-1] :], sin[:, -expected[1].shape[-1] :]
        for part, wanted in zip((cos, sin), expected, strict=True):
            assert part.dtype == model.dtype
            assert (part.double() - wanted[0]).abs().max() < limit * reference.attention_scaling, name
        if len(reference.inv_freq) < 3:  # one or two angles in half precision repeat within 5001 positions
            continue
        both = torch.cat([cos, sin], -1)
        assert torch.unique(both, dim=0).shape[0] == positions.shape[1], f"{name}: positions that look the same"


def check_fresh_import(class_name: str) -> None:
    """Tests import much before the package; a user's first line is `from hf_ext import ...`."""
    code = f"from hf_ext import {class_name}; print({class_name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=scratch(), check=False)
    assert done.returncode == 0, done.stderr[-600:]
    assert done.stdout.strip() == class_name


FIRST_IMPORT = """
import os, sys
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizerFast
for name in sys.argv[1:]:
    if not (child := os.fork()):
        module = __import__("hf_ext", fromlist=[name])
        print(getattr(module, name).__name__, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(name)
"""


def check_first_import(class_names: list[str]) -> None:
    """A class that can be imported after another one only: each is the first one of a process."""
    command = [sys.executable, "-c", FIRST_IMPORT, *class_names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=scratch(), check=False)
    assert done.returncode == 0, done.stderr[-600:]
    assert done.stdout.split() == class_names
