"""Exchange with the Hub: official export, self-contained export, model cards."""

from importlib import import_module

_LAZY = {
    "export_official": "hf_ext.hub.official",
    "export_self_contained": "hf_ext.hub.self_contained",
    "model_card": "hf_ext.hub.card",
    "push_self_contained": "hf_ext.hub.self_contained",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
