"""`hf-ext`: the commands put together, and the one place where an error becomes a readable line.

Nothing here imports torch or transformers; a command imports what it needs when it runs.
"""

import sys
import traceback
from typing import Annotated

import typer
from typer.core import TyperGroup

from hf_ext.cli.attention import attention
from hf_ext.cli.bench import bench
from hf_ext.cli.export import export
from hf_ext.cli.finetune import finetune
from hf_ext.cli.generate import generate
from hf_ext.cli.models import models
from hf_ext.cli.push import push
from hf_ext.cli.quickstart import quickstart
from hf_ext.cli.verify import verify

USAGE_ERROR = 2
INTERRUPTED = 130


def describe(error: BaseException) -> str:
    """What went wrong and what would mend it, on one line."""
    kind = type(error).__name__
    text = " ".join(str(error).split())
    if hasattr(error, "format_message"):  # a usage error; names the option
        text = " ".join(error.format_message().split())
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "hf-ext"
        return f"{text}{'' if text.endswith(('.', '?')) else '.'} See '{command} --help'."
    if kind == "SafetensorError":
        return f"a weights file cannot be read ({text}): it is incomplete or damaged; fetch or save the model again."
    if kind in ("OutOfMemoryError", "MemoryError") or "can't allocate memory" in text:
        return f"out of memory; use a smaller batch, a shorter length or a smaller dtype. {text}".strip()
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"there is no file {error.filename}; check the path."
    if isinstance(error, PermissionError) and error.filename:
        return f"no permission for {error.filename}; choose another place or change its permissions."
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        return f"the package {package} is missing; install it with: pip install {package}"
    if "ignore_mismatched_sizes" in text:  # the library's message points at a table that is kept off the screen
        return "the weights do not fit config.json: tensors have other shapes. Run again with --debug to see which."
    if isinstance(error, ValueError | OSError | RuntimeError | ImportError) and text:
        return text
    return f"unexpected {kind}: {text or 'no message'}. Run again with --debug to see where."


class _Group(TyperGroup):
    """Commands whose errors are one line on stderr, `error: ...`; exit code 1, 2 for usage errors, 130 interrupted."""

    def invoke(self, ctx) -> int:
        super().invoke(ctx)  # what a command function returns is for its Python callers and no exit code
        return 0

    def main(self, args=None, prog_name=None, complete_var=None, standalone_mode=True, **extra) -> int:
        arguments = list(sys.argv[1:] if args is None else args)
        # Wherever it stands on the line: people add it at the end of the command that has just failed.
        debug = "--debug" in arguments
        arguments = [argument for argument in arguments if argument != "--debug"]
        try:
            code = super().main(
                arguments, prog_name or "hf-ext", complete_var, standalone_mode=False, obj={"debug": debug}, **extra
            )
        except KeyboardInterrupt:
            code = INTERRUPTED
        except typer.Abort:
            print("error: stopped, because the input ended.", file=sys.stderr)
            code = 1
        except Exception as error:
            if debug:
                traceback.print_exc()
            sys.stdout.flush()
            print(f"error: {describe(error)}", file=sys.stderr)
            code = getattr(error, "exit_code", 1) if isinstance(error, typer.TyperException) else 1
        if code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        if standalone_mode:
            sys.exit(code)
        return code


app = typer.Typer(
    name="hf-ext",
    cls=_Group,
    help="Transformers in the Hugging Face format: the official checkpoints, at less time and memory.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback(invoke_without_command=True)
def common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show warnings, and the traceback of an error. May stand anywhere.")
    ] = False,
) -> None:
    if version:
        from hf_ext import __version__

        print(f"hf-ext {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command()(quickstart)
app.command()(finetune)
app.command()(generate)
app.command()(verify)
app.command()(bench)
app.command()(attention)
app.command()(export)
app.command()(push)
app.command()(models)


def main() -> None:
    """Entry point of the `hf-ext` script."""
    app()


if __name__ == "__main__":
    main()
