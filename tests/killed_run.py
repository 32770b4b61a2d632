"""A `Trainer` run that is killed with SIGKILL inside a step, in a process of its own, and the same run without that."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import harness
from harness import Subject, build, subjects, trainer, training_rows
from transformers import TrainerCallback

import hf_ext

ROWS, BATCH, EPOCHS, SAVED_EVERY = 20, 4, 3, 3
KEPT, DONE_WHEN_KILLED, STEPS = 6, 7, 15  # an epoch has five steps: both are inside the second one


class Kill(TrainerCallback):
    """The process ends between the gradients and the update of a step: no handler runs, nothing is flushed."""

    def on_pre_optimizer_step(self, args: object, state: object, control: object, **kwargs: object) -> None:
        if state.global_step == DONE_WHEN_KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def run(subject: Subject, folder: Path, *, resume: bool = False, kill: bool = False) -> None:
    """Train with dropout on rows of unequal length; checkpoints, the one at the end included, are in the folder."""
    assert any(subject.case.dropout.values())
    model = build(subject.ours, subject, **subject.case.dropout)
    runner = trainer(
        model,
        training_rows(subject, model.config, ROWS),
        batch=BATCH,
        output_dir=str(folder),
        max_steps=-1,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        optim="adamw_torch",
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        save_strategy="steps",
        save_steps=SAVED_EVERY,
        logging_strategy="steps",
        logging_steps=1,
    )
    if kill:
        runner.add_callback(Kill())
    runner.train(resume_from_checkpoint=True if resume else None)
    assert not kill, "the run went on to its end"


def run_killed(subject: Subject, folder: Path) -> None:
    """The same in a process of its own, which does not reach the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_ext.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(subject), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]


if __name__ == "__main__":
    place = Path(sys.argv[2])
    harness.set_folder(place.parent)
    (found,) = [s for s in subjects() if str(s) == sys.argv[1]]
    run(found, place, kill=True)
