"""One fine-tuning run: checks, data, model, `Trainer`, final model in place, and what the curves say."""

import contextlib
import copy
import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import hf_ext
from hf_ext.data.loading import hold_out, load_data
from hf_ext.training.diagnosis import diagnose, epoch_table
from hf_ext.training.methods import (
    apply_method,
    load_model,
    parameter_counts,
    position_limit,
    read_config,
)
from hf_ext.training.metrics import IGNORED
from hf_ext.training.settings import MAX_LENGTHS, FinetuneSettings
from hf_ext.training.tasks import TASK_CLASSES, FinetuneTask, Rows, label_order

SUMMARY = "finetune.json"
CHECKPOINTS = "checkpoints"
_INCOMING = ".incoming"
# What a final model consists of; on `overwrite` these go if the new model lacks them (an adapter after a full model).
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "config.json", "generation_config.json")
_MODEL_FILES += ("adapter_config.json", "README.md", SUMMARY)


@dataclass
class FinetuneResult:
    """What a run gave.

    Args:
        output: folder of the final model.
        metrics: of the model saved, on the evaluation rows: "loss" and the task's own; without evaluation rows only
            "train_loss" (last epoch's mean).
        history: the Trainer's log, one dict per logging step and evaluation.
        epochs: one row per epoch (`epoch_table`).
        trainable, parameters: numbers of parameters.
        diagnosis: one line per problem seen in the curves (`diagnose`).
        notes: what was done to the data on the way: rows left out, rows cut.
        steps: optimiser steps.
        is_main_process: whether this process should print; under `accelerate launch` all but one should not.
    """

    output: Path
    metrics: dict[str, float]
    history: list[dict[str, Any]]
    epochs: list[dict[str, float]]
    trainable: int
    parameters: int
    steps: int
    diagnosis: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_main_process: bool = True

    @property
    def trainable_share(self) -> float:
        return self.trainable / self.parameters


