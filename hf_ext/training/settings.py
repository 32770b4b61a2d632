"""What a fine-tuning run is told: one dataclass, its defaults and the checks that need no model. Imports no torch."""

import dataclasses
import difflib
import enum
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Task = Literal[
    "text-classification",
    "regression",
    "multi-label",
    "token-classification",
    "question-answering",
    "multiple-choice",
    "masked-lm",
    "causal-lm",
]
Method = Literal["full", "head-only", "lora", "qlora"]
TASKS: tuple[str, ...] = typing.get_args(Task)
METHODS: tuple[str, ...] = typing.get_args(Method)

# Full fine-tuning moves pretrained weights: large steps forget what they know (2e-5 to 5e-5, Devlin et al. 2018, A.3).
# A head alone is a fresh, small, convex problem on fixed features and needs about 50 times that. LoRA's B starts at
# zero and its update is a product of two small matrices, so it takes about 10 times the full rate; QLoRA's authors
# use 2e-4 up to 13B parameters (Dettmers et al. 2023, table 9).
LEARNING_RATES = {"full": 2e-5, "head-only": 1e-3, "lora": 2e-4, "qlora": 2e-4}

# In tokens. Sentences and single words' labels fit 128; running text and contexts with a question need more.
MAX_LENGTHS = {"masked-lm": 256, "causal-lm": 256, "question-answering": 256}

# Names from other releases or with another spelling here, and what to write instead.
_RENAMED = {
    "warmup_ratio": "warmup_steps (a number below 1 is a share of all steps)",
    "group_by_length": "train_sampling_strategy=group_by_length",
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "overwrite_output_dir": "the option overwrite",
    "no_cuda": "use_cpu",
}
# Arguments that belong to the run itself; changing them underneath would break resume or the final move.
_RESERVED = {
    "output_dir": "output",
    "resume_from_checkpoint": "resume",
    "do_train": "",
    "do_eval": "",
    "label_names": "",
}


