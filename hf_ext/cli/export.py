"""`hf-ext export`: write a model in the official format, for the stock class and everything that goes by it, or with
the code that it needs."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from hf_ext.cli.models import FoundModel, find_model, quiet

# What stands next to the weights and belongs to the model; copied as it is, because it is the official format already.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def export(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hub id; a PEFT adapter together with --merge.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that is in the folder.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge a PEFT adapter into its base model.")] = False,
    pickle: Annotated[
        bool, typer.Option("--pickle", help="Read pickled weights, of whose origin you are sure.")
    ] = False,
    self_contained: Annotated[
        bool,
        typer.Option("--self-contained", help="With its code, for machines without hf_ext."),
    ] = False,
) -> None:
    """Write a model in the official format, with its tokenizer files; the stock class, vLLM and others load it."""
    if not model:
        raise typer.BadParameter("is empty; give a folder or a Hub id", param_hint="'MODEL'")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder.")
    if Path(model).is_dir() and Path(model).resolve().is_relative_to(out.resolve()):
        raise typer.BadParameter("is or contains the model's own folder; give another one", param_hint="'OUT'")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"{out} exists and is not empty; give another folder, or --overwrite to replace it.")
        if not (out / "config.json").is_file():  # the whole folder is replaced: not somebody's home
            raise ValueError(f"{out} holds something other than a model, and is not overwritten; give another folder.")
    found = find_model(model)
    if merge and found.adapter is None:
        raise typer.BadParameter(f"{model} is no PEFT adapter, there is nothing to merge", param_hint="'--merge'")
    if found.adapter is not None and not merge:
        raise ValueError(
            f"{model} is a PEFT adapter of {found.base or 'another model'}; "
            "add --merge to merge it and export the result."
        )
    import hf_ext

    with quiet(context):
        if found.adapter is None:
            exported, sources = load_as_saved(found, dtype="auto", pickle=pickle), [found.source]
        else:
            base = find_model(found.base) if found.base else None
            if base is None:
                raise ValueError(f"{model}/adapter_config.json names no base model; put its folder or Hub id there.")
            from peft import PeftModel

            whole = load_as_saved(base, dtype="auto", task=found.adapter.get("task_type"), pickle=pickle)
            exported = PeftModel.from_pretrained(whole, found.source).merge_and_unload()
            sources = [base.source, found.source]  # the adapter's own tokenizer, if any, wins
        companions = Companions(sources)
        write = hf_ext.export_self_contained if self_contained else hf_ext.export_official
        write(exported, out, tokenizer=companions, overwrite=overwrite)
    copied = companions.copied
    files = f" with {', '.join(copied)}" if copied else ", without tokenizer files: there were none"
    name = type(exported).__name__
    print(f"wrote {name if self_contained else name.removeprefix('Ext')} to {out}{files}")


# The class that an adapter's task was trained on, where the base checkpoint was saved from another head.
_TASK_HEADS = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
}


def load_as_saved(found: FoundModel, *, dtype, task: str | None = None, pickle: bool = False):
    """The checkpoint in our class: the one that it was saved from, or the one for a PEFT task type; of pickled weights
    only where `pickle` says so."""
    from hf_ext.auto import architecture_of
    from hf_ext.inspection.inputs import resolve_head

    architecture = architecture_of(found.config["model_type"])
    head = _TASK_HEADS.get(task or "")
    name = resolve_head(architecture, head, found.config.get("architectures"))
    return architecture.load(name).from_pretrained(found.source, dtype=dtype, use_safetensors=False if pickle else None)


@dataclass
class Companions:
    """Tokenizer and processor files of folders or Hub ids, as they are; of two with one name the later's."""

    sources: list[str]
    copied: list[str] = field(default_factory=list)

    def save_pretrained(self, folder: Path) -> None:
        """Copy them into the folder, and keep the names of those copied."""
        from transformers.utils import cached_file

        for source in self.sources:
            for name in COMPANIONS:
                path = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
                if path is not None:
                    shutil.copyfile(path, folder / name)
                    self.copied.append(name)
        self.copied = list(dict.fromkeys(self.copied))
