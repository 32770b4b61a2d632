"""Distillation: the loss against the formulas of the paper, and training with a teacher."""

import copy

import pytest
import torch
from cases import CASES
from harness import assert_close, state
from torch import Tensor, nn
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import hf_ext
from hf_ext.losses import distillation_loss
from hf_ext.training import DistillationTrainer

FIELDS = CASES["ext_deit"].configs["square"]


def log_p(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(-1, keepdim=True).log()


def by_formula(own: Tensor, student: Tensor, teacher: Tensor, labels: Tensor, **options: object) -> Tensor:
    """Equations 2 and 3 of the paper, in fp64."""
    own, student, teacher = (x.double() for x in (own, student, teacher))
    rows = torch.arange(len(labels))
    supervised = -log_p(own)[rows, labels].mean()
    if options["hard"]:
        taught = -log_p(student)[rows, teacher.argmax(-1)].mean()
    else:
        t, s = (log_p(x / options["temperature"]) for x in (teacher, student))
        taught = (t.exp() * (t - s)).sum(-1).mean() * options["temperature"] ** 2
    return (1 - options["weight"]) * supervised + options["weight"] * taught


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 3.0), (0.1, 1.0), (0.0, 2.0), (1.0, 0.5)])
def test_loss_is_the_formula(hard, weight, temperature):
    torch.manual_seed(0)
    own, student, teacher = (3 * torch.randn(5, 7) for _ in range(3))
    labels = torch.tensor([0, 6, 3, 3, 1])
    options = {"hard": hard, "weight": weight, "temperature": temperature}
    results = []
    for loss in (distillation_loss, by_formula):
        given = [x.clone().requires_grad_() for x in (own, student, teacher)]
        value = loss(*given[:2], given[2].detach() if loss is by_formula else given[2], labels, **options)
        value.backward()
        results.append((value, given))
    (found, mine), (expected, reference) = results
    assert_close(found, expected, "loss")
    for x, y, name in zip(mine[:2], reference[:2], ("class head", "distillation head"), strict=True):
        assert_close(x.grad, y.grad, f"gradient of the {name}")
    assert mine[2].grad is None, "the teacher is not trained"


def make(cls: type, config_class: type, seed: int, **fields: object) -> nn.Module:
    torch.manual_seed(seed)
    return cls(config_class(**{**FIELDS, **fields, "initializer_range": 0.3}))


def rows(count: int = 8) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, 12, 12, generator=generator)
    return [{"pixel_values": x, "labels": i % 3} for i, x in enumerate(pixels)]


def run(student: nn.Module, teacher: nn.Module, folder: object, *, batch: int = 8, accumulate: int = 1, **options):
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate, max_steps=1,
        learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no",
        logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0, per_device_eval_batch_size=4,
    )  # fmt: skip
    return DistillationTrainer(
        student, arguments, train_dataset=rows(), eval_dataset=rows(), teacher=teacher, **options
    )


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("head", ["WithTeacher", ""])
def test_a_step_of_training(hard, head, tmp_path):
    """The step is the gradient of the formula, however it is divided; the teacher stays as it was."""
    teacher = make(ViTForImageClassification, ViTConfig, 1)
    untouched = state(teacher)
    cls = getattr(hf_ext, f"ExtDeiTForImageClassification{head}")
    student = make(cls, hf_ext.ExtDeiTConfig, 2)
    start = copy.deepcopy(student)
    pixels, labels = torch.stack([r["pixel_values"] for r in rows()]), torch.tensor([r["labels"] for r in rows()])
    outputs = start.train()(pixels)
    two = (outputs.cls_logits, outputs.distillation_logits) if head else (outputs.logits, outputs.logits)
    options = {"hard": hard, "weight": 0.3, "temperature": 2.0}
    expected = by_formula(*two, teacher(pixels).logits.detach(), labels, **options)
    expected.backward()
    for batch, accumulate in ((8, 1), (2, 4)):
        trained = copy.deepcopy(student)
        runner = run(trained, teacher, tmp_path / f"{batch}", batch=batch, accumulate=accumulate, **options)
        assert abs(runner.evaluate()["eval_loss"] - expected.item()) < 1e-5
        runner.train()
        for (name, after), before in zip(trained.named_parameters(), start.parameters(), strict=True):
            assert_close(before - after, torch.zeros_like(after) if before.grad is None else before.grad, name, 2e-5)
    for name, value in state(teacher).items():
        assert torch.equal(value, untouched[name])


def test_what_users_get_wrong(tmp_path):
    student = make(hf_ext.ExtDeiTForImageClassificationWithTeacher, hf_ext.ExtDeiTConfig, 2)
    teacher = make(ViTForImageClassification, ViTConfig, 1)
    with pytest.raises(ValueError, match="weight is a share between 0 and 1, got 2"):
        run(student, teacher, tmp_path, weight=2.0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        run(student, teacher, tmp_path, hard=False, temperature=0.0)
    with pytest.raises(ValueError, match=r"teacher gives logits of shape \(8, 5\), the student of shape \(8, 3\)"):
        run(student, make(ViTForImageClassification, ViTConfig, 1, num_labels=5), tmp_path).train()
    runner = run(student, teacher, tmp_path)
    with pytest.raises(ValueError, match="needs `labels`"):
        runner.compute_loss(student, {"pixel_values": torch.randn(2, 3, 12, 12)})
