"""What to do with a `Trainer`'s checkpoints."""

import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class TimeLimit(TrainerCallback):
    """Saves a checkpoint and ends the training when its time is over. For schedules that have no end, such as Noam's.

    Args:
        minutes: from the first step on.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes

    def on_train_begin(self, *args: object, **kwargs: object) -> None:
        self.end = time.monotonic() + 60 * self.minutes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if time.monotonic() > self.end:
            control.should_save = control.should_training_stop = True


def average_checkpoints(model: PreTrainedModel, folder: str | Path, last: int) -> int:
    """Set the model to the mean of the last checkpoints (Vaswani et al., 2017, section 6.1).

    Args:
        model: the one that was trained.
        folder: the `output_dir`; what `save_total_limit` left there counts.
        last: how many checkpoints to take.

    Returns:
        How many there were to take.

    Raises:
        ValueError: the folder has no checkpoint, or one of another model.
    """
    found = sorted(Path(folder).glob("checkpoint-*"), key=lambda place: int(place.name.split("-")[1]))[-last:]
    if not found:
        raise ValueError(f"{folder} has no checkpoint-* to average.")
    total: dict[str, torch.Tensor] = {}
    for place in found:
        for name, value in load_file(place / "model.safetensors").items():
            total[name] = total[name] + value if name in total else value
    mean = {name: (value / len(found)).to(value.dtype) for name, value in total.items()}
    missing, unexpected = model.load_state_dict(mean, strict=False)
    missing = set(missing) - model.all_tied_weights_keys.keys()  # a file holds what is tied once
    if missing or unexpected:
        raise ValueError(f"{found[-1]} is of another model: {', '.join(sorted([*missing, *unexpected])[:3])} ...")
    return len(found)
