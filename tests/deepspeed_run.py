"""A `Trainer` run under DeepSpeed: python deepspeed_run.py STAGE FOLDER

In a process of its own, which DeepSpeed changes for good; one process on the CPU with gloo. Each model is loaded under
the stage's rules (3 divides parameters while they are made), trained, saved, and compared with the same run without
DeepSpeed.
"""

import sys
from pathlib import Path

import harness
import torch
from harness import Subject, assert_close, no_dropout, stock_folder, subjects, trainer, training_rows
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainingArguments

CLASSES = ("ExtBertForMaskedLM", "ExtGPT2LMHeadModel", "ExtT5ForConditionalGeneration", "ExtMarianMTModel")


def settings(stage: int) -> dict:
    """DeepSpeed's configuration, for the optimizer that `trainer` uses."""
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def current(name: str) -> str:
    """A norm's name of today: after loading at stage 3 the library writes that of the oldest files, as it does for
    stock classes."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def run(subject: Subject, folder: Path, deepspeed: dict | None = None) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """Losses of three steps, the weights in the file that is written at the end, and the names that are tied."""
    options = {"max_steps": 3, "learning_rate": 0.05, "logging_strategy": "steps", "logging_steps": 1}
    if deepspeed:  # as a script does: the arguments first, since they say how the model is to be loaded
        options["deepspeed"] = deepspeed
        kept = TrainingArguments(output_dir=str(folder), use_cpu=True, deepspeed=deepspeed)
        assert kept.deepspeed_plugin is not None
    config = subject.our_config.from_pretrained(stock_folder(subject))
    for name, value in no_dropout(subject).items():
        subject.case.assign(config, name, value)
    model = subject.ours.from_pretrained(stock_folder(subject), config=config)
    runner = trainer(model, training_rows(subject, config, 12), batch=4, output_dir=str(folder), **options)
    runner.train()
    runner.save_model(str(folder))
    losses = [line["loss"] for line in runner.state.log_history if "loss" in line]
    weights = {current(name): value for name, value in load_file(folder / "model.safetensors").items()}
    return torch.tensor(losses), weights, set(model.all_tied_weights_keys)


if __name__ == "__main__":
    stage, place = int(sys.argv[1]), Path(sys.argv[2])
    harness.set_folder(place)
    torch.set_num_threads(1)
    chosen = subjects(configs="one", where=lambda s: s.class_name in CLASSES)
    plain = {subject: run(subject, place / f"{subject}-plain") for subject in chosen}  # before the process is changed
    for subject, (losses, weights, tied) in plain.items():
        found_losses, found, _ = run(subject, place / f"{subject}-deepspeed", settings(stage))
        assert_close(found_losses, losses, f"{subject}: losses")
        assert weights.keys() <= found.keys() <= weights.keys() | tied, subject  # it may write what is tied twice
        for name, value in weights.items():
            assert_close(found[name], value, f"{subject}: {name}")
        print(f"{subject} trained at stage {stage}", flush=True)
