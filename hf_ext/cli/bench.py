"""`hf-ext bench`: seconds and peak memory of our class against the stock class."""

from pathlib import Path
from typing import Annotated

import typer

from hf_ext.cli.models import check_writable, find_model, megabytes, quiet, refuse_adapter, write_json


def bench(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, Hub id, or an architecture's name (random weights).")],
    head: Annotated[str | None, typer.Option(help="Class or end of one, such as masked-lm.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a config field; repeatable.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the longest row.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; their median is reported.")] = 5,
    scenario: Annotated[
        list[str] | None, typer.Option(help="inference, training, generate, or training-ragged and so on; repeatable.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    attention: Annotated[str, typer.Option(help="Attention implementation of both.")] = "sdpa",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peaks, in fresh processes.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Time our class against the stock class: inference, training steps, generation; ragged and full batches.

    Both run in one process, alternating; the median counts. Peaks are above what the model itself takes.
    """
    import rich.box
    from rich.console import Console
    from rich.table import Table

    check_writable(json_file)
    import hf_ext
    from hf_ext.inspection.benchmark import benchmark, parse_overrides

    names = {name for a in hf_ext.architectures().values() for name in (a.name, a.model_type, a.official_model_type)}
    if model not in names or (Path(model) / "config.json").is_file():
        found = find_model(model)
        refuse_adapter(found, "bench")
        model = found.source
    console = Console()
    with quiet(context), console.status("building") as status:
        rows = benchmark(
            model,
            head=head,
            overrides=parse_overrides(settings or []),
            batch_size=batch_size,
            length=length,
            repeats=repeats,
            scenarios=scenario or None,
            threads=threads,
            dtype=dtype,
            attn_implementation=attention,
            device=device,
            new_tokens=new_tokens,
            memory=memory,
            progress=status.update,
        )
    other = next((row.stock_attention for row in rows if row.stock_attention != attention), None)
    kernels = f"{attention}, stock has only {other}" if other else attention
    table = Table(
        title=f"{model}: ours against stock ({kernels}, {dtype}); ratios above 1 favour ours",
        box=rich.box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("scenario")
    headings = ("tokens", "ours\ns", "stock\ns", "speed", "tokens\nper s")
    for heading in (*headings, "ours\nMiB", "stock\nMiB", "memory") if memory else headings:
        table.add_column(heading, justify="right")
    for row in rows:
        ratio = row.memory_ratio
        table.add_row(
            row.scenario,
            f"{row.tokens:,}",
            f"{row.ours_seconds:.3g}",
            f"{row.stock_seconds:.3g}",
            f"{row.speed_ratio:.2f}x",
            f"{row.tokens_per_second('ours'):,.0f}",
            *((megabytes(row.ours_peak), megabytes(row.stock_peak), f"{ratio:.2f}x") if ratio is not None else ()),
        )
    console.print(table)
    if json_file is not None:
        write_json(json_file, [row.to_dict() for row in rows])
