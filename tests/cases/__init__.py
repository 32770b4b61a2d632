"""Small random configurations of every architecture, and what each of its heads takes: a file for each.

`tests/test_contract.py` runs every registered architecture through `tests/harness.py`; an architecture becomes testable
by a file here, named like its folder, with a `CASE`.
"""

import importlib
import pkgutil

from cases.base import (
    IGNORED,
    IMAGES,
    NESTED,
    PADDINGS,
    POOLED,
    SPEECH,
    Case,
    Head,
    end_rows,
    image_inputs,
    image_labels,
    padding_mask,
    seq2seq_inputs,
    sides,
    spectrograms,
    speech_inputs,
    speech_labels,
    text_inputs,
    text_labels,
)

__all__ = [
    "CASES",
    "IGNORED",
    "IMAGES",
    "NESTED",
    "PADDINGS",
    "POOLED",
    "SPEECH",
    "Case",
    "Head",
    "end_rows",
    "image_inputs",
    "image_labels",
    "padding_mask",
    "seq2seq_inputs",
    "sides",
    "spectrograms",
    "speech_inputs",
    "speech_labels",
    "text_inputs",
    "text_labels",
]

CASES: dict[str, Case] = {
    f"ext_{module.name}": importlib.import_module(f"cases.{module.name}").CASE
    for module in pkgutil.iter_modules(__path__)
    if module.name != "base"
}
