"""`hf-ext finetune`: fine-tune a checkpoint on a file, a folder or a Hub dataset."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_ext.training.settings import LEARNING_RATES, Method, Task

if TYPE_CHECKING:
    from hf_ext.training.run import FinetuneResult

_RATES = ", ".join(f"{rate:g} {method}" for method, rate in LEARNING_RATES.items())
_COLUMNS, _TRAINING, _ADAPTERS, _RUN = "Data", "Training", "LoRA and QLoRA", "Run"


def finetune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Hub id or folder of a checkpoint.")],
    data: Annotated[
        str, typer.Argument(help="csv, tsv, json, jsonl, parquet or txt file, a folder of them, or a Hub dataset.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the final model and the checkpoints.")],
    task: Annotated[Task, typer.Option(help="What to learn.")] = "text-classification",
    method: Annotated[Method, typer.Option(help="What to train.")] = "full",
    text_column: Annotated[
        str | None,
        typer.Option(help="Column of the text (words, question); found by its name.", rich_help_panel=_COLUMNS),
    ] = None,
    text_pair_column: Annotated[
        str | None, typer.Option(help="Column of the second text or the context.", rich_help_panel=_COLUMNS)
    ] = None,
    label_column: Annotated[
        list[str] | None,
        typer.Option(help="Column of the label; repeat for multi-label columns of 0 and 1.", rich_help_panel=_COLUMNS),
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="Data to evaluate on after each epoch.", rich_help_panel=_COLUMNS)
    ] = None,
    eval_share: Annotated[
        float,
        typer.Option(help="Share of rows held out if there is no evaluation data; 0: none.", rich_help_panel=_COLUMNS),
    ] = 0.1,
    data_config: Annotated[
        str | None, typer.Option(help="Configuration of a Hub dataset, such as sst2.", rich_help_panel=_COLUMNS)
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(help="Tokens per example; default 128, or 256 for running text.", rich_help_panel=_COLUMNS),
    ] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data.", rich_help_panel=_TRAINING)] = 3.0,
    batch_size: Annotated[int, typer.Option(help="Examples per device and step.", rich_help_panel=_TRAINING)] = 16,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(help="Batches per optimiser step.", rich_help_panel=_TRAINING)
    ] = 1,
    learning_rate: Annotated[
        float | None, typer.Option(help=f"Peak learning rate; default {_RATES}.", rich_help_panel=_TRAINING)
    ] = None,
    warmup_share: Annotated[float, typer.Option(help="Share of steps for warm-up.", rich_help_panel=_TRAINING)] = 0.06,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay.", rich_help_panel=_TRAINING)] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Clip gradients to this norm.", rich_help_panel=_TRAINING)] = 1.0,
    scheduler: Annotated[
        str,
        typer.Option(
            help="Learning rate schedule: linear, cosine, constant_with_warmup, ...", rich_help_panel=_TRAINING
        ),
    ] = "linear",
    early_stopping_patience: Annotated[
        int, typer.Option(help="Evaluations without improvement before stopping; 0: never.", rich_help_panel=_TRAINING)
    ] = 2,
    bf16: Annotated[bool, typer.Option(help="Compute in bfloat16.", rich_help_panel=_TRAINING)] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option(help="Less memory for about a third more time.", rich_help_panel=_TRAINING)
    ] = False,
    new_head: Annotated[
        bool, typer.Option("--new-head", help="Replace a head that has other labels.", rich_help_panel=_TRAINING)
    ] = False,
    lora_rank: Annotated[int, typer.Option(help="Rank r, usually 8 to 64.", rich_help_panel=_ADAPTERS)] = 16,
    lora_alpha: Annotated[
        int, typer.Option(help="Scaling; the update counts alpha / r.", rich_help_panel=_ADAPTERS)
    ] = 32,
    lora_dropout: Annotated[float, typer.Option(help="Dropout before the adapters.", rich_help_panel=_ADAPTERS)] = 0.05,
    lora_target: Annotated[
        list[str] | None,
        typer.Option(help="Layer to adapt, repeatable, or all-linear; PEFT's choice else.", rich_help_panel=_ADAPTERS),
    ] = None,
    merge_adapter: Annotated[
        bool, typer.Option("--merge-adapter", help="Save a whole model, not an adapter.", rich_help_panel=_ADAPTERS)
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of split, new weights and order.", rich_help_panel=_RUN)] = 42,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint.", rich_help_panel=_RUN)
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier result in the folder.", rich_help_panel=_RUN)
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any field of TrainingArguments as key=value; repeatable.", rich_help_panel=_RUN),
    ] = None,
) -> None:
    """Fine-tune a checkpoint: all of it, its head, or LoRA adapters on a frozen (4-bit) model.

    Keeps the best epoch where there is evaluation data, and says at the end what the loss curves show.
    """
    from hf_ext.training.settings import FinetuneSettings, parse_assignments

    label = label_column[0] if label_column and len(label_column) == 1 else label_column
    settings = FinetuneSettings(
        model=model,
        data=data,
        output=output,
        task=task,
        method=method,
        text_column=text_column,
        text_pair_column=text_pair_column,
        label_column=label or None,
        eval_data=eval_data,
        eval_share=eval_share,
        data_config=data_config,
        max_length=max_length,
        epochs=epochs,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=learning_rate,
        warmup_share=warmup_share,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        scheduler=scheduler,
        early_stopping_patience=early_stopping_patience,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        lora_targets=lora_target or None,
        merge_adapter=merge_adapter,
        new_head=new_head,
        seed=seed,
        bf16=bf16,
        gradient_checkpointing=gradient_checkpointing,
        resume=resume,
        overwrite=overwrite,
        trainer_args=parse_assignments(set_ or []),
    )
    settings.check()

    from hf_ext.training.run import finetune as run

    with warnings.catch_warnings():
        if not (context.obj or {}).get("debug"):
            warnings.simplefilter("ignore", FutureWarning)  # for the libraries' authors, not for who trains a model
        result = run(settings)
    if result.is_main_process:
        _report(result)


def _report(result: "FinetuneResult") -> None:
    """Print the table per epoch, the saved model's metrics and what was noticed."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    names = list(dict.fromkeys(name for row in result.epochs for name in row if name != "epoch"))
    table = Table("epoch", *(name.replace("_", " ") for name in names), title="Fine-tuning")
    for row in result.epochs:
        cells = (f"{row[name]:.4g}" if name in row else "-" for name in names)
        table.add_row(str(row["epoch"]), *cells)
    console.print(table)
    share = f"{result.trainable:,} of {result.parameters:,} parameters ({result.trainable_share:.2%})"
    # plain text: brackets in a user's path or label are no markup, and a pipe should get whole lines
    lines = [f"trained {share} in {result.steps} steps"]
    if result.metrics:
        lines.append("saved model: " + ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items()))
    lines += [f"note: {note}" for note in result.notes]
    lines += [f"problem: {line}" for line in result.diagnosis]
    lines.append(f"saved to {result.output}")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
