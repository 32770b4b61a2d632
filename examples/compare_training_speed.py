"""What a step of `Trainer` costs with our classes and with the official ones: all weights, LoRA, two processes.

    python examples/compare_training_speed.py --models bert llama

A step is what `Trainer` does for one batch: forward, backward, clipping, AdamW, the schedule, its bookkeeping. Models
have random weights; both sides see the same batches of rows of unequal length, padded on the right. In each process
they run in turn, a few steps at a time, so that a busy machine slows both alike. Medians are printed, as stock over
ours: above 1, ours is faster.

With `--processes 2` (the default) it starts itself again under `torchrun`, where each process has one thread and its
own batches (DDP); the throughput is that of all processes against one.
"""

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

import hf_ext
from hf_ext.inspection.inputs import complete_config, make_batch, ragged_lengths

# What is measured, and how wide it is; the official names of the fields.
IMAGES = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
SMALL = IMAGES | {"vocab_size": 8000}
BART = {"d_model": 384, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 6}
BART |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "vocab_size": 8000}
T5 = {"d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 3, "num_heads": 6, "vocab_size": 8000}
SIZES = {
    "bert": ("ExtBertForSequenceClassification", SMALL | {"intermediate_size": 1536}),
    "roberta": ("ExtRobertaForMaskedLM", SMALL | {"intermediate_size": 1536}),
    "llama": ("ExtLlamaForCausalLM", SMALL | {"intermediate_size": 1024, "num_key_value_heads": 2}),
    "gpt2": ("ExtGPT2LMHeadModel", SMALL),
    "bart": ("ExtBartForConditionalGeneration", BART),
    "t5": ("ExtT5ForConditionalGeneration", T5),
    "vit": ("ExtViTForImageClassification", IMAGES | {"intermediate_size": 1536}),
}
METHODS, SIDES = ("full", "lora"), ("ours", "stock")
UNTIMED = 2  # steps at the start of each run


class Stopwatch(TrainerCallback):
    """Seconds of every step but the first of a run: the processor's, or with several processes the wall clock's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.cuda.is_available()
        self.clock = time.process_time if alone else time.perf_counter

    def on_step_begin(self, args: object, state: object, *_: object, **__: object) -> None:
        self.start = self.clock()

    def on_step_end(self, args: object, state: transformers.TrainerState, *_: object, **__: object) -> None:
        if state.global_step > UNTIMED:
            self.seconds.append(self.clock() - self.start)


def build(name: str, side: str, method: str) -> PreTrainedModel:
    """One side's model, with random weights. LoRA adapts the same layers on both: PEFT's own choice may differ."""
    class_name, fields = SIZES[name]
    cls = getattr(hf_ext if side == "ours" else transformers, class_name.removeprefix("Ext" * (side == "stock")))
    set_seed(0)
    model = cls(complete_config(cls.config_class(**fields), class_name))
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")) if method == "lora" else model


def seconds_per_step(name: str, method: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step of either side."""
    processes, rank = (int(os.environ.get(x, alone)) for x, alone in (("WORLD_SIZE", "1"), ("RANK", "0")))
    models, batches = {side: build(name, side, method) for side in SIDES}, []
    kind, config = getattr(hf_ext, SIZES[name][0]), models["ours"].config
    for seed in range(1000 * rank, 1000 * rank + UNTIMED + args.steps):
        batch = make_batch(kind, config, ragged_lengths(args.batch_size, args.length, seed=seed), seed=seed)
        batches.append({**batch.inputs, **batch.labels})
    watches = {side: Stopwatch() for side in SIDES}
    for run in range(args.runs):
        for side in SIDES if run % 2 == 0 else reversed(SIDES):
            with tempfile.TemporaryDirectory() as scratch:
                arguments = TrainingArguments(
                    scratch, max_steps=len(batches), per_device_train_batch_size=1, save_strategy="no", report_to=[],
                    logging_strategy="no", disable_tqdm=True, ddp_find_unused_parameters=False,
                    train_sampling_strategy="sequential", use_cpu=not torch.cuda.is_available(),
                )  # fmt: skip
                # a row of this data set is a batch
                trainer = Trainer(models[side], arguments, operator.itemgetter(0), train_dataset=batches * processes)
                trainer.add_callback(watches[side])
                trainer.remove_callback(PrinterCallback)
                trainer.train()
    result = {side: statistics.median(watch.seconds) for side, watch in watches.items()}
    print(f"{name} {method}, process {rank} of {processes}, seconds: {result}", file=sys.stderr)
    return result


def table(alone: dict, together: dict, processes: int) -> str:
    """Markdown; speed as stock over ours, throughput as that of all processes over one."""
    lines = ["| model | trained | step, stock / ours |", "|---|---|---|"]
    if together:
        lines[0] += f" {processes} processes, stock / ours | throughput against one process, ours | stock |"
        lines[1] += "---|---|---|"
    for job, one in alone.items():
        name, method = job.split()
        cells = [SIZES[name][0], "all weights" if method == "full" else "LoRA", f"{one['stock'] / one['ours']:.2f}"]
        if together:
            many = together[job]
            cells.append(f"{many['stock'] / many['ours']:.2f}")
            cells += [f"{processes * one[side] / many[side]:.2f}" for side in SIDES]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> str:
    """Measure, print the table and return it."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--processes", type=int, default=2, help="of the runs with DDP; 1 leaves them out")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of a step, in each process")
    parser.add_argument("--length", type=int, default=256, help="tokens of the longest row")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a run")
    parser.add_argument("--runs", type=int, default=2, help="runs of each side")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = {f"{name} {how}": seconds_per_step(name, how, args) for name in args.models for how in METHODS}
    if "WORLD_SIZE" in os.environ:  # one of several
        print(json.dumps(results) if os.environ["RANK"] == "0" else "", end="")
        return ""
    together = {}
    if args.processes > 1:
        command = ["torch.distributed.run", "--standalone", f"--nproc_per_node={args.processes}", __file__]
        command += sys.argv[1:] if argv is None else argv
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        told = subprocess.check_output([sys.executable, "-m", *command], env=environment, text=True)
        together = json.loads(told.splitlines()[-1])
    print(text := table(results, together, args.processes))
    return text


if __name__ == "__main__":
    main()
