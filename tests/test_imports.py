"""Who may import whom: the rules of the package's rooms, enforced by a walk over the syntax trees.

Every rule is a function from a parsed file to its violations, so that the rules themselves are tested on small sources
that break them.
"""

import ast
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers

import hf_ext

ROOT = Path(hf_ext.__file__).parent
UPPER_ROOMS = ("conversion", "data", "training", "hub", "inspection", "cli")
PARENTS = {
    "roberta": "bert",
    "xlm_roberta": "roberta",
    "longformer": "bert",
    "big_bird": "bert",
    "mistral": "llama",
    "mbart": "bart",
    "marian": "bart",
    "mt5": "t5",
    "deit": "vit",
}
SKELETONS = (
    "modeling.py", "heads.py", "seq2seq.py", "speech.py", "losses.py", "configuration.py", "registry.py",
)  # fmt: skip
MODELING_LINES = 450
BLOCK_PARAMETERS = 12


@dataclass
class Source:
    """A file of the package: its path below `hf_ext` and its text."""

    path: str
    text: str

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.parts = self.path.split("/")
        self.room = self.parts[0] if len(self.parts) > 1 else ""
        self.architecture = self.parts[1] if self.room == "models" and len(self.parts) > 2 else None

    def imports(self) -> Iterator[tuple[str, str | None, int]]:
        """(module, name or None, level) of every import statement, those inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, None, 0
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    yield node.module or "", alias.name, node.level

    def reached(self) -> Iterator[str]:
        """Dotted names of what is imported; `from a import b` reaches `a.b`, which may be a module."""
        for module, name, _ in self.imports():
            yield module if name is None else f"{module}.{name}"
        for node in ast.walk(self.tree):  # importlib.import_module("a.b") is an import too
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"(transformers|hf_ext|torch)(\.\w+)+", value):
                yield value


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def absolute_only(source: Source) -> list[str]:
    return [f"relative import of {module}.{name}" for module, name, level in source.imports() if level]


def layers_stand_alone(source: Source) -> list[str]:
    if source.room != "layers":
        return []
    known = {*sys.stdlib_module_names, "torch", "transformers", "numpy"}  # numpy: random numbers of official classes
    return [
        name
        for name in source.reached()
        if not (name.split(".")[0] in known or within(name, "hf_ext.layers")) or within(name, "transformers.models")
    ]


def configurations_need_no_torch(source: Source) -> list[str]:
    if not source.parts[-1].startswith("configuration"):
        return []
    bad = [name for name in source.reached() if within(name, "torch") or "modeling" in name]
    bad += [name for name in source.reached() if within(name, "hf_ext.layers") or within(name, "hf_ext.heads")]
    return bad


def skeletons_know_no_model(source: Source) -> list[str]:
    if source.path not in SKELETONS and source.room != "layers":
        return []
    rooms = ("models", *UPPER_ROOMS)
    return [name for name in source.reached() if any(within(name, f"hf_ext.{room}") for room in rooms)]


def models_know_their_parents(source: Source) -> list[str]:
    if source.architecture is None:
        return []
    own = f"hf_ext.models.{source.architecture}"
    allowed = [
        own,
        *(
            f"hf_ext.{name}"
            for name in ("layers", "modeling", "heads", "seq2seq", "speech", "losses", "configuration", "registry")
        ),
    ]
    if source.architecture in PARENTS:
        allowed.append(f"hf_ext.models.{PARENTS[source.architecture]}")
    return [
        name for name in source.reached() if within(name, "hf_ext") and not any(within(name, good) for good in allowed)
    ]


def no_stock_models(source: Source) -> list[str]:
    if source.path == "auto.py":
        return [
            name
            for name in source.reached()
            if within(name, "transformers.models") and not within(name, "transformers.models.auto")
        ]
    bad = [name for name in source.reached() if within(name, "transformers.models")]
    for module, name, _ in source.imports():  # `from transformers import LlamaModel` is the same thing
        if module == "transformers" and name is not None:
            home = transformers._class_to_module.get(name, "")  # relative to the library; nothing is imported
            if within(home, "models") and not within(home, "models.auto"):
                bad.append(f"transformers.{name}")
    return bad


def annotations_are_objects(source: Source) -> list[str]:
    if not source.parts[-1].startswith("modeling"):
        return []
    return [f"{module}.{name}" for module, name, _ in source.imports() if module == "__future__"]


def rooms_keep_their_secrets(source: Source) -> list[str]:
    bad = []
    for module, name, _ in source.imports():
        parts = module.split(".")
        if parts[0] != "hf_ext" or (len(parts) > 1 and parts[1] == source.room):
            continue
        private = [part for part in [*parts[1:], name or ""] if part.startswith("_") and not part.startswith("__")]
        bad += [f"{module}.{name}"] if private else []
    return bad


def lower_rooms_do_not_look_up(source: Source) -> list[str]:
    """`cli` sits on top: nothing imports it. What is below the upper rooms imports none of them."""
    if source.room == "cli":
        return []
    bad = [name for name in source.reached() if within(name, "hf_ext.cli")]
    if source.room in ("layers", "models"):
        bad += [n for n in source.reached() if any(within(n, f"hf_ext.{room}") for room in UPPER_ROOMS)]
    return bad


def modeling_files_stay_short(source: Source) -> list[str]:
    lines = len(source.text.splitlines())
    if source.architecture is None or not source.parts[-1].startswith("modeling") or lines <= MODELING_LINES:
        return []
    return [f"{lines} lines, at most {MODELING_LINES} are expected: a shared block is missing"]


def constructors_stay_small(source: Source) -> list[str]:
    if source.room not in ("layers", "models"):
        return []
    bad = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
            bad += [f"line {node.lineno}: {count} parameters"] if count > BLOCK_PARAMETERS else []
    return bad


RULES = (
    absolute_only,
    layers_stand_alone,
    configurations_need_no_torch,
    skeletons_know_no_model,
    models_know_their_parents,
    no_stock_models,
    annotations_are_objects,
    rooms_keep_their_secrets,
    lower_rooms_do_not_look_up,
    modeling_files_stay_short,
    constructors_stay_small,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Callable[[Source], list[str]]) -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 20
    found = {}
    for file in files:
        source = Source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
        violations = rule(source)
        if violations:
            found[source.path] = violations
    assert not found


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (absolute_only, "models/bert/modeling_bert.py", "from .configuration_bert import ExtBertConfig"),
        (absolute_only, "hub/official.py", "def f():\n    from .. import auto"),
        (layers_stand_alone, "layers/attention.py", "from hf_ext.configuration import ExtConfig"),
        (layers_stand_alone, "layers/attention.py", "import einops"),
        (layers_stand_alone, "layers/patterns/window.py", "from transformers.models.bert import modeling_bert"),
        (configurations_need_no_torch, "models/bert/configuration_bert.py", "import torch"),
        (configurations_need_no_torch, "configuration.py", "def f():\n    from torch import nn"),
        (configurations_need_no_torch, "models/bert/configuration_bert.py", "import hf_ext.modeling"),
        (skeletons_know_no_model, "heads.py", "from hf_ext.models.bert import modeling_bert"),
        (skeletons_know_no_model, "losses.py", "import hf_ext.training"),
        (models_know_their_parents, "models/bert/modeling_bert.py", "import hf_ext.models.llama.modeling_llama"),
        (models_know_their_parents, "models/llama/modeling_llama.py", "from hf_ext.models import bert"),
        (models_know_their_parents, "models/roberta/modeling_roberta.py", "from hf_ext import auto"),
        (no_stock_models, "models/bert/modeling_bert.py", "import transformers.models.bert.modeling_bert"),
        (no_stock_models, "hub/official.py", "from transformers import LlamaForCausalLM"),
        (no_stock_models, "hub/official.py", "import_module('transformers.models.bert')"),
        (no_stock_models, "auto.py", "from transformers.models.bert import BertModel"),
        (annotations_are_objects, "models/a/modeling_a.py", "from __future__ import annotations"),
        (rooms_keep_their_secrets, "training/run.py", "from hf_ext.data.loading import _read"),
        (rooms_keep_their_secrets, "cli/app.py", "import hf_ext.data._cache"),
        (lower_rooms_do_not_look_up, "training/run.py", "from hf_ext.cli import app"),
        (lower_rooms_do_not_look_up, "layers/norms.py", "import hf_ext.data"),
        (modeling_files_stay_short, "models/a/modeling_a.py", "x = 1\n" * 451),
        (
            constructors_stay_small,
            "layers/a.py",
            f"class A:\n    def __init__(self, *, {', '.join(f'a{i}' for i in range(13))}): ...",
        ),
    ],
)
def test_rule_notices(rule: Callable[[Source], list[str]], path: str, text: str) -> None:
    assert rule(Source(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("models/roberta/modeling_roberta.py", "from hf_ext.models.bert.modeling_bert import ExtBertModel"),
        ("layers/attention.py", "import math\nfrom torch import nn\nfrom hf_ext.layers.positions import rotate"),
        ("hub/official.py", "from transformers import AutoConfig, PreTrainedModel\nfrom hf_ext.auto import register"),
        ("auto.py", "from transformers.models.auto.configuration_auto import CONFIG_MAPPING"),
        ("models/a/modeling_a.py", "x = 1\n" * 450),
        ("training/run.py", "from hf_ext.data.loading import read\nfrom hf_ext.training.tasks import _own"),
        ("__init__.py", "from hf_ext import __version__"),
    ],
)
def test_rules_allow(path: str, text: str) -> None:
    assert [violation for rule in RULES for violation in rule(Source(path, text))] == []


def test_parents_form_no_cycle() -> None:
    for parent in PARENTS.values():
        assert PARENTS.get(PARENTS.get(parent)) is None, "depth two"


def run(code: str) -> dict:
    """Run code in a fresh interpreter; it prints one line of JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_is_light() -> None:
    """`import hf_ext` loads neither torch nor a model, and costs at most 0.1 s on top of transformers."""
    code = (
        "import json, sys, time, transformers; before = set(sys.modules); start = time.perf_counter(); import hf_ext; "
        "took = time.perf_counter() - start; names = set(sys.modules) - before; "
        "print(json.dumps({'took': took, 'torch': 'torch' in sys.modules, "
        "'models': [n for n in names if '.models.' in n], 'peft': 'peft' in sys.modules}))"
    )
    results = [run(code) for _ in range(3)]
    for result in results:
        assert not result["torch"]
        assert not result["peft"]
        assert result["models"] == []
    assert statistics.median(result["took"] for result in results) <= 0.1


def test_import_alone_needs_no_torch_or_transformers() -> None:
    result = run(
        "import json, sys, hf_ext; hf_ext.architectures(); dir(hf_ext); hf_ext.architecture_of('bert').class_names(); "
        "print(json.dumps([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]))"
    )
    assert result == []


def test_public_names_resolve() -> None:
    for name in hf_ext.__all__:
        assert getattr(hf_ext, name) is not None
        assert name in dir(hf_ext)
    with pytest.raises(AttributeError, match="ExtNoSuchModel"):
        _ = hf_ext.ExtNoSuchModel
