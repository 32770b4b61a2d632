"""Memory, time and loss of four ways to fine-tune a model: all weights, LoRA, QLoRA, the head alone.

    python examples/convert_smollm2_gguf.py --output smollm2
    python examples/compare_finetuning_methods.py --model smollm2 --steps 10

The methods are those of `hf-ext finetune --method`, with its learning rates; every one trains on the same rows in the
same order. The task is classification with a head of its own (which part of Python's standard library is a text
from?), since a language model whose head is its embedding has no head that could be trained alone. A row is filled to
`--length` with docstrings of one topic, so that there is no padding.

Each method has a fresh process, and the allocator gives freed memory back at once, so that a peak is that method's own.
Without a GPU the time of a step is CPU time, all threads together: what else the machine does changes it less.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import chain, cycle, islice

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import hf_ext
from hf_ext.data.docstrings import collect_docstrings
from hf_ext.inspection.memory import PeakMemory, measured_environment
from hf_ext.training.methods import apply_method, load_model, parameter_counts
from hf_ext.training.settings import METHODS, FinetuneSettings
from hf_ext.training.tasks import TextClassification


def make_rows(tokenizer: PreTrainedTokenizerBase, count: int, length: int) -> tuple[list[dict], list[str]]:
    """`count` rows of `length` tokens, the topics in turn, and the topics' names."""
    texts = defaultdict(list)
    for docstring in collect_docstrings():
        texts[docstring.topic].append(docstring.text)
    topics = sorted(texts)
    streams = [cycle(chain.from_iterable(tokenizer(texts[topic]).input_ids)) for topic in topics]
    labels = [i % len(topics) for i in range(count)]
    return [{"input_ids": list(islice(streams[i], length)), "labels": i} for i in labels], topics


class Stopwatch(TrainerCallback):
    """Seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.clock = time.perf_counter if torch.cuda.is_available() else time.process_time

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.start = self.clock()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        self.seconds.append(self.clock() - self.start)


def measure(args: argparse.Namespace) -> dict[str, float | str]:
    """Train with one method in this process."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows, topics = make_rows(tokenizer, args.steps * args.batch_size, args.length)
    settings = FinetuneSettings(args.model, data="", output="", method=args.method, bf16=args.bf16)
    task = TextClassification()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with hf_ext.takeover():
        model, new = load_model(settings, task, num_labels=len(topics))
    model.config.pad_token_id = tokenizer.pad_token_id
    model = apply_method(model, settings, task, new)
    trainable, total = parameter_counts(model)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=args.steps, per_device_train_batch_size=args.batch_size, bf16=args.bf16,
            per_device_eval_batch_size=args.batch_size, learning_rate=settings.effective_learning_rate,
            lr_scheduler_type="constant", save_strategy="no", logging_strategy="no", disable_tqdm=True, report_to=[],
            train_sampling_strategy="sequential", use_cpu=device == "cpu", dataloader_pin_memory=device == "cuda",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        before = trainer.evaluate()["eval_loss"]
        with PeakMemory(device) as memory:
            trainer.train()
        after = trainer.evaluate()["eval_loss"]
    return {
        "method": args.method,
        "trainable": trainable / total,
        "weights": model.get_memory_footprint(),  # resident memory would count the file that they were read from
        "above": memory.above,
        "seconds": statistics.median(watch.seconds[1:] or watch.seconds),
        "before": before,
        "after": after,
    }


def table(results: list[dict], steps: int) -> str:
    """Markdown."""
    lines = [
        f"| method | trained | weights | training adds | time per step | loss before | after {steps} steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        weights, above = (f"{r[name] / 2**20:,.0f} MiB" for name in ("weights", "above"))
        cells = [r["method"], f"{r['trainable']:.3%}", weights, above, f"{r['seconds']:.2f} s", f"{r['before']:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {r['after']:.3f} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> list[dict]:
    """Measure each method in a process of its own; print the table and return what it holds."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="folder or Hub id of a checkpoint")
    parser.add_argument("--method", choices=METHODS, help="measure one method in this process, and print JSON")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    args = parser.parse_args(argv)
    if args.method:
        results = [measure(args)]
        print(json.dumps(results[0]))
        return results
    given = sys.argv[1:] if argv is None else argv
    results = []
    for method in METHODS:
        command = [sys.executable, __file__, *given, "--method", method]
        done = subprocess.run(command, env=measured_environment(), stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
    print(table(results, args.steps))
    return results


if __name__ == "__main__":
    main()
