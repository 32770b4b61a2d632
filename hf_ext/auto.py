"""The one table of architectures: registration, takeover, PEFT defaults.

`register()` makes the library's Auto classes know our model types; it changes nothing about the stock types.
`takeover()` makes them build our classes for official checkpoints, until it is left.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import ClassVar


@dataclass(frozen=True)
class AdapterTargets:
    """Where adapters go unless their configuration says otherwise, for official types for which PEFT has no default.

    Args:
        projections: for LoRA and its relatives, as in its paper: queries and values, or the layer that has them.
        rescaled: for IA3, as in its paper: keys, values (or the layer that has them) and the feed-forward's inside.
        feedforward: those of `rescaled` whose input is rescaled, not their output.
    """

    projections: tuple[str, ...]
    rescaled: tuple[str, ...]
    feedforward: tuple[str, ...]


# By the names that the layers have in several architectures each.
LIKE_BERT = AdapterTargets(("query", "value"), ("key", "value", "output.dense"), ("output.dense",))
LIKE_BART = AdapterTargets(("q_proj", "v_proj"), ("k_proj", "v_proj", "fc2"), ("fc2",))
LIKE_GPT = AdapterTargets(("c_attn",), ("c_attn", "mlp.c_proj"), ("mlp.c_proj",))
LIKE_MPT = AdapterTargets(("Wqkv",), ("Wqkv", "ffn.down_proj"), ("ffn.down_proj",))
LIKE_LLAMA = AdapterTargets(("q_proj", "v_proj"), ("k_proj", "v_proj", "down_proj"), ("down_proj",))
LIKE_DISTILBERT = AdapterTargets(("q_lin", "v_lin"), ("k_lin", "v_lin", "ffn.lin2"), ("ffn.lin2",))


@dataclass(frozen=True)
class Architecture:
    """One architecture and its classes, by name: nothing is imported until it is asked for.

    Args:
        name: the official model type in snake case, and the folder under `hf_ext/models`.
        official_model_type: as the Hub spells it; None for an architecture of this package's own, which has no stock
            class: there is nothing to take over, and nothing to export to.
        config: name of the configuration class.
        heads: Auto class -> our class.
        others: public model classes that no Auto class leads to.
        part_of: folder of the architecture whose part this is, where it has none of its own.
        adapters: where adapters go by default, where PEFT does not say it of the official type.
    """

    name: str
    official_model_type: str | None
    config: str
    heads: dict[str, str]
    others: tuple[str, ...] = ()
    part_of: str | None = None
    adapters: AdapterTargets | None = None

    @property
    def folder(self) -> str:
        """Folder under `hf_ext/models`."""
        return self.part_of or self.name

    @property
    def model_type(self) -> str:
        """Our `model_type`."""
        return f"ext_{self.name}"

    @property
    def config_class(self) -> type:
        """Our configuration class."""
        return self.load(self.config)

    def class_names(self) -> list[str]:
        """Every model class, without repetition, the base model first."""
        return list(dict.fromkeys([*self.heads.values(), *self.others]))

    def load(self, class_name: str) -> type:
        """A class of this architecture by its name.

        Raises:
            ValueError: the architecture has no such class.
        """
        if class_name == self.config:
            module = "configuration"
        elif class_name in self.class_names():
            module = "modeling"
        else:
            raise ValueError(f"{self.name} has no class {class_name!r}; it has {', '.join(self.class_names())}.")
        return getattr(importlib.import_module(f"hf_ext.models.{self.folder}.{module}_{self.folder}"), class_name)


ARCHITECTURES = {
    architecture.model_type: architecture
    for architecture in (
        Architecture(
            name="bert",
            official_model_type="bert",
            config="ExtBertConfig",
            heads={
                "AutoModel": "ExtBertModel",
                "AutoModelForPreTraining": "ExtBertForPreTraining",
                "AutoModelForMaskedLM": "ExtBertForMaskedLM",
                "AutoModelForCausalLM": "ExtBertLMHeadModel",
                "AutoModelForNextSentencePrediction": "ExtBertForNextSentencePrediction",
                "AutoModelForSequenceClassification": "ExtBertForSequenceClassification",
                "AutoModelForTokenClassification": "ExtBertForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtBertForQuestionAnswering",
                "AutoModelForMultipleChoice": "ExtBertForMultipleChoice",
                "AutoModelForTextEncoding": "ExtBertModel",
            },
        ),
        Architecture(
            name="roberta",
            official_model_type="roberta",
            config="ExtRobertaConfig",
            heads={
                "AutoModel": "ExtRobertaModel",
                "AutoModelForPreTraining": "ExtRobertaForMaskedLM",
                "AutoModelForMaskedLM": "ExtRobertaForMaskedLM",
                "AutoModelForCausalLM": "ExtRobertaForCausalLM",
                "AutoModelForSequenceClassification": "ExtRobertaForSequenceClassification",
                "AutoModelForTokenClassification": "ExtRobertaForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtRobertaForQuestionAnswering",
                "AutoModelForMultipleChoice": "ExtRobertaForMultipleChoice",
                "AutoModelForTextEncoding": "ExtRobertaModel",
            },
        ),
        Architecture(
            name="xlm_roberta",
            official_model_type="xlm-roberta",
            config="ExtXLMRobertaConfig",
            heads={
                "AutoModel": "ExtXLMRobertaModel",
                "AutoModelForPreTraining": "ExtXLMRobertaForMaskedLM",
                "AutoModelForMaskedLM": "ExtXLMRobertaForMaskedLM",
                "AutoModelForCausalLM": "ExtXLMRobertaForCausalLM",
                "AutoModelForSequenceClassification": "ExtXLMRobertaForSequenceClassification",
                "AutoModelForTokenClassification": "ExtXLMRobertaForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtXLMRobertaForQuestionAnswering",
                "AutoModelForMultipleChoice": "ExtXLMRobertaForMultipleChoice",
                "AutoModelForTextEncoding": "ExtXLMRobertaModel",
            },
            adapters=LIKE_BERT,
        ),
        Architecture(
            name="distilbert",
            official_model_type="distilbert",
            config="ExtDistilBertConfig",
            heads={
                "AutoModel": "ExtDistilBertModel",
                "AutoModelForPreTraining": "ExtDistilBertForMaskedLM",
                "AutoModelForMaskedLM": "ExtDistilBertForMaskedLM",
                "AutoModelForSequenceClassification": "ExtDistilBertForSequenceClassification",
                "AutoModelForTokenClassification": "ExtDistilBertForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtDistilBertForQuestionAnswering",
                "AutoModelForMultipleChoice": "ExtDistilBertForMultipleChoice",
                "AutoModelForTextEncoding": "ExtDistilBertModel",
            },
            adapters=LIKE_DISTILBERT,
        ),
        Architecture(
            name="longformer",
            official_model_type="longformer",
            config="ExtLongformerConfig",
            heads={
                "AutoModel": "ExtLongformerModel",
                "AutoModelForPreTraining": "ExtLongformerForMaskedLM",
                "AutoModelForMaskedLM": "ExtLongformerForMaskedLM",
                "AutoModelForSequenceClassification": "ExtLongformerForSequenceClassification",
                "AutoModelForTokenClassification": "ExtLongformerForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtLongformerForQuestionAnswering",
                "AutoModelForMultipleChoice": "ExtLongformerForMultipleChoice",
                "AutoModelForTextEncoding": "ExtLongformerModel",
            },
            adapters=LIKE_BERT,
        ),
        Architecture(
            name="big_bird",
            official_model_type="big_bird",
            config="ExtBigBirdConfig",
            heads={
                "AutoModel": "ExtBigBirdModel",
                "AutoModelForPreTraining": "ExtBigBirdForPreTraining",
                "AutoModelForMaskedLM": "ExtBigBirdForMaskedLM",
                "AutoModelForCausalLM": "ExtBigBirdForCausalLM",
                "AutoModelForSequenceClassification": "ExtBigBirdForSequenceClassification",
                "AutoModelForTokenClassification": "ExtBigBirdForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtBigBirdForQuestionAnswering",
                "AutoModelForMultipleChoice": "ExtBigBirdForMultipleChoice",
                "AutoModelForTextEncoding": "ExtBigBirdModel",
            },
            adapters=LIKE_BERT,
        ),
        Architecture(
            name="gpt2",
            official_model_type="gpt2",
            config="ExtGPT2Config",
            heads={
                "AutoModel": "ExtGPT2Model",
                "AutoModelForCausalLM": "ExtGPT2LMHeadModel",
                "AutoModelForPreTraining": "ExtGPT2LMHeadModel",
                "AutoModelForSequenceClassification": "ExtGPT2ForSequenceClassification",
                "AutoModelForTokenClassification": "ExtGPT2ForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtGPT2ForQuestionAnswering",
            },
            others=("ExtGPT2DoubleHeadsModel",),
        ),
        Architecture(
            name="openai_gpt",
            official_model_type="openai-gpt",
            config="ExtOpenAIGPTConfig",
            heads={
                "AutoModel": "ExtOpenAIGPTModel",
                "AutoModelForCausalLM": "ExtOpenAIGPTLMHeadModel",
                "AutoModelForPreTraining": "ExtOpenAIGPTLMHeadModel",
                "AutoModelForSequenceClassification": "ExtOpenAIGPTForSequenceClassification",
            },
            others=("ExtOpenAIGPTDoubleHeadsModel",),
            adapters=LIKE_GPT,
        ),
        Architecture(
            name="llama",
            official_model_type="llama",
            config="ExtLlamaConfig",
            heads={
                "AutoModel": "ExtLlamaModel",
                "AutoModelForCausalLM": "ExtLlamaForCausalLM",
                "AutoModelForSequenceClassification": "ExtLlamaForSequenceClassification",
                "AutoModelForTokenClassification": "ExtLlamaForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtLlamaForQuestionAnswering",
                "AutoModelForTextEncoding": "ExtLlamaModel",
                "AutoModelForPreTraining": "ExtLlamaForCausalLM",
            },
        ),
        Architecture(
            name="mistral",
            official_model_type="mistral",
            config="ExtMistralConfig",
            heads={
                "AutoModel": "ExtMistralModel",
                "AutoModelForCausalLM": "ExtMistralForCausalLM",
                "AutoModelForPreTraining": "ExtMistralForCausalLM",
                "AutoModelForSequenceClassification": "ExtMistralForSequenceClassification",
                "AutoModelForTokenClassification": "ExtMistralForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtMistralForQuestionAnswering",
                "AutoModelForTextEncoding": "ExtMistralModel",
            },
        ),
        Architecture(
            name="gpt_neo",
            official_model_type="gpt_neo",
            config="ExtGPTNeoConfig",
            heads={
                "AutoModel": "ExtGPTNeoModel",
                "AutoModelForCausalLM": "ExtGPTNeoForCausalLM",
                "AutoModelForSequenceClassification": "ExtGPTNeoForSequenceClassification",
                "AutoModelForTokenClassification": "ExtGPTNeoForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtGPTNeoForQuestionAnswering",
            },
        ),
        Architecture(
            name="gpt_neox",
            official_model_type="gpt_neox",
            config="ExtGPTNeoXConfig",
            heads={
                "AutoModel": "ExtGPTNeoXModel",
                "AutoModelForCausalLM": "ExtGPTNeoXForCausalLM",
                "AutoModelForSequenceClassification": "ExtGPTNeoXForSequenceClassification",
                "AutoModelForTokenClassification": "ExtGPTNeoXForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtGPTNeoXForQuestionAnswering",
            },
        ),
        Architecture(
            name="bloom",
            official_model_type="bloom",
            config="ExtBloomConfig",
            heads={
                "AutoModel": "ExtBloomModel",
                "AutoModelForCausalLM": "ExtBloomForCausalLM",
                "AutoModelForPreTraining": "ExtBloomForCausalLM",
                "AutoModelForSequenceClassification": "ExtBloomForSequenceClassification",
                "AutoModelForTokenClassification": "ExtBloomForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtBloomForQuestionAnswering",
            },
        ),
        Architecture(
            name="mpt",
            official_model_type="mpt",
            config="ExtMptConfig",
            heads={
                "AutoModel": "ExtMptModel",
                "AutoModelForCausalLM": "ExtMptForCausalLM",
                "AutoModelForPreTraining": "ExtMptForCausalLM",
                "AutoModelForSequenceClassification": "ExtMptForSequenceClassification",
                "AutoModelForTokenClassification": "ExtMptForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtMptForQuestionAnswering",
            },
            adapters=LIKE_MPT,
        ),
        Architecture(
            name="falcon",
            official_model_type="falcon",
            config="ExtFalconConfig",
            heads={
                "AutoModel": "ExtFalconModel",
                "AutoModelForCausalLM": "ExtFalconForCausalLM",
                "AutoModelForPreTraining": "ExtFalconForCausalLM",
                "AutoModelForSequenceClassification": "ExtFalconForSequenceClassification",
                "AutoModelForTokenClassification": "ExtFalconForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtFalconForQuestionAnswering",
            },
        ),
        Architecture(
            name="bart",
            official_model_type="bart",
            config="ExtBartConfig",
            heads={
                "AutoModel": "ExtBartModel",
                "AutoModelForPreTraining": "ExtBartForConditionalGeneration",
                "AutoModelForCausalLM": "ExtBartForCausalLM",
                "AutoModelForMaskedLM": "ExtBartForConditionalGeneration",
                "AutoModelForSeq2SeqLM": "ExtBartForConditionalGeneration",
                "AutoModelForSequenceClassification": "ExtBartForSequenceClassification",
                "AutoModelForQuestionAnswering": "ExtBartForQuestionAnswering",
            },
        ),
        Architecture(
            name="t5",
            official_model_type="t5",
            config="ExtT5Config",
            heads={
                "AutoModel": "ExtT5Model",
                "AutoModelForPreTraining": "ExtT5ForConditionalGeneration",
                "AutoModelForSeq2SeqLM": "ExtT5ForConditionalGeneration",
                "AutoModelForSequenceClassification": "ExtT5ForSequenceClassification",
                "AutoModelForTokenClassification": "ExtT5ForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtT5ForQuestionAnswering",
                "AutoModelForTextEncoding": "ExtT5EncoderModel",
            },
        ),
        Architecture(
            name="mt5",
            official_model_type="mt5",
            config="ExtMT5Config",
            heads={
                "AutoModel": "ExtMT5Model",
                "AutoModelForSeq2SeqLM": "ExtMT5ForConditionalGeneration",
                "AutoModelForSequenceClassification": "ExtMT5ForSequenceClassification",
                "AutoModelForTokenClassification": "ExtMT5ForTokenClassification",
                "AutoModelForQuestionAnswering": "ExtMT5ForQuestionAnswering",
                "AutoModelForTextEncoding": "ExtMT5EncoderModel",
            },
        ),
        Architecture(
            name="whisper",
            official_model_type="whisper",
            config="ExtWhisperConfig",
            heads={
                "AutoModel": "ExtWhisperModel",
                "AutoModelForSpeechSeq2Seq": "ExtWhisperForConditionalGeneration",
                "AutoModelForCausalLM": "ExtWhisperForCausalLM",
                "AutoModelForAudioClassification": "ExtWhisperForAudioClassification",
            },
            adapters=LIKE_BART,
        ),
        Architecture(
            name="vit",
            official_model_type="vit",
            config="ExtViTConfig",
            heads={
                "AutoModel": "ExtViTModel",
                "AutoModelForImageClassification": "ExtViTForImageClassification",
                "AutoModelForMaskedImageModeling": "ExtViTForMaskedImageModeling",
            },
            adapters=LIKE_BERT,
        ),
        Architecture(
            name="deit",
            official_model_type="deit",
            config="ExtDeiTConfig",
            heads={
                "AutoModel": "ExtDeiTModel",
                "AutoModelForImageClassification": "ExtDeiTForImageClassification",
                "AutoModelForMaskedImageModeling": "ExtDeiTForMaskedImageModeling",
            },
            others=("ExtDeiTForImageClassificationWithTeacher",),
            adapters=LIKE_BERT,
        ),
        Architecture(
            name="mbart",
            official_model_type="mbart",
            config="ExtMBartConfig",
            heads={
                "AutoModel": "ExtMBartModel",
                "AutoModelForCausalLM": "ExtMBartForCausalLM",
                "AutoModelForMaskedLM": "ExtMBartForConditionalGeneration",
                "AutoModelForSeq2SeqLM": "ExtMBartForConditionalGeneration",
                "AutoModelForSequenceClassification": "ExtMBartForSequenceClassification",
                "AutoModelForQuestionAnswering": "ExtMBartForQuestionAnswering",
            },
            adapters=LIKE_BART,
        ),
        Architecture(
            name="marian",
            official_model_type="marian",
            config="ExtMarianConfig",
            heads={
                "AutoModel": "ExtMarianModel",
                "AutoModelForCausalLM": "ExtMarianForCausalLM",
                "AutoModelForSeq2SeqLM": "ExtMarianMTModel",
            },
            adapters=LIKE_BART,
        ),
        Architecture(
            name="transformer",
            official_model_type=None,
            config="ExtTransformerConfig",
            heads={
                "AutoModel": "ExtTransformerModel",
                "AutoModelForCausalLM": "ExtTransformerForCausalLM",
                "AutoModelForMaskedLM": "ExtTransformerForMaskedLM",
                "AutoModelForSeq2SeqLM": "ExtTransformerForConditionalGeneration",
                "AutoModelForSequenceClassification": "ExtTransformerForSequenceClassification",
                "AutoModelForTokenClassification": "ExtTransformerForTokenClassification",
            },
            adapters=LIKE_LLAMA,
        ),
        Architecture(
            name="clip",
            official_model_type="clip",
            config="ExtCLIPConfig",
            heads={
                "AutoModel": "ExtCLIPModel",
                "AutoModelForZeroShotImageClassification": "ExtCLIPModel",
                "AutoModelForImageClassification": "ExtCLIPForImageClassification",
            },
            adapters=LIKE_BART,
        ),
        Architecture(
            name="clip_text_model",
            official_model_type="clip_text_model",
            config="ExtCLIPTextConfig",
            heads={"AutoModel": "ExtCLIPTextModel", "AutoModelForTextEncoding": "ExtCLIPTextModel"},
            others=("ExtCLIPTextModelWithProjection",),
            part_of="clip",
            adapters=LIKE_BART,
        ),
        Architecture(
            name="clip_vision_model",
            official_model_type="clip_vision_model",
            config="ExtCLIPVisionConfig",
            heads={"AutoModel": "ExtCLIPVisionModel"},
            others=("ExtCLIPVisionModelWithProjection",),
            part_of="clip",
            adapters=LIKE_BART,
        ),
        Architecture(
            name="swin",
            official_model_type="swin",
            config="ExtSwinConfig",
            heads={
                "AutoModel": "ExtSwinModel",
                "AutoModelForImageClassification": "ExtSwinForImageClassification",
                "AutoModelForMaskedImageModeling": "ExtSwinForMaskedImageModeling",
                "AutoBackbone": "ExtSwinBackbone",
            },
            adapters=LIKE_BERT,
        ),
    )
}


def architectures() -> dict[str, Architecture]:
    """All architectures, by our model type."""
    return dict(ARCHITECTURES)


def architecture_of(model_type: str) -> Architecture:
    """The architecture of a model type, official or ours.

    Raises:
        ValueError: it is not one of this package's.
    """
    for architecture in ARCHITECTURES.values():
        if model_type in (architecture.model_type, architecture.official_model_type, architecture.name):
            return architecture
    known = ", ".join(sorted(a.official_model_type or a.model_type for a in ARCHITECTURES.values()))
    raise ValueError(f"model type {model_type!r} is not one of this package's architectures: {known}.")


def companion_classes(architecture: Architecture) -> dict[str, dict[str, str]]:
    """What the library looks up by the official model type where a file does not say it: file beside the weights ->
    its fields with the names of the tokenizer's and processors' classes."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    official = architecture.official_model_type
    tokenizer = {"tokenizer_class": TOKENIZER_MAPPING_NAMES.get(official)}
    processors = {
        "image_processor_type": (IMAGE_PROCESSOR_MAPPING_NAMES.get(official) or {}).get("torchvision"),
        "feature_extractor_type": FEATURE_EXTRACTOR_MAPPING_NAMES.get(official),
        "processor_class": PROCESSOR_MAPPING_NAMES.get(official),
    }
    files = {"tokenizer_config.json": tokenizer, "preprocessor_config.json": processors}
    return {file: {field: name for field, name in fields.items() if name} for file, fields in files.items()}


