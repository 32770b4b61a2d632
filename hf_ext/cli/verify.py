"""`hf-ext verify`: is a checkpoint the same in our class as in the stock class?"""

from pathlib import Path
from typing import Annotated

import typer

from hf_ext.cli.models import check_writable, find_model, quiet, refuse_adapter, torch_dtype, write_json


def verify(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hub id, in the official format or in ours.")],
    head: Annotated[
        str | None, typer.Option(help="Class or end of one, such as masked-lm; default: as the checkpoint was saved.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=2)] = 4,
    length: Annotated[int, typer.Option(min=4, help="Tokens of the longest row.")] = 64,
    seed: int = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    attention: Annotated[str | None, typer.Option(help="eager, sdpa, ...; default: the library's choice.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
) -> None:
    """Compare a checkpoint in our class with the stock class: outputs, losses, gradients, generated tokens, files.

    Exit code 1 when anything differs.
    """
    import rich.box
    from rich.console import Console
    from rich.table import Table

    check_writable(json_file)
    if dtype == "auto":
        raise typer.BadParameter("both models run in one dtype; choose float32, bfloat16 or float16")
    torch_dtype(dtype)
    found = find_model(model)
    refuse_adapter(found, "verify")
    from hf_ext.inspection.parity import compare

    console = Console()
    with quiet(context), console.status("loading") as status:
        report = compare(
            found.source,
            head=head,
            batch_size=batch_size,
            length=length,
            seed=seed,
            dtype=dtype,
            attn_implementation=attention,
            progress=status.update,
        )
    title = f"{report.ours} against {report.stock}, {report.dtype}, {report.attention}"
    table = Table(title=title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("comparison", "max abs", "max rel", "allowed", ""):
        table.add_column(heading, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for row in report.rows:
        numbers = [f"{value:.1e}" if value is not None else "" for value in (row.max_abs, row.max_rel, row.tolerance)]
        table.add_row(row.name, *numbers, "[green]ok[/]" if row.ok else "[red]DIFFERS[/]", row.detail)
    console.print(table)
    if json_file is not None:
        write_json(json_file, report.to_dict())
    if not report.ok:
        console.print(f"{len(report.failed)} of {len(report.rows)} comparisons differ.")
        raise typer.Exit(1)
    console.print(f"All {len(report.rows)} comparisons agree.")
