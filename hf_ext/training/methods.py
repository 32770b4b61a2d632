"""What a run trains: everything, the task head alone, or low-rank adapters on a frozen (4-bit) model."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_ext.training.settings import FinetuneSettings
from hf_ext.training.tasks import FinetuneTask


def read_config(model: str) -> PreTrainedConfig:
    """The checkpoint's config; raises `ValueError` for a folder that is none or a name that the Hub does not know."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise ValueError(
                f"model: {model!r} holds an adapter, not a model; fine-tune its base model, or merge the adapter first"
            )
        if not (folder / "config.json").is_file():
            raise ValueError(f"model: folder {model!r} has no config.json, so it is not a checkpoint")
    elif folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"model: there is no folder {model!r}; give a checkpoint's folder or a Hub id")
    try:
        return AutoConfig.from_pretrained(_place(model))
    except OSError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"model: {model!r} is neither a folder here nor a model that the Hub gave: {reason}"
        ) from error


def _place(model: str) -> str:
    """A folder as an absolute path, so that an adapter saved elsewhere still finds it; a Hub id as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def position_limit(config: PreTrainedConfig, tokenizer: Any) -> int | None:
    """The longest input the model has positions for, in tokens; None if nothing limits it."""
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    # a tokenizer without a limit says 1e30
    limits.append(tokenizer.model_max_length if tokenizer.model_max_length < 10**9 else None)
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known) if known else None


def load_model(
    settings: FinetuneSettings, task: FinetuneTask, **config_values: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Build the checkpoint with the task's head.

    Returns the model and the names of its parameters that the checkpoint did not contain, which start at random.
    Raises `ValueError` when the architecture has no such head.
    """
    auto = getattr(transformers, task.auto_class)
    options: dict[str, Any] = dict(config_values)
    if settings.new_head:
        options["ignore_mismatched_sizes"] = True
    if settings.method == "qlora":
        options |= _four_bit(settings, auto, config_values)
    elif settings.method == "lora" and settings.bf16:
        options["dtype"] = torch.bfloat16  # frozen weights are only read, so half of the memory is enough
    else:
        # weights that are trained stay in fp32: an update of 2e-5 is lost in the rounding of bf16
        options["dtype"] = torch.float32
    # a new head is expected here; the library's table of missing keys would read like a fault
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model, info = auto.from_pretrained(_place(settings.model), output_loading_info=True, **options)
    except ValueError as error:
        if "Unrecognized configuration class" in str(error):
            kind = AutoConfig.from_pretrained(_place(settings.model)).model_type
            raise ValueError(f"task: model type {kind!r} has no head for it ({task.auto_class})") from error
        raise
    finally:
        transformers.logging.set_verbosity(verbosity)
    new = set(info["missing_keys"]) | {key[0] for key in info["mismatched_keys"]}
    return model, new


def _four_bit(settings: FinetuneSettings, auto: Any, config_values: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "method: 'qlora' needs bitsandbytes, which is not installed: pip install 'hf_ext[quantization]'"
        )
    config = AutoConfig.from_pretrained(_place(settings.model), **config_values)
    try:
        with torch.device("meta"):
            outline = auto.from_config(config)
    except ValueError as error:
        raise ValueError(f"task: model type {config.model_type!r} has no head for it ({auto.__name__})") from error
    # Heads stay whole: they are trained, or (LM heads) their rounding reaches the loss directly. A pooler too, since
    # some checkpoints lack it and it then has to be trained. Naming any replaces the library's own list.
    whole = {*head_modules(outline), *(name for name, _ in outline.named_modules() if name.endswith("pooler"))}
    whole |= {name.removesuffix(".weight") for pair in outline.all_tied_weights_keys.items() for name in pair}
    # Without an accelerator bf16 is emulated on most processors, at a tenth of the speed.
    half = settings.bf16 or torch.accelerator.is_available()
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if half else torch.float32,
        llm_int8_skip_modules=sorted(whole),
    )
    return {"quantization_config": quantization, "device_map": {"": PartialState().device}}


def head_modules(model: PreTrainedModel) -> list[str]:
    """Names of the direct children that are not the backbone and have parameters."""
    children = model.named_children()
    return [
        name for name, child in children if name != model.base_model_prefix and any(True for _ in child.parameters())
    ]


def apply_method(
    model: PreTrainedModel, settings: FinetuneSettings, task: FinetuneTask, new: set[str]
) -> PreTrainedModel | Any:
    """Freeze, or wrap in adapters, as the method says; returns the model to train."""
    if settings.method == "head-only":
        freeze_backbone(model, new)
    elif settings.method in ("lora", "qlora"):
        return _with_adapters(model, settings, task, new)
    return model


def freeze_backbone(model: PreTrainedModel, new: set[str]) -> None:
    """Leave trainable what lies outside the backbone, and what the checkpoint did not contain.

    A pretrained pooler belongs to the backbone and is frozen; one that starts at random is trained with the head, since
    the head could only ever see noise through it. Raises `ValueError` if nothing would be left (a tied LM head).
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(f"{model.base_model_prefix}.") or name in new)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "method: 'head-only' leaves nothing to train, as this model's head shares its weights with the embedding; "
            "use 'lora' or 'full'"
        )


def _with_adapters(model: PreTrainedModel, settings: FinetuneSettings, task: FinetuneTask, new: set[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    if settings.method == "qlora":
        # checkpointing is switched on by the Trainer, in the variant that needs no gradient at the inputs
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    kept = [] if task.language_model else head_modules(model)
    # fresh parts outside the head, such as a pooler that the checkpoint lacks; by their modules' names
    fresh = {name.rpartition(".")[0] for name in new}
    kept += sorted(
        name for name in fresh if name and not any(name == head or name.startswith(f"{head}.") for head in kept)
    )
    config = LoraConfig(
        task_type=task.peft_type,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=_targets(settings.lora_targets),
        modules_to_save=kept or None,
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        if "target_modules" in str(error) and settings.lora_targets is None:
            raise ValueError(
                f"lora_targets: PEFT has no default for model type {model.config.model_type!r}; name the layers to "
                "adapt, or give all-linear"
            ) from error
        raise ValueError(f"lora_targets: {error}") from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # a head copied from a bf16 model would lose its small updates
    return adapted


def _targets(names: list[str] | None) -> list[str] | str | None:
    if not names:
        return None
    return "all-linear" if names == ["all-linear"] else list(names)


def parameter_counts(model: Any) -> tuple[int, int]:
    """Trainable and all parameters; 4-bit weights count as what they stand for, not as packed bytes."""
    if hasattr(model, "get_nb_trainable_parameters"):
        return model.get_nb_trainable_parameters()
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in counts if trainable), sum(size for size, _ in counts)
