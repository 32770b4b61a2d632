"""`hf-ext push`: a folder onto the Hub, after showing what goes there."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hf_ext.cli.export import Companions, load_as_saved
from hf_ext.cli.models import find_model, megabytes, quiet


def push(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(help="Folder of a model or a PEFT adapter.")],
    repo: Annotated[str, typer.Argument(help="Repository, as owner/name; made if there is none.")],
    public: Annotated[bool, typer.Option("--public", help="Everybody may see it; without this, only you.")] = False,
    self_contained: Annotated[
        bool, typer.Option("--self-contained", help="With its code, for machines without hf_ext.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Upload a model to the Hub: shows the files and asks first. The token is that of `hf auth login` or HF_TOKEN."""
    if not Path(folder).expanduser().is_dir():
        raise ValueError(f"there is no folder {folder!r}; give one that save_pretrained wrote.")
    found = find_model(folder)
    if self_contained and found.adapter is not None:
        raise ValueError(f"{folder} is a PEFT adapter; merge it first: hf-ext export {folder} MERGED --merge")

    with tempfile.TemporaryDirectory() as scratch, quiet(context):
        from hf_ext.hub.card import model_card
        from hf_ext.hub.upload import files_to_push, upload_files

        source = Path(found.source)
        files = files_to_push(with_code(source, Path(scratch), repo) if self_contained else source)
        contents: dict[str, Path | bytes] = dict(files)
        if "README.md" not in files:
            contents["README.md"] = str(model_card(source, repo)).encode()
        if not yes:
            show(contents, repo, public=public)
            if not typer.confirm("Upload?"):
                print("nothing was uploaded", file=sys.stderr)
                raise typer.Exit(1)
        done = upload_files(contents, repo, private=not public)
    print(f"uploaded {len(contents)} files: {done.commit_url}")


def with_code(source: Path, scratch: Path, repo: str) -> Path:
    """The model of a folder written with its code, and with the card and the summary of training that it has."""
    import shutil

    import hf_ext
    from hf_ext.hub.card import SUMMARY, write_card

    model = load_as_saved(find_model(str(source)), dtype="auto")
    folder = hf_ext.export_self_contained(model, scratch / "model", tokenizer=Companions([str(source)]), repo_id=repo)
    (folder / "README.md").unlink()  # the source's, or one that tells of its training
    for name in ("README.md", SUMMARY):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    write_card(folder, repo)
    return folder


def show(contents: dict[str, Path | bytes], repo: str, *, public: bool) -> None:
    """The files with their sizes, and who may see them."""
    from rich.console import Console
    from rich.table import Table

    sizes = {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in contents.items()}
    table = Table("file", "MB")
    for name, size in sorted(sizes.items()):
        table.add_row(name, megabytes(size) if size >= 2**20 / 20 else "< 0.1")
    Console().print(table)
    who = "public: everybody may see it" if public else "private"
    print(f"{len(sizes)} files, {megabytes(sum(sizes.values()))} MB, to {repo} ({who})")
