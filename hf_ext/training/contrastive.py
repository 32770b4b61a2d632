"""What contrastive training needs beside the loss (`hf_ext.losses.contrastive_loss`)."""

import math
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class LogitScaleLimit(TrainerCallback):
    """Keeps the inverse temperature of a CLIP within bounds, after every optimizer step, for a stable training
    (Radford et al., 2021, https://arxiv.org/abs/2103.00020, section 2.5: logits are scaled by 100 at most).

    Args:
        largest: of the inverse temperature exp(logit_scale).
        smallest: likewise.

    Example:
        Trainer(model, arguments, train_dataset=pairs, callbacks=[LogitScaleLimit()]).train()
    """

    def __init__(self, largest: float = 100.0, smallest: float = 1.0) -> None:
        if not 0.0 < smallest <= largest:
            raise ValueError(f"0 < smallest <= largest is needed, got smallest={smallest}, largest={largest}.")
        self.limits = (math.log(smallest), math.log(largest))

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Clamp every parameter called `logit_scale`."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.split(".")[-1] == "logit_scale":
                    parameter.clamp_(*self.limits)
