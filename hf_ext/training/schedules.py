"""The learning rate of "Attention Is All You Need" (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762, section
5.3), known as Noam: it rises linearly, then falls with the root of the step.

    rate(step) = factor * width ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)

Two ways to use it, both with `Trainer` as it is:

    Trainer(model, arguments, optimizers=noam(model, warmup_steps=4000), ...)           the formula to the digit
    Trainer(model, TrainingArguments(out, **noam_arguments(width=512)), ...)            settings only, a step later
"""

from typing import Any

from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

BETAS, EPS = (0.9, 0.98), 1e-9  # of Adam, in the paper


def noam_rate(step: int, *, width: int, warmup_steps: int = 4000, factor: float = 1.0) -> float:
    """The learning rate of one optimizer step.

    Args:
        step: counted from 1.
        width: of the model, the paper's d_model.
        warmup_steps: how long the rate rises.
        factor: on all rates.
    """
    return factor * width**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def noam(
    model: PreTrainedModel, *, warmup_steps: int = 4000, factor: float = 1.0, width: int | None = None
) -> tuple[Adam, LambdaLR]:
    """Optimizer and schedule, for `Trainer(optimizers=...)`: the paper's Adam over all parameters that are trained.

    `Trainer` takes no optimizer under FSDP and none of a model that it builds itself (`model_init`): there use
    `noam_arguments`.

    Args:
        model: its parameters are optimized.
        warmup_steps, factor: as `noam_rate`.
        width: default `model.config.hidden_size`.

    Raises:
        ValueError: `warmup_steps` is not at least 1, or the model does not say how wide it is.
    """
    check_warmup(warmup_steps)
    width = width or getattr(model.config, "hidden_size", None)
    if not width:
        raise ValueError(f"{type(model.config).__name__} has no hidden_size: give width=, the width of the model.")
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], lr=1.0, betas=BETAS, eps=EPS)
    # The schedule multiplies the rate of the optimizer, 1, and counts the steps that are done.
    schedule = LambdaLR(
        optimizer, lambda done: noam_rate(done + 1, width=width, warmup_steps=warmup_steps, factor=factor)
    )
    return optimizer, schedule


def noam_arguments(*, width: int, warmup_steps: int = 4000, factor: float = 1.0) -> dict[str, Any]:
    """The same as keyword arguments of `TrainingArguments`: the library's schedule `inverse_sqrt` with the paper's
    highest rate. The library begins at a rate of 0, so that each rate comes one step later than in `noam_rate`.

    Args:
        width, warmup_steps, factor: as `noam_rate`.

    Raises:
        ValueError: `warmup_steps` is not at least 1.
    """
    check_warmup(warmup_steps)
    return {
        "learning_rate": noam_rate(warmup_steps, width=width, warmup_steps=warmup_steps, factor=factor),
        "lr_scheduler_type": "inverse_sqrt",
        "warmup_steps": warmup_steps,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
    }


def check_warmup(warmup_steps: int) -> None:
    """Raise ValueError unless the rate rises for at least one step."""
    if warmup_steps < 1:
        raise ValueError(f"warmup_steps must be at least 1, got {warmup_steps}.")