# --- registration -------------------------------------------------------------------------------------------------
# Importing the Auto modules costs seconds (they import torch), and the library imports them in the middle of loading
# modules that ours need. So nothing is imported for the sake of registration: each registry is filled when its module
# is loaded, or at once if it is loaded already, and it is filled with names, from which the library gets the class when
# it is first wanted. The public `register` methods take classes only. Since the tables of names then hold ours too,
# whatever the library looks up there (the label shift of `Trainer`, the tasks of a pipeline) is right for our classes.


def register_name(mapping: dict, architecture: Architecture, class_name: str, source: str) -> None:
    """Enter a class by name into one of the library's lazy mappings from configurations to classes.

    Args:
        mapping: a lazy mapping of `transformers.models.auto`.
        class_name: the class that our configuration leads to.
        source: package that has both the class and, for ours, the configuration.
    """
    mapping._reverse_config_mapping[architecture.config] = architecture.model_type
    mapping._model_mapping[architecture.model_type] = class_name
    mapping._modules[architecture.model_type] = importlib.import_module(source)


def register_configs(module: ModuleType) -> None:
    """Teach AutoConfig our model types."""
    for architecture in ARCHITECTURES.values():
        module.CONFIG_MAPPING_NAMES[architecture.model_type] = architecture.config
        module.CONFIG_MAPPING._modules[architecture.model_type] = importlib.import_module("hf_ext")


