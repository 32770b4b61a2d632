"""The Transformer family, written from scratch, in the Hugging Face format.

Importing this package registers every architecture with the Auto classes; the stock types stay as they are. Public
names are loaded when they are first used.
"""

import importlib

from hf_ext.auto import ARCHITECTURES, Architecture, architecture_of, architectures, register, takeover

__version__ = "0.1.0"

_LAZY = {
    "ExtConfig": "hf_ext.configuration",
    "ExtPreTrainedModel": "hf_ext.modeling",
    "export_official": "hf_ext.hub.official",
    "export_self_contained": "hf_ext.hub.self_contained",
    "push_self_contained": "hf_ext.hub.self_contained",
    "register_feedforward": "hf_ext.registry",
    "register_norm": "hf_ext.registry",
    "register_position": "hf_ext.registry",
}
for _architecture in ARCHITECTURES.values():
    _FOLDER = _architecture.folder
    _LAZY[_architecture.config] = f"hf_ext.models.{_FOLDER}.configuration_{_FOLDER}"
    _PREFIX = _architecture.config.removesuffix("Config")
    for _name in [*_architecture.class_names(), f"{_PREFIX}PreTrainedModel"]:
        _LAZY[_name] = f"hf_ext.models.{_FOLDER}.modeling_{_FOLDER}"

__all__ = ["Architecture", "__version__", "architecture_of", "architectures", "takeover", *sorted(_LAZY)]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'hf_ext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()