@dataclass
class FinetuneSettings:
    """Everything that `hf_ext.training.finetune` needs to know.

    Args:
        model: Hub id or folder of a checkpoint, official or ours.
        data: csv, tsv, json, jsonl, parquet or txt file, a folder of such files, or the name of a Hub dataset.
        output: folder of the final model; checkpoints go to `output/checkpoints`.
        task: one of `TASKS`.
        method: "full", "head-only", "lora" or "qlora".
        text_column, text_pair_column, label_column: column names, found by their usual names when None.
            For token classification the text column holds the words; for multi-label several label columns of 0 and 1
            may be given as a list.
        eval_data: data to evaluate on after each epoch; None takes `eval_share` of the training rows.
        eval_share: share of rows held out when there is no evaluation data, 0 for none.
        data_config: configuration of a Hub dataset, such as "sst2" of "nyu-mll/glue".
        max_length: tokens per example; None takes 128 or 256 by task, or the model's limit if that is lower.
        learning_rate: peak; None takes the method's (`LEARNING_RATES`).
        warmup_share: share of all steps with a rising learning rate.
        early_stopping_patience: evaluations without improvement before stopping, 0 for never.
        lora_targets: module names for the adapters; None takes PEFT's choice for the model type.
        merge_adapter: for LoRA, fold the adapter into the weights and save a full model instead of an adapter.
        new_head: start a new task head where the checkpoint's own has other labels.
        resume: continue from the last checkpoint in `output`.
        overwrite: replace an earlier result in `output`.
        gradient_checkpointing: recompute activations in the backward pass: about a third more time, far less memory.
        trainer_args: any other field of `transformers.TrainingArguments`; wins over the settings above.
    """

    model: str
    data: str
    output: str | Path
    task: str = "text-classification"
    method: str = "full"
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | list[str] | None = None
    eval_data: str | None = None
    eval_share: float = 0.1
    data_config: str | None = None
    max_length: int | None = None
    epochs: float = 3.0
    batch_size: int = 16
    gradient_accumulation_steps: int = 1
    learning_rate: float | None = None
    warmup_share: float = 0.06
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    scheduler: str = "linear"
    early_stopping_patience: int = 2
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_targets: list[str] | None = None
    merge_adapter: bool = False
    new_head: bool = False
    seed: int = 42
    bf16: bool = False
    gradient_checkpointing: bool = False
    resume: bool = False
    overwrite: bool = False
    trainer_args: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `ValueError` with field, value and remedy for anything wrong that shows without data or model."""
        _one_of("task", self.task, TASKS)
        _one_of("method", self.method, METHODS)
        for name in ("epochs", "batch_size", "gradient_accumulation_steps", "lora_rank", "lora_alpha"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        for name in ("weight_decay", "max_grad_norm", "early_stopping_patience"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("eval_share", "warmup_share", "lora_dropout"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "a share from 0 to below 1")
        if self.learning_rate is not None:
            _require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number above 0, such as 2e-5")
        if self.max_length is not None:
            _require(self.max_length >= 8, "max_length", self.max_length, "at least 8 tokens")
        if self.resume and self.overwrite:
            raise ValueError(
                "resume and overwrite: both are set; resume continues an earlier run, overwrite deletes it"
            )
        if self.merge_adapter and self.method != "lora":
            raise ValueError(
                f"merge_adapter: only for method 'lora', not {self.method!r}"
                + (
                    " (merging into 4-bit weights loses precision; merge into the full model later)"
                    * (self.method == "qlora")
                )
            )
        check_trainer_args(self.trainer_args)

    @property
    def effective_learning_rate(self) -> float:
        return self.learning_rate if self.learning_rate is not None else LEARNING_RATES[self.method]


def parse_assignments(assignments: list[str]) -> dict[str, Any]:
    """Turn `["optim=sgd", "adam_beta2=0.98", "use_cpu=true"]` into a dict with typed values.

    Values are read as JSON (numbers, true/false/null, lists, objects; `1e-4` and Python's True/False/None as well);
    anything else stays text. Raises `ValueError` for an item without "=".
    """
    spelled = {"True": True, "False": False, "None": None}
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"set: {assignment!r} is not of the form key=value, such as optim=adamw_torch")
        try:
            values[key.strip()] = spelled[text] if text in spelled else json.loads(text)
        except json.JSONDecodeError:
            values[key.strip()] = text
    return values


def check_trainer_args(trainer_args: dict[str, Any]) -> None:
    """Check names and types against the fields of `transformers.TrainingArguments`; raises `ValueError`."""
    if not trainer_args:
        return
    from transformers import TrainingArguments

    kinds = {item.name: item.type for item in dataclasses.fields(TrainingArguments) if item.init}
    for name, value in trainer_args.items():
        if name in _RESERVED:
            instead = f"; use the setting {_RESERVED[name]!r}" if _RESERVED[name] else ""
            raise ValueError(f"trainer_args: {name!r} is set by the run itself{instead}")
        if name not in kinds:
            close = _RENAMED.get(name) or " or ".join(difflib.get_close_matches(name, kinds, n=3))
            hint = f"; did you mean {close}?" if close else ""
            raise ValueError(f"trainer_args: {name!r} is not a field of transformers.TrainingArguments{hint}")
        if not _fits(value, kinds[name]):
            wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in _members(kinds[name]))
            raise ValueError(f"trainer_args: {name}={value!r} is a {type(value).__name__}, not {wanted}")


def _members(kind: Any) -> tuple[Any, ...]:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return typing.get_args(kind)
    return (kind,)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value may stand in a TrainingArguments field annotated with `kind`."""
    for member in _members(kind):
        member = typing.get_origin(member) or member
        if member in (bool, int, float):
            # bool is an int to Python, but `learning_rate=true` is a slip
            accepted = {bool: (bool,), int: (int,), float: (int, float)}[member]
            if isinstance(value, accepted) and (member is bool or not isinstance(value, bool)):
                return True
        elif member is typing.Literal or (isinstance(member, type) and issubclass(member, enum.Enum)):
            if isinstance(value, (str, bool)):  # TrainingArguments itself names the choices when it is none of them
                return True
        elif not isinstance(member, type) or isinstance(value, member):
            return True
    return False


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"{name}: {value!r} is unknown{hint}; choose one of {', '.join(choices)}")


def _require(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}: {value!r} is not valid; give {wanted}")
