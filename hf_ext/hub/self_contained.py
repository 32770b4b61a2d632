"""Self-contained export: a repository that loads with `trust_remote_code=True` where this package is not installed.

The library's loader of remote code takes flat files that import each other by `from .name import`, and finds the files
that it needs by that line. So the modules that the architecture needs, and no others, are copied under flat names
(`hf_ext.layers.attention` becomes `layers_attention.py`) with their imports rewritten. Fine-tuned and saved or pushed
again by the library, a model takes its files along.
"""

import ast
import functools
import json
import os
import re
import tempfile
from pathlib import Path

from huggingface_hub import CommitInfo
from transformers import PreTrainedModel

import hf_ext
from hf_ext.auto import Architecture, architecture_of, companion_classes
from hf_ext.hub.card import write_card
from hf_ext.hub.folders import check_model, write_folder, write_json
from hf_ext.hub.upload import files_to_push, upload_files
from hf_ext.registry import FEEDFORWARDS, NORMS, POSITIONS

ROOT = Path(hf_ext.__file__).parent
# Architecture -> task -> (our pipeline, its Auto class), where the library's own asks for the official model type.
PIPELINES = {
    "whisper": {
        "automatic-speech-recognition": ("hf_ext.pipelines", "SpeechRecognitionPipeline", "AutoModelForSpeechSeq2Seq")
    }
}
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "tokenizer.model", "source.spm")