def finetune(settings: FinetuneSettings, callbacks: Sequence[TrainerCallback] = ()) -> FinetuneResult:
    """Fine-tune a checkpoint on the user's data.

    The final model and tokenizer lie at the root of `settings.output`, checkpoints in its folder "checkpoints". With
    evaluation rows the model of the best evaluation is kept. Runs under `accelerate launch` as it is.

    Args:
        settings: see `FinetuneSettings`.
        callbacks: more Trainer callbacks.

    Raises:
        ValueError: a setting or the data is wrong (before the model is loaded wherever that is possible), the loss
            stopped being a number, or the accelerator ran out of memory.
    """
    settings.check()
    output = Path(settings.output).expanduser()
    checkpoint = check_output(output, resume=settings.resume, overwrite=settings.overwrite)
    # nobody may write to the folder before all have looked at it
    PartialState().wait_for_everyone()

    task = TASK_CLASSES[settings.task]()
    train_rows, eval_rows, notes = read_rows(settings, task)
    # the head that a checkpoint lacks is drawn at random, alike in every process
    set_seed(settings.seed)
    with hf_ext.takeover():
        config = read_config(settings.model)
        names, ids = _labels(settings, task, config, train_rows, eval_rows)
        tokenizer = load_tokenizer(settings.model, task)
        max_length = choose_max_length(settings, config, tokenizer)
        train_set, cut = encode(task, train_rows.dataset(), tokenizer, max_length, ids)
        eval_set, eval_cut = (
            (None, 0) if eval_rows is None else encode(task, eval_rows.dataset(), tokenizer, max_length, ids)
        )
        if eval_set is not None:
            eval_set = task.prepare_eval(eval_set, tokenizer, settings.seed)
        if cut + eval_cut:
            notes.append(f"{cut + eval_cut} rows were longer than max_length {max_length} and were cut")

        model, new = load_model(settings, task, **_config_values(task, names))
        if new:
            modules = ", ".join(sorted({name.rpartition(".")[0] for name in new}))
            notes.append(f"not in the checkpoint, so started at random: {modules}")
    _check_vocabulary(settings, tokenizer, model)
    _set_pad_token(model, tokenizer)
    model = apply_method(model, settings, task, new)
    trainable, parameters = parameter_counts(model)

    arguments = training_arguments(settings, len(train_set), eval_set is not None)
    # rows are padded on the right while training, wherever the tokenizer pads for generation
    padder = copy.deepcopy(tokenizer)
    padder.padding_side = "right"
    trainer = FinetuneTrainer(
        model=model,
        args=arguments,
        train_dataset=train_set,
        eval_dataset=eval_set,
        processing_class=tokenizer,
        data_collator=task.collator(padder),
        compute_metrics=task.compute_metrics(names),
        callbacks=[_LogEpochs(), _StopWhenBroken(), *callbacks],
        task=task,
    )
    if arguments.load_best_model_at_end and settings.early_stopping_patience:
        trainer.add_callback(EarlyStoppingCallback(settings.early_stopping_patience))
    if any(isinstance(callback, ProgressCallback) for callback in trainer.callback_handler.callbacks):
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(_QuietProgress())

    if settings.overwrite and arguments.process_index == 0:
        shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)
    with _memory_advice(settings):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # the last evaluation below adds an entry of its own, which is no epoch's
    history = [dict(entry) for entry in trainer.state.log_history]
    diagnosis = diagnose(history)
    best = trainer.state.best_model_checkpoint if arguments.load_best_model_at_end else None
    broken = [entry for entry in history if not math.isfinite(entry.get("loss", 0.0))]
    if broken and best is None:
        raise ValueError(
            f"learning_rate: {arguments.learning_rate}: {diagnosis[0]}; no model was saved to {str(output)!r}"
        )
    epochs = epoch_table(history)
    metrics = {"train_loss": epochs[-1]["train_loss"]} if epochs and "train_loss" in epochs[-1] else {}
    if eval_set is not None:
        measured = trainer.evaluate()
        speed = ("runtime", "per_second", "preparation_time")
        metrics |= {
            name.removeprefix("eval_"): value
            for name, value in measured.items()
            if name.startswith("eval_") and not name.endswith(speed)
        }
    result = FinetuneResult(
        output=output,
        metrics=metrics,
        history=history,
        epochs=epochs,
        trainable=trainable,
        parameters=parameters,
        steps=trainer.state.global_step,
        diagnosis=diagnosis,
        notes=notes,
        is_main_process=arguments.process_index == 0,
    )
    _write_final(output, trainer, settings, result, names, max_length)
    return result


def load_finetuned(folder: str | os.PathLike[str]) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model and tokenizer that `finetune` left in a folder: a whole model, or an adapter on its base model.

    Raises `ValueError` if the folder is not a finished run.
    """
    folder = Path(folder).expanduser()
    if not (folder / SUMMARY).is_file():
        raise ValueError(f"folder: {str(folder)!r} has no {SUMMARY}, so no finished fine-tuning run lies there")
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    task = TASK_CLASSES[summary["settings"]["task"]]()
    auto = getattr(transformers, task.auto_class)
    with hf_ext.takeover():
        if (folder / "adapter_config.json").is_file():
            from peft import PeftModel

            base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
            resized = summary["settings"]["new_head"]
            model = auto.from_pretrained(
                base, ignore_mismatched_sizes=resized, **_config_values(task, summary["labels"])
            )
            model = PeftModel.from_pretrained(model, folder)
        else:
            model = auto.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    _set_pad_token(model, tokenizer)  # an adapter's base model is as it was before training
    return model, tokenizer


def check_output(output: Path, *, resume: bool = False, overwrite: bool = False) -> Path | None:
    """Check the output folder before any work is done; returns the checkpoint to resume from.

    Raises `ValueError` if it holds something and neither flag is set, if there is nothing to resume in it, or if it
    cannot be written to (tried with a file, as access rights do not tell about full or read-only disks).
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {str(output)!r} is a file; give a folder")
    # a run that was killed while it moved its files leaves this behind
    content = [item for item in output.iterdir() if item.name != _INCOMING] if output.is_dir() else []
    if content and not resume and not overwrite:
        raise ValueError(
            f"output: folder {str(output)!r} is not empty; go on with the run in it (--resume), replace it "
            "(--overwrite), or give another folder"
        )
    checkpoint = _last_checkpoint(output / CHECKPOINTS)
    if resume and content and checkpoint is None:
        raise ValueError(f"resume: folder {str(output)!r} holds no complete checkpoint; use --overwrite to start again")
    existing = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".probe-"):
            pass
    except OSError as error:
        raise ValueError(f"output: cannot write to {str(output)!r}: {error.strerror or error}") from error
    return checkpoint if resume else None


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end: the Trainer writes its state last."""
    found = [item for item in folder.glob("checkpoint-*") if (item / "trainer_state.json").is_file()]
    found = [item for item in found if item.name.rpartition("-")[2].isdigit()]
    return max(found, key=lambda item: int(item.name.rpartition("-")[2]), default=None)


def read_rows(settings: FinetuneSettings, task: FinetuneTask) -> tuple[Rows, Rows | None, list[str]]:
    """Training rows, evaluation rows (None: no evaluation) and notes, from the settings' data."""
    tables = load_data(settings.data, config=settings.data_config)
    train = task.read(tables["train"], settings, "data")
    notes = list(train.notes)
    if settings.eval_data is not None:
        table = load_data(settings.eval_data, field="eval_data")["train"]
        evaluation = task.read(table, settings, "eval_data")
    elif "eval" in tables:
        evaluation = task.read(tables["eval"], settings, "eval_data")
    elif settings.eval_share:
        total = len(next(iter(train.columns.values())))
        if total < 2:
            raise ValueError(f"eval_share: {total} row cannot be split; add rows, or set eval_share to 0")
        kept, held = hold_out(train.dataset(), settings.eval_share, settings.seed, task.strata(train))
        evaluation = Rows(held.to_dict(), train.names)
        train = Rows(kept.to_dict(), train.names)
    else:
        return train, None, notes
    return train, evaluation, notes + evaluation.notes


