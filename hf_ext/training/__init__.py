"""Fine-tuning, thin on top of `transformers.Trainer`: settings, the run itself, metrics and what its curves say."""

from importlib import import_module

# Names are looked up on first use so that the command line can read the settings without importing torch.
_HOMES = {
    "FinetuneSettings": "settings",
    "METHODS": "settings",
    "TASKS": "settings",
    "FinetuneResult": "run",
    "finetune": "run",
    "load_finetuned": "run",
    "DistillationTrainer": "distillation",
    "LogitScaleLimit": "contrastive",
    "TimeLimit": "checkpoints",
    "average_checkpoints": "checkpoints",
    "diagnose": "diagnosis",
    "noam": "schedules",
    "noam_arguments": "schedules",
    "noam_rate": "schedules",
    "epoch_table": "diagnosis",
    "span_f1": "metrics",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