def export_self_contained(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    *,
    tokenizer: object | None = None,
    repo_id: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write `model` with the code that it needs: `AutoModel....from_pretrained(folder, trust_remote_code=True)` loads
    it without this package, with any head of its architecture.

    Args:
        model: a model of this package; adapters must be merged first.
        folder: where to write. It is written under a temporary name beside it and moved into place.
        tokenizer: a tokenizer or processor, saved along when given.
        repo_id: where it will be on the Hub, for the model card; the folder's name by default.
        overwrite: whether the model in an existing folder may be replaced; other files in it stay.

    Returns:
        The folder.

    Raises:
        ValueError: not a model of this package, or one with classes of the user's own, whose code is not ours to copy.
        FileExistsError: the folder exists and is not empty.
        OSError: the folder cannot be written.
    """
    check_model(model, "export_self_contained")
    architecture = check_classes(model)

    def fill(scratch: Path) -> None:
        model.save_pretrained(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        add_code(scratch, architecture)
        if not (Path(folder) / "README.md").exists():
            base = model.config.name_or_path
            write_card(scratch, Path(folder).resolve().name if repo_id is None else repo_id, base_model=base)

    return write_folder(folder, fill, overwrite=overwrite)


def push_self_contained(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: object | None = None,
    private: bool = True,
    token: str | None = None,
    commit_message: str = "Upload model and its code",
) -> CommitInfo:
    """`export_self_contained` straight into a repository of the Hub, which is made if there is none.

    Args:
        model: a model of this package; adapters must be merged first.
        repo_id: "owner/name".
        tokenizer: a tokenizer or processor, saved along when given.
        private: whether the repository is private. One that exists and is public is then refused.
        token: of the Hub; the stored one by default.
        commit_message: of the one commit.

    Raises:
        ValueError: as `export_self_contained`, and as `hf_ext.hub.upload.upload_files`.
        OSError: the Hub cannot be reached or refuses.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = export_self_contained(model, Path(scratch) / "model", tokenizer=tokenizer, repo_id=repo_id)
        return upload_files(files_to_push(folder), repo_id, private=private, token=token, commit_message=commit_message)


def check_classes(model: PreTrainedModel) -> Architecture:
    """The model's architecture; ValueError if a class that it is made of is not this package's."""
    architecture, name = architecture_of(model.config.model_type), type(model).__name__
    if name not in architecture.class_names() or type(model) is not architecture.load(name):
        raise ValueError(
            f"{name} is not one of the classes of {architecture.name} ({', '.join(architecture.class_names())}), and "
            "code from outside this package is not copied; give a model of one of these classes."
        )
    for registry in (POSITIONS, NORMS, FEEDFORWARDS):
        value = getattr(model.config, registry.field, None)
        if value in registry and not isinstance(registry.choice(value).target, str):
            raise ValueError(
                f"{registry.field}={value!r} is a class of your own, and code from outside this package is not copied; "
                "save the model with save_pretrained, and import your class before loading it."
            )
    return architecture


# --- what goes into the folder ------------------------------------------------------------------------------------


def add_code(folder: Path, architecture: Architecture) -> None:
    """Make a folder with a saved model self-contained: its modules, and the entries that lead to them."""
    models = {name: architecture.load(name).__module__ for name in architecture.class_names()}
    pipelines = PIPELINES.get(architecture.name, {})
    along = [module for module, _, _ in pipelines.values()]
    for module in needed_modules([architecture.config_class.__module__, *models.values(), *along]):
        text = flatten(module)
        if module in models.values():
            heads = {auto: name for auto, name in architecture.heads.items() if models[name] == module}
            # A pipeline's file is no import of the model, but comes along with it whenever it is saved.
            text += known_to_pipelines(architecture, heads) + copied_along(along)
        (folder / f"{flat_name(module)}.py").write_text(text, encoding="utf-8")

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoConfig": f"{flat_name(architecture.config_class.__module__)}.{architecture.config}"}
    config["auto_map"] |= {auto: f"{flat_name(models[name])}.{name}" for auto, name in architecture.heads.items()}
    if pipelines:
        config["custom_pipelines"] = {
            task: {"impl": f"{flat_name(module)}.{name}", "pt": [auto_class]}
            for task, (module, name, auto_class) in pipelines.items()
        }
    write_json(folder / "config.json", config)
    if any((folder / file).is_file() for file in TOKENIZER_FILES) and not (folder / "tokenizer_config.json").is_file():
        write_json(folder / "tokenizer_config.json", {})
    for file, classes in companion_classes(architecture).items():
        # Without a class of its own, a tokenizer's or processor's is looked up by the official model type.
        if (folder / file).is_file():
            content = json.loads((folder / file).read_text(encoding="utf-8"))
            write_json(folder / file, classes | content)


def flat_name(module: str) -> str:
    """Name of a module of this package in the folder: `hf_ext.layers.norms` -> `layers_norms`, a file of an
    architecture under its own name."""
    parts = module.split(".")[1:]
    return "_".join(parts[2:] if parts[0] == "models" else parts)


def is_module(name: str) -> bool:
    return name.startswith("hf_ext.") and (ROOT.parent / (name.replace(".", "/") + ".py")).is_file()


@functools.cache
def source(module: str) -> str:
    return (ROOT.parent / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")


@functools.cache
def imports_of(text: str) -> list[ast.ImportFrom]:
    """The imports of this package's modules in a file."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = [node for node in nodes if ast.unparse(node).split()[1].split(".")[0] == "hf_ext"]
    unknown = [ast.unparse(node) for node in ours if isinstance(node, ast.Import) or not is_module(node.module)]
    assert not unknown, f"only `from hf_ext.module import name` can be rewritten: {unknown}"
    return ours


@functools.cache
def named_in(text: str) -> list[str]:
    """Modules that a file names in a text and imports when they are wanted: the registry's "module:class"."""
    texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return list(dict.fromkeys(v.split(":")[0] for v in texts if isinstance(v, str) and is_module(v.split(":")[0])))


def needed_modules(modules: list[str]) -> list[str]:
    """These modules and all modules of this package that they import, directly or not."""
    needed, waiting = {}, list(modules)
    while waiting:
        module = waiting.pop()
        if module not in needed:
            needed[module] = text = source(module)
            waiting += [node.module for node in imports_of(text)] + named_in(text)
    assert len({flat_name(module) for module in needed}) == len(needed), "two modules would be one file"
    return sorted(needed)


def flatten(module: str) -> str:
    """The text of a module with its imports rewritten for the folder."""
    text = source(module)
    lines = text.splitlines(keepends=True)
    for node in imports_of(text):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from .{flat_name(node.module)} import", 1)
    flat = "".join(lines)
    for name in named_in(text):
        flat = re.sub(rf"(?<=[\"']){re.escape(name)}(?=[:\"'])", f".{flat_name(name)}", flat)
    origin = module.replace(".", "/")
    return f"# {origin}.py of hf_ext {hf_ext.__version__} (Apache-2.0).\n" + flat + copied_along(named_in(text))


def copied_along(modules: list[str]) -> str:
    """Code that makes the library copy further files wherever it copies this one."""
    if not modules:
        return ""
    lines = "".join(f"    from .{flat_name(name)} import __name__ as _  # noqa: F401\n" for name in modules)
    return f"\n\ndef _files() -> None:\n    # Never called: the loader copies the files that it sees imported.\n{lines}"


def known_to_pipelines(architecture: Architecture, heads: dict[str, str]) -> str:
    """Code that enters the heads in the tables by which pipelines tell what a class is for."""
    entries = "".join(f'    "{auto_class}": "{name}",\n' for auto_class, name in heads.items())
    return (
        "\n\nfrom transformers.models.auto import modeling_auto as _auto  # noqa: E402\n\n"
        "# Pipelines tell by these tables of names what a class is for.\n"
        f"for _auto_class, _name in {{\n{entries}}}.items():\n"
        f'    getattr(_auto, _auto_class)._model_mapping._model_mapping["{architecture.model_type}"] = _name\n'
    )