def _labels(
    settings: FinetuneSettings, task: FinetuneTask, config: PreTrainedConfig, train: Rows, evaluation: Rows | None
) -> tuple[list[str] | None, dict[str, int]]:
    """Label names in the order of the model's outputs (None: no labels), and each data label's index."""
    if train.names is None:
        return None, {}
    if evaluation is not None:
        unknown = sorted(set(evaluation.names or []) - set(train.names))
        if unknown:
            raise ValueError(
                f"eval_data: label count mismatch: {', '.join(unknown)} do not occur in the training data "
                f"({', '.join(train.names)})"
            )
    if task.problem_type == "regression":
        has_head = any(name.endswith(task.head_suffix) for name in config.architectures or [])
        if has_head and config.num_labels != 1 and not settings.new_head:
            raise ValueError(
                f"label count mismatch: the model's head has {config.num_labels} outputs, regression needs one; "
                "use --new-head to train a new head"
            )
        return ["value"], {}
    names = label_order(train.names, config, task.head_suffix, settings.new_head)
    if set(train.names) <= set(names):
        return names, {name: index for index, name in enumerate(names)}
    return names, {name: index for index, name in enumerate(train.names)}  # numbered data: 0 is the first output


def _config_values(task: FinetuneTask, names: list[str] | None) -> dict[str, Any]:
    if names is None:
        return {}
    values: dict[str, Any] = {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
    if task.problem_type is not None:
        values["problem_type"] = task.problem_type
    return values


def load_tokenizer(model: str, task: FinetuneTask) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, with a pad token; raises `ValueError` if there is none or it does not fit."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"model: {model!r} has no usable tokenizer beside its weights: {reason}") from error
    tokenizer = task.prepare_tokenizer(tokenizer, model)
    if tokenizer.pad_token is None:
        # decoders are trained without padding; the end token can stand in because padding is masked everywhere
        if tokenizer.eos_token is None:
            raise ValueError(f"model: the tokenizer of {model!r} has neither a pad nor an end token; batches need one")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def choose_max_length(settings: FinetuneSettings, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens per example; raises `ValueError` when more are asked for than the model has positions."""
    limit = position_limit(config.get_text_config(), tokenizer)
    if settings.max_length is None:
        default = MAX_LENGTHS.get(settings.task, 128)
        return min(default, limit) if limit else default
    if limit is not None and settings.max_length > limit:
        raise ValueError(
            f"max_length: {settings.max_length} is more than the model's {limit} positions; give {limit} or less"
        )
    return settings.max_length


def encode(
    task: FinetuneTask, table: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, ids: dict[str, int]
) -> tuple[Dataset, int]:
    """Tokenise a table; returns it and the number of rows that did not fit."""
    import datasets

    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()  # one bar, the training's; and one process writes it
    try:
        encoded = table.map(
            lambda rows: task.encode(rows, tokenizer, max_length, ids), batched=True, remove_columns=table.column_names
        )
    finally:
        if bars:
            datasets.enable_progress_bars()
    return encoded.remove_columns("cut"), sum(encoded["cut"][:])


def _set_pad_token(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Heads that read the last token find it by this id; many decoders' configs have none."""
    config = model.config.get_text_config()
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id


def _check_vocabulary(settings: FinetuneSettings, tokenizer: PreTrainedTokenizerBase, model: Any) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise ValueError(
            f"model: the tokenizer of {settings.model!r} has {len(tokenizer)} tokens, the model's embedding "
            f"only {size}: they do not belong together"
        )


def training_arguments(settings: FinetuneSettings, rows: int, evaluates: bool) -> TrainingArguments:
    """The Trainer's arguments for a run over `rows` training rows; `settings.trainer_args` win."""
    per_step = settings.batch_size * settings.gradient_accumulation_steps * PartialState().num_processes
    values: dict[str, Any] = {
        "output_dir": str(Path(settings.output).expanduser() / CHECKPOINTS),
        "num_train_epochs": settings.epochs,
        "per_device_train_batch_size": settings.batch_size,
        "per_device_eval_batch_size": settings.batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "learning_rate": settings.effective_learning_rate,
        "warmup_steps": settings.warmup_share,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.max_grad_norm,
        "lr_scheduler_type": settings.scheduler,
        "seed": settings.seed,
        "bf16": settings.bf16,
        # the Trainer refuses bf16 without an accelerator unless the CPU is asked for by name
        "use_cpu": settings.bf16 and not torch.accelerator.is_available(),
        "activation_checkpointing": settings.gradient_checkpointing,
        # about ten points an epoch: enough to see a spike, too few to slow training down
        "logging_strategy": "steps",
        "logging_steps": max(1, math.ceil(rows / per_step) // 10),
        "logging_nan_inf_filter": False,  # the filter writes the last good loss instead of NaN, and hides divergence
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "eval_strategy": "epoch" if evaluates else "no",
        # early stopping otherwise forgets on resume how long it has been waiting
        "restore_callback_states_from_checkpoint": True,
        "dataloader_pin_memory": torch.accelerator.is_available(),
        "label_names": list(TASK_CLASSES[settings.task].label_inputs),
    }
    values.update(settings.trainer_args)
    if values["eval_strategy"] != "no":
        if not evaluates:
            raise ValueError(
                f"trainer_args: eval_strategy={values['eval_strategy']!r} needs evaluation data; give "
                "eval_data or eval_share"
            )
        # the best model can only be loaded if it was saved when it was measured
        if "save_strategy" not in settings.trainer_args:
            values["save_strategy"] = values["eval_strategy"]
            if values["eval_strategy"] == "steps" and "save_steps" not in settings.trainer_args:
                values["save_steps"] = values.get("eval_steps") or values["logging_steps"]
        best = values["save_strategy"] == values["eval_strategy"]
        values.setdefault("load_best_model_at_end", best)
        values.setdefault("metric_for_best_model", "eval_loss")
    try:
        return TrainingArguments(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"trainer_args: {error}") from error


class FinetuneTrainer(Trainer):
    """The stock Trainer, with two things put right for the tasks at hand.

    Losses that are a mean whatever `num_items_in_batch` says (regression, multi-label, multiple choice) are divided by
    the accumulation steps; the Trainer goes by the forward's signature and would leave them that many times too large.
    Language models are evaluated by the exact mean per target token, not by the mean over batches of unequal size, and
    without gathering logits.
    """

    def __init__(self, *args: Any, task: FinetuneTask, **kwargs: Any) -> None:
        self.task = task
        super().__init__(*args, **kwargs)
        if not task.loss_counts_items:
            self.model_accepts_loss_kwargs = False

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        exact = self.task.language_model
        if not exact:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        labels = inputs["labels"].to(loss.device)  # (B, T)
        shifted = labels[:, 1:] if self.task.auto_class == "AutoModelForCausalLM" else labels
        targets = (shifted != IGNORED).sum()
        total = torch.where(targets > 0, loss * targets, 0.0)
        # an equal share for each row, (B, 2): rows that ranks add to even out the last batch are dropped by row
        rows = len(labels)
        shares = torch.stack([total, targets.to(total.dtype)]).float().div(rows).expand(rows, 2).contiguous()
        return loss, shares, torch.zeros(rows, device=loss.device)

    def evaluation_loop(self, *args: Any, **kwargs: Any):
        result = super().evaluation_loop(*args, **kwargs)
        for name in [name for name in result.metrics if name.endswith("_token_loss")]:
            result.metrics[name.removesuffix("token_loss") + "loss"] = result.metrics.pop(name)
        return result


class _LogEpochs(TrainerCallback):
    """Logs at each epoch's end too, so that no logged mean spans two epochs."""

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log = args.logging_strategy != "no"


class _StopWhenBroken(TrainerCallback):
    """A loss that is not a number stays so: the weights are gone."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and not math.isfinite(logs.get("loss", 0.0)):
            control.should_training_stop = True


class _QuietProgress(ProgressCallback):
    """The progress bar without a printed dict at each logging step; the table at the end says it better."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        pass


@contextlib.contextmanager
def _memory_advice(settings: FinetuneSettings):
    try:
        yield
    except torch.OutOfMemoryError as error:
        half = max(1, settings.batch_size // 2)
        advice = [f"batch_size {half} with gradient_accumulation_steps {settings.gradient_accumulation_steps * 2}"]
        advice += [] if settings.gradient_checkpointing else ["gradient_checkpointing"]
        advice += [] if settings.bf16 else ["bf16"]
        advice += [] if settings.method == "qlora" else ["method qlora"]
        raise ValueError(
            f"batch_size: {settings.batch_size} does not fit in the accelerator's memory; try {', '.join(advice)}"
        ) from error


def _write_final(
    output: Path,
    trainer: Trainer,
    settings: FinetuneSettings,
    result: FinetuneResult,
    names: list[str] | None,
    max_length: int,
) -> None:
    """Write everything aside first, then move it into place file by file, the config last.

    The folder aside lies within `output`, so that moving is a rename also where `output` is a disk of its own. A reader
    never sees a half-written file, and a run killed in between leaves no config.json that claims a whole model. An
    adapter gets no config.json at all: with one beside it, `from_pretrained` takes the folder for a whole model.
    Called by every process, as a sharded model is gathered by all.
    """
    incoming = output / _INCOMING
    if result.is_main_process:
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)
    trainer.accelerator.wait_for_everyone()
    if not settings.merge_adapter:
        trainer.save_model(str(incoming))
    elif result.is_main_process:
        trainer.accelerator.unwrap_model(trainer.model).merge_and_unload().save_pretrained(incoming)
        trainer.processing_class.save_pretrained(incoming)
    trainer.accelerator.wait_for_everyone()
    if not result.is_main_process:
        return
    (incoming / "training_args.bin").unlink(missing_ok=True)  # a pickle; finetune.json says the same
    summary = {
        "settings": dataclasses.asdict(settings) | {"output": str(settings.output)},
        "labels": names,
        "max_length": max_length,
        "metrics": result.metrics,
        "epochs": result.epochs,
        "steps": result.steps,
        "trainable_parameters": result.trainable,
        "parameters": result.parameters,
        "diagnosis": result.diagnosis,
        "notes": result.notes,
    }
    text = json.dumps(_finite(summary), indent=2, ensure_ascii=False, default=str)
    (incoming / SUMMARY).write_text(text + "\n", encoding="utf-8")

    files = sorted(incoming.iterdir(), key=lambda item: item.name in ("config.json", "adapter_config.json", SUMMARY))
    written = {item.name for item in files}
    for pattern in _MODEL_FILES:
        for stale in output.glob(pattern):
            if stale.name not in written:
                stale.unlink()
    for item in files:
        target = output / item.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(item, target)
    incoming.rmdir()


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity; None stands in."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