def register_models(module: ModuleType) -> None:
    """Teach the AutoModel classes our classes."""
    for architecture in ARCHITECTURES.values():
        for auto_class, class_name in architecture.heads.items():
            register_name(getattr(module, auto_class)._model_mapping, architecture, class_name, "hf_ext")


def register_official(registry: str) -> Callable[[ModuleType], None]:
    """A function that gives our types what the official types have in one registry: tokenizers, processors."""

    def register(module: ModuleType) -> None:
        mapping = getattr(module, registry)
        for architecture in ARCHITECTURES.values():
            class_name = mapping._model_mapping.get(architecture.official_model_type)
            if class_name is not None:
                register_name(mapping, architecture, class_name, "transformers")

    return register


def register_adapter_targets(module: ModuleType) -> None:
    """Give our types PEFT's default target modules of the official types: our modules have the official names. Where
    PEFT has none, the architecture's own hold, for LoRA, for the methods that go where LoRA goes, and for IA3."""
    tables = {
        name.removeprefix("TRANSFORMERS_MODELS_TO_"): table
        for name, table in vars(module).items()
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict)
    }
    lora = tables["LORA_TARGET_MODULES_MAPPING"]
    elsewhere = ("LNTUNING", "BEFT", "PREFIX_TUNING")  # norms, biases, no modules
    for architecture in ARCHITECTURES.values():
        ours, official, own = architecture.model_type, architecture.official_model_type, architecture.adapters
        for name, table in tables.items():
            if official in table:
                table.setdefault(ours, table[official])
            elif name == "IA3_TARGET_MODULES_MAPPING" and own:
                table.setdefault(ours, list(own.rescaled))
            elif name == "IA3_FEEDFORWARD_MODULES_MAPPING" and own:
                table.setdefault(ours, list(own.feedforward))
            elif not name.startswith(("IA3", *elsewhere)):
                table.setdefault(ours, list(own.projections) if own else lora[official])


