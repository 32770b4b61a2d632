"""The learning rate of the 2017 paper, through `Trainer` as it is."""

from pathlib import Path

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from hf_ext import ExtTransformerConfig, ExtTransformerForConditionalGeneration
from hf_ext.training import noam, noam_arguments, noam_rate

WIDTH, WARMUP = 16, 4


def model(**fields: object) -> ExtTransformerForConditionalGeneration:
    torch.manual_seed(0)
    return ExtTransformerForConditionalGeneration(
        ExtTransformerConfig(
            vocab_size=20, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=16, dropout=0.0, **fields,
        )
    )  # fmt: skip


class Tokenizer:
    """What the collator asks for: rows of unequal length are padded."""

    padding_side = "right"

    def pad(self, rows: list[dict], **unused: object) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        batch = {"input_ids": padded, "attention_mask": (padded != 0).long()}
        return {**batch, "labels": torch.tensor([row["labels"] for row in rows])} if "labels" in rows[0] else batch


def task(count: int = 32) -> list[dict]:
    """Copy the first three tokens, then end."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        ids = torch.randint(3, 20, (3 + i % 3,), generator=generator).tolist()
        rows.append({"input_ids": [*ids, 2], "labels": [*ids[:3], 2]})
    return rows


class Rates(TrainerCallback):
    """The rates that the optimizer really took its steps with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, *args: object, optimizer: torch.optim.Optimizer, **kwargs: object) -> None:
        self.seen.append(optimizer.param_groups[0]["lr"])


def train(trained: ExtTransformerForConditionalGeneration, folder: Path, steps: int, **options: object) -> list[float]:
    rates = Rates()
    arguments = Seq2SeqTrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=8, report_to="none", disable_tqdm=True,
        save_strategy="no", use_cpu=True, logging_steps=1000, predict_with_generate=True, generation_max_length=6,
        **options.pop("settings", {}),
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        trained, arguments, train_dataset=task(), callbacks=[rates], **options,
        data_collator=DataCollatorForSeq2Seq(Tokenizer(), model=trained),
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(task(8))
    assert predicted.predictions.shape[0] == 8  # ids that were generated, not logits
    assert predicted.predictions.ndim == 2 and set(predicted.predictions[:, 6:].flatten()) <= {0, -100}
    return rates.seen


def test_formula() -> None:
    """Numbers of the paper's base model, worked out by hand: 1 / sqrt(512 * 4000) at the end of the warm-up."""
    assert noam_rate(4000, width=512) == pytest.approx(6.987712429686844e-4)
    assert noam_rate(1, width=512) == pytest.approx(6.987712429686844e-4 / 4000)
    assert noam_rate(16000, width=512, factor=2.0) == pytest.approx(6.987712429686844e-4)


def test_optimizer_and_schedule(tmp_path: Path) -> None:
    trained = model()
    rates = train(trained, tmp_path, 10, optimizers=noam(trained, warmup_steps=WARMUP, factor=0.5))
    assert rates == pytest.approx([noam_rate(s, width=WIDTH, warmup_steps=WARMUP, factor=0.5) for s in range(1, 11)])


def test_training_arguments(tmp_path: Path) -> None:
    settings = noam_arguments(width=WIDTH, warmup_steps=WARMUP)
    rates = train(model(), tmp_path, 10, settings=settings)
    assert rates == pytest.approx([0.0, *(noam_rate(s, width=WIDTH, warmup_steps=WARMUP) for s in range(1, 10))])


def test_it_learns_with_smoothed_labels(tmp_path: Path) -> None:
    trained = model(label_smoothing=0.1)
    batch = DataCollatorForSeq2Seq(Tokenizer(), model=trained)(task())
    before = trained.eval()(**batch).loss.item()
    train(trained, tmp_path, 40, optimizers=noam(trained, warmup_steps=20, factor=0.5))
    assert trained.eval()(**batch).loss.item() < 0.8 * before


def test_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, got 0"):
        noam(model(), warmup_steps=0)
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, got -1"):
        noam_arguments(width=8, warmup_steps=-1)
    bare = torch.nn.Linear(2, 2)
    bare.config = type("Bare", (), {})()
    with pytest.raises(ValueError, match="Bare has no hidden_size: give width="):
        noam(bare)
    assert noam(bare, width=2)[0].param_groups[0]["betas"] == (0.9, 0.98)
