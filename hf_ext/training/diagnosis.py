"""Reading a loss curve: the table per epoch, and the problems a run's history shows. Pure functions, no torch."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

_NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "loss", "model_preparation_time")

# A curve is noisy; each bound says how far it must depart before a line is worth reading.
_RISE = 0.02  # overfitting: eval loss above its minimum by this share ...
_RISE_ABSOLUTE = 0.01  # ... and by this much, so that 0.0010 -> 0.0012 stays quiet
_SPIKE = 1.5  # a logged loss at this multiple of the median before it ...
_SPIKE_SPREAD = 6.0  # ... and this many median deviations above it, which small batches reach only rarely
_SPIKE_SHARE = 0.1  # ... and higher by this share of the first loss
_SLOW = 0.03  # hardly learnt: the loss fell by less than this share
_ENOUGH_STEPS = 30  # ... over at least so many steps: before that, warm-up alone explains it
_SOLVED = 0.05  # a loss this low at the start has nowhere to fall


def epoch_table(history: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """One row per epoch from a Trainer's `log_history`.

    Rows hold "epoch" (1-based), "train_loss" (mean over the epoch's optimiser steps), "eval_loss" and every eval metric
    without its "eval_" prefix (the epoch's last evaluation). A value that was not measured is absent.
    """
    rows: dict[int, dict[str, float]] = {}
    sums: dict[int, list[float]] = {}
    last_step = 0
    for entry in history:
        # epoch 0.4 lies in the first epoch, 1.0 ends it; the tolerance is for floats such as 1.0000000002
        epoch = max(1, math.ceil(entry.get("epoch", 1) - 1e-6))
        row = rows.setdefault(epoch, {"epoch": epoch})
        if "loss" in entry:
            step = int(entry.get("step", last_step + 1))
            # a log line is the mean since the line before it, so it counts for that many steps
            weight = max(step - last_step, 1)
            last_step = step
            total = sums.setdefault(epoch, [0.0, 0.0])
            total[0] += entry["loss"] * weight
            total[1] += weight
            row["train_loss"] = total[0] / total[1]
        if "eval_loss" in entry:
            row["eval_loss"] = entry["eval_loss"]
            names = (name.removeprefix("eval_") for name in entry if name.startswith("eval_"))
            row.update({name: entry[f"eval_{name}"] for name in names if name not in _NOT_METRICS})
    return [row for _, row in sorted(rows.items()) if len(row) > 1]


def diagnose(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the problems that a run's history shows, one line each: what, where, and what to do about it.

    `history` is a Trainer's `log_history`: dicts with "step", "epoch" and "loss" (training) or "eval_loss". Returns an
    empty list for a healthy curve. Looks for divergence, overfitting, loss spikes and slow convergence.
    """
    train = [entry for entry in history if "loss" in entry]
    losses = [float(entry["loss"]) for entry in train]
    steps = [int(entry.get("step", index + 1)) for index, entry in enumerate(train)]

    broken = _first_not_finite(history)
    if broken is not None:
        return [
            f"divergence at step {broken}: the loss is no longer a number; lower the learning rate, add warm-up, "
            "keep gradient clipping at 1.0, and prefer bf16 to fp16"
        ]
    lines = []
    diverged = len(losses) >= 4 and median(losses[-_fifth(losses) :]) > 1.5 * median(losses[: _fifth(losses)])
    if diverged:
        lines.append(
            f"divergence: the train loss rose from {losses[0]:.3g} to {losses[-1]:.3g}; lower the learning rate, add "
            "warm-up, keep gradient clipping at 1.0"
        )
    lines += _overfitting(epoch_table(history))
    if not diverged:
        lines += _spikes(steps, losses)
        lines += _slow(steps, losses)
    return lines


def _overfitting(rows: list[dict[str, float]]) -> list[str]:
    rows = [row for row in rows if "eval_loss" in row]
    if len(rows) < 2:
        return []
    best = min(range(len(rows)), key=lambda index: rows[index]["eval_loss"])
    low, last = rows[best], rows[-1]
    rise = last["eval_loss"] - low["eval_loss"]
    fell = last.get("train_loss", math.inf) < low.get("train_loss", -math.inf)
    if rise <= max(_RISE_ABSOLUTE, _RISE * abs(low["eval_loss"])) or not fell:
        return []
    return [
        f"overfitting from epoch {rows[best + 1]['epoch']}: the eval loss rose from {low['eval_loss']:.3g} (epoch "
        f"{low['epoch']}) to {last['eval_loss']:.3g} while the train loss fell from {low['train_loss']:.3g} to "
        f"{last['train_loss']:.3g}; fewer epochs, early stopping, LoRA, or more data"
    ]


def _spikes(steps: list[int], losses: list[float]) -> list[str]:
    spikes = []
    for index in range(4, len(losses)):
        before = losses[max(0, index - 10) : index]
        middle = median(before)
        spread = median(abs(loss - middle) for loss in before)
        jump = losses[index] - middle
        high = losses[index] > _SPIKE * middle
        if high and jump > _SPIKE_SPREAD * spread and jump > _SPIKE_SHARE * losses[0]:
            spikes.append((steps[index], middle, losses[index]))
    if not spikes:
        return []
    step, middle, loss = max(spikes, key=lambda spike: spike[2] - spike[1])
    count = f"{len(spikes)} loss spikes, the highest" if len(spikes) > 1 else "loss spike"
    return [
        f"{count} at step {step}: from about {middle:.3g} to {loss:.3g}; longer warm-up, gradient clipping (max norm "
        "1.0), a lower learning rate, or look at the rows of that batch"
    ]


def _slow(steps: list[int], losses: list[float]) -> list[str]:
    if len(losses) < 4 or steps[-1] < _ENOUGH_STEPS:
        return []
    start, end = median(losses[: _fifth(losses)]), median(losses[-_fifth(losses) :])
    if start <= _SOLVED or end < (1 - _SLOW) * start:
        return []
    return [
        f"slow convergence: the train loss only went from {start:.3g} to {end:.3g}; raise the learning rate or the "
        "warm-up, train longer, and check the tokenisation and the labels"
    ]


def _first_not_finite(history: Sequence[Mapping[str, Any]]) -> int | None:
    for index, entry in enumerate(history):
        for name in ("loss", "eval_loss"):
            if name in entry and not math.isfinite(entry[name]):
                return int(entry.get("step", index + 1))
    return None


def _fifth(values: list[float]) -> int:
    """Size of a curve's start and end; their medians are compared, so that one spike is neither."""
    return max(1, len(values) // 5)