def register_pipelines(module: ModuleType) -> None:
    """Let the task of speech recognition know our Whisper; for stock models the pipeline stays what it is."""
    task = module.SUPPORTED_TASKS["automatic-speech-recognition"]
    task["impl"] = "hf_ext.pipelines.SpeechRecognitionPipeline"


REGISTRIES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": register_configs,
    "transformers.models.auto.modeling_auto": register_models,
    "transformers.models.auto.tokenization_auto": register_official("TOKENIZER_MAPPING"),
    "transformers.models.auto.image_processing_auto": register_official("IMAGE_PROCESSOR_MAPPING"),
    "transformers.models.auto.feature_extraction_auto": register_official("FEATURE_EXTRACTOR_MAPPING"),
    "transformers.models.auto.processing_auto": register_official("PROCESSOR_MAPPING"),
    "transformers.pipelines": register_pipelines,
    "peft.utils.constants": register_adapter_targets,
}


class RegistrationLoader(importlib.abc.Loader):
    """Loads a module as its own loader does, then fills the registry in it."""

    def __init__(self, loader: importlib.abc.Loader, fill: Callable[[ModuleType], None]) -> None:
        self.loader, self.fill = loader, fill

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.fill(module)


class RegistrationFinder(importlib.abc.MetaPathFinder):
    """Notices when a registry's module is imported for the first time."""

    def __init__(self) -> None:
        self.waiting = dict(REGISTRIES)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        fill = self.waiting.pop(name, None)  # popped first: the search below must not find this finder again
        if fill is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = RegistrationLoader(spec.loader, fill)
        return spec


