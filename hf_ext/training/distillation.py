"""Learning from a teacher, as DeiT was trained (Touvron et al., 2020, https://arxiv.org/abs/2012.12877, section 4).

Shapes: B batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from hf_ext.losses import distillation_loss


class DistillationTrainer(Trainer):
    """`Trainer` with a second source of labels: a teacher that is shown the same inputs.

    A student with two heads (`DeiTForImageClassificationWithTeacher`) learns the labels with one and the teacher's
    answers with the other; a student with one head learns both with it.

    Args:
        teacher: a classifier that takes the student's inputs, without labels, and returns `logits` of as many classes.
            It is frozen, in eval mode, and not saved.
        hard, weight, temperature: as `hf_ext.losses.distillation_loss`.
        label_smoothing: of the labels' term; `TrainingArguments.label_smoothing_factor` is not used.

    Example:
        teacher = AutoModelForImageClassification.from_pretrained("facebook/regnet-y-160")
        student = ExtDeiTForImageClassificationWithTeacher(ExtDeiTConfig(num_labels=1000))
        DistillationTrainer(student, arguments, train_dataset=images, teacher=teacher).train()
    """

    def __init__(
        self,
        *args: Any,
        teacher: nn.Module,
        hard: bool = True,
        weight: float = 0.5,
        temperature: float = 3.0,
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight is a share between 0 and 1, got {weight}.")
        if temperature <= 0.0:
            raise ValueError(f"temperature must be above 0, got {temperature}.")
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.options = {
            "hard": hard, "weight": weight, "temperature": temperature, "label_smoothing": label_smoothing
        }  # fmt: skip
        self.loss_is_scaled_for_ga = False  # a mean over the rows of a micro-batch
        # A head that takes no labels would have them removed from the data.
        self.label_names = self.args.label_names or ["labels"]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The distillation loss of a batch.

        Raises:
            ValueError: no labels, or a teacher with another number of classes.
        """
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        if labels is None:
            raise ValueError("distillation needs `labels` beside the images: one class index per row.")
        with torch.no_grad():
            teacher_logits = self.teacher(**inputs).logits
        outputs = model(**inputs)
        student = getattr(outputs, "distillation_logits", None)
        student = outputs.logits if student is None else student
        if student.shape != teacher_logits.shape:
            raise ValueError(
                f"the teacher gives logits of shape {tuple(teacher_logits.shape)}, the student of shape "
                f"{tuple(student.shape)}: both need the same num_labels."
            )
        own = getattr(outputs, "cls_logits", None)
        loss = distillation_loss(
            outputs.logits if own is None else own, student, teacher_logits, labels, **self.options
        )
        return (loss, outputs) if return_outputs else loss