def register() -> None:
    """Register every architecture. Called once, when the package is imported."""
    finder = RegistrationFinder()
    for name in REGISTRIES:
        module = sys.modules.get(name)
        if module is not None:
            finder.waiting.pop(name)(module)
    if finder.waiting:
        sys.meta_path.insert(0, finder)


# --- takeover -----------------------------------------------------------------------------------------------------


class Takeover:
    """An active takeover: a context manager, or call `restore()`."""

    active: ClassVar[set["Takeover"]] = set()  # ours are in force while any is active, in whatever order they end
    suspended: ClassVar[int] = 0  # blocks of `stock_classes` that are open

    def __init__(self) -> None:
        Takeover.active.add(self)
        Takeover.apply()

    def restore(self) -> None:
        """Give the stock classes back, unless another takeover holds. Safe to call more than once."""
        Takeover.active.discard(self)
        Takeover.apply()

    @staticmethod
    def apply() -> None:
        """Make AutoConfig's table say what the active takeovers ask for."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        ours = bool(Takeover.active) and not Takeover.suspended
        for architecture in ARCHITECTURES.values():
            if architecture.official_model_type is None:
                continue
            if ours:
                CONFIG_MAPPING._extra_content[architecture.official_model_type] = architecture.config_class
            else:
                CONFIG_MAPPING._extra_content.pop(architecture.official_model_type, None)

    def __enter__(self) -> "Takeover":
        Takeover.active.add(self)  # again, if it is entered a second time
        Takeover.apply()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def takeover() -> Takeover:
    """Let the stock Auto classes build our classes for official checkpoints.

    As a function it holds until `restore()` is called on what it returns; as a context manager until the block is
    left, by an exception too. Models that were built meanwhile stay what they are.

    Example:
        with hf_ext.takeover():
            model = AutoModel.from_pretrained("google-bert/bert-base-uncased")  # an ExtBertModel
    """
    return Takeover()


@contextmanager
def stock_classes() -> Iterator[None]:
    """Suspend any takeover inside the block, to load the stock class for a comparison."""
    Takeover.suspended += 1
    Takeover.apply()
    try:
        yield
    finally:
        Takeover.suspended -= 1
        Takeover.apply()
