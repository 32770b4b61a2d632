"""Two processes on the CPU: tensor, pipeline and data parallelism of every registered language model.

`run()` starts the processes once and lets each go through all of `WORK`; `tests/test_parallel.py` reports what they
found. A process compares its share with the whole model, which it loads as well.

Shapes: B batch, T tokens.
"""

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from cases import IGNORED
from harness import (
    Subject,
    assert_close,
    assert_identical,
    build,
    gradients,
    no_dropout,
    scratch,
    state,
    stock_folder,
    subjects,
    trainer,
    training_rows,
)
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DistributedConfig

import hf_ext

PROCESSES = 2


def language_models(configs: str = "one") -> list[Subject]:
    """The causal and masked language models."""
    return subjects("causal", "masked", configs=configs)


def has_plan(subject: Subject) -> bool:
    """Whether the model says how its layers are split."""
    return bool(subject.our_config.base_model_tp_plan)


def heads_divide(subject: Subject) -> bool:
    """Whether each process gets whole heads; a plan may also leave attention whole, on every process."""
    config = subject.our_config(**subject.fields)
    if not any("attn." in name or "attention." in name for name in config.base_model_tp_plan):
        return True
    counts = (config.num_attention_heads, getattr(config, "num_key_value_heads", None))
    return all(count % PROCESSES == 0 for count in counts if count)


def planned() -> list[Subject]:
    """Every configuration of the models with a plan."""
    return [s for s in subjects("causal") if has_plan(s)]


def whole(x: Tensor) -> Tensor:
    """The full tensor of one that is spread over the processes."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(model: nn.Module, inputs: dict, labels: dict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of a forward pass, loss of a training step, and all its gradients."""
    model.eval()
    with torch.no_grad():
        logits = model(**inputs, skip_padding=False).logits
    model.train()
    loss = model(**inputs, **labels).loss
    loss.backward()
    return logits, loss.detach(), {name: whole(x) for name, x in gradients(model).items()}


def compare(actual: tuple, expected: tuple, what: str) -> None:
    for mine, reference, name in zip(actual[:2], expected[:2], ("logits", "loss"), strict=True):
        assert_close(whole(mine), reference, f"{what}, {name}")
    assert set(actual[2]) == set(expected[2]), what
    for name, reference in expected[2].items():
        assert_close(actual[2][name], reference, f"{what}, gradient of {name}")


def share_of_labels(subject: Subject, labels: dict) -> Tensor:
    """What each process divides its loss by, if all average their gradients: the labels of all, per process."""
    counted = labels["labels"][:, 1:] if subject.kind == "causal" else labels["labels"]
    return (counted != IGNORED).sum() / PROCESSES


def load_split(subject: Subject, **sizes: object) -> nn.Module:
    """Our model, loaded from its file into its place among the processes."""
    folder = stock_folder(subject)
    config = subject.our_config.from_pretrained(folder, **no_dropout(subject))
    return subject.ours.from_pretrained(folder, config=config, distributed_config=DistributedConfig(**sizes))


def check_tensor(subject: Subject) -> None:
    """Heads and inner widths are divided; where heads cannot be, that is said before anything is computed."""
    if not heads_divide(subject):
        try:
            load_split(subject, tp_size=PROCESSES, tp_plan="auto")
        except ValueError as error:
            assert re.match(rf"num_\w*heads \(\d+\) .*tp_size={PROCESSES}", str(error)), error
            return
        raise AssertionError("heads that cannot be divided were not refused")
    model = load_split(subject, tp_size=PROCESSES, tp_plan="auto")
    reference = build(subject.ours, subject, **no_dropout(subject))
    assert any(isinstance(x, DTensor) for x in model.parameters())
    for padding in ("none", "right"):
        inputs = subject.inputs(reference.config, padding)
        labels = subject.labels(reference.config, inputs)
        compare(step(model, inputs, labels), step(reference, inputs, labels), padding)
    prompt = inputs["input_ids"][:2]
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        tokens = [m.eval().generate(prompt, max_new_tokens=5, min_new_tokens=5, **options) for m in (model, reference)]
        assert torch.equal(*tokens), options


def check_pipeline(subject: Subject) -> None:
    """The first half of the blocks here, the second there. The library's pipeline knows only models whose parts are
    named as LLaMA's are."""
    base = subject.ours(subject.our_config(**subject.fields)).base_model
    if not all(hasattr(base, name) for name in ("embed_tokens", "layers", "norm")):
        return
    model = load_split(subject, pp_size=PROCESSES).eval()
    reference = build(subject.ours, subject)
    inputs = subject.inputs(reference.config, "right")
    with torch.no_grad():
        assert_close(model(**inputs).logits, reference(**inputs).logits, "logits of the pipeline")
    prompt = {"input_ids": inputs["input_ids"][:2], "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    tokens = [m.generate(**prompt, max_new_tokens=5, min_new_tokens=5) for m in (model, reference)]
    assert torch.equal(*tokens)


def shard(model: nn.Module) -> None:
    """FSDP2 as `accelerate` wraps: every class that is not to be split, then the whole."""
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    shared = set(model.get_input_embeddings().parameters()) if tied else set()
    for module in list(model.modules()):
        # A tied table belongs to two modules, and only the whole model holds both.
        if type(module).__name__ in model._no_split_modules and not shared & set(module.parameters()):
            fully_shard(module)
    fully_shard(model)


def check_sharded_files(subject: Subject) -> None:
    """A checkpoint that each process writes its part of is read back to the same parts, ties included, and the whole
    that is gathered from them is what one process has."""
    written, read = (build(subject.ours, subject) for _ in range(2))
    whole = {name: value.clone() for name, value in written.state_dict().items()}
    with torch.no_grad():
        for parameter in read.parameters():
            parameter.zero_()
    folder = [str(scratch())]
    dist.broadcast_object_list(folder)
    for model in (written, read):
        shard(model)
    checkpoint.save(get_model_state_dict(written), checkpoint_id=folder[0])
    parts = get_model_state_dict(read)
    checkpoint.load(parts, checkpoint_id=folder[0])
    set_model_state_dict(read, parts)
    gathered = get_model_state_dict(read, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert_identical(gathered, whole, "gathered from the parts")
    tied = written.get_input_embeddings().weight is written.get_output_embeddings().weight
    assert (read.get_input_embeddings().weight is read.get_output_embeddings().weight) == tied


def check_sharded_data(subject: Subject) -> None:
    """Each process has half of the rows and a part of every block's parameters: divided by the model's plan, and by
    the classes that it says are not to be split, as `accelerate` does."""
    by_hand, reference = (build(subject.ours, subject, **no_dropout(subject)) for _ in range(2))
    shard(by_hand)
    by_plan = load_split(subject, fsdp_size=PROCESSES)
    assert all(isinstance(x, DTensor) for model in (by_hand, by_plan) for x in model.parameters())
    inputs = subject.inputs(reference.config, "right")
    labels = subject.labels(reference.config, inputs)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    part, targets = ({k: v[rows] for k, v in x.items()} for x in (inputs, labels))
    targets["num_items_in_batch"] = share_of_labels(subject, labels)
    expected = step(reference, inputs, labels)
    for model, what in ((by_hand, "by hand"), (by_plan, "by plan")):
        logits, total, found = step(model, part, targets)
        dist.all_reduce(total)
        compare((logits, total / PROCESSES, found), (expected[0][rows], *expected[1:]), what)


def check_data_parallel(subject: Subject) -> None:
    """DistributedDataParallel with checkpointing; it searches for unused parameters only where the official class has
    some."""
    model, reference = (build(subject.ours, subject, **no_dropout(subject)) for _ in range(2))
    model.gradient_checkpointing_enable()
    unused = bool(subject.head.without_gradient)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
    for seed in (0, 1):  # the second step fails if the first one missed a parameter
        inputs = subject.inputs(reference.config, "right", seed=seed)
        labels = subject.labels(reference.config, inputs)
        rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        part = {k: v[rows] for k, v in {**inputs, **labels}.items()}
        model.zero_grad()
        wrapped.train()(**part, num_items_in_batch=share_of_labels(subject, labels)).loss.backward()
        expected = step(reference, inputs, labels)[2]
        reference.zero_grad()
        for name, gradient in gradients(model).items():
            assert_close(gradient, expected[name], f"gradient of {name}")


WORK: dict[str, tuple[Callable[[Subject], None], Callable[[], list[Subject]]]] = {
    "tensor": (check_tensor, planned),
    "pipeline": (check_pipeline, lambda: [s for s in language_models() if has_plan(s)]),
    "sharded_data": (check_sharded_data, language_models),
    "sharded_files": (check_sharded_files, language_models),
    "data_parallel": (check_data_parallel, language_models),
}


def jobs() -> list[tuple[str, Subject]]:
    """What there is to do, in the order in which it is done."""
    return [(name, subject) for name, (_, found) in WORK.items() for subject in found()]


def work(rank: int, address: str, folder: Path) -> None:
    """One process: every job, and what went wrong in it."""
    torch.set_num_threads(1)
    harness.set_folder(folder)
    for _, subject in jobs():
        stock_folder(subject)  # now, since later only the first process would write
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=PROCESSES, timeout=timedelta(seconds=300)
    )
    failures = {}
    for name, subject in jobs():
        torch.manual_seed(0)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                WORK[name][0](subject)
        except Exception:
            failures[f"{name}-{subject}"] = f"process {rank}: {traceback.format_exc(limit=-4)}"
        (folder / f"{rank}.json").write_text(json.dumps(failures))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def environment() -> dict[str, str]:
    """For processes that import this checkout, each on one thread."""
    return {**os.environ, "PYTHONPATH": str(Path(hf_ext.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def run(folder: Path, seconds: float = 900) -> dict[str, str]:
    """Start the processes, wait for them, and return what failed: name of the job -> why."""
    port, running = free_port(), []
    for rank in range(PROCESSES):
        (folder / str(rank)).mkdir()
        command = [sys.executable, __file__, str(rank), f"tcp://localhost:{port}", str(folder / str(rank))]
        with open(folder / str(rank) / "log", "w") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment()))
    failures = {}
    try:
        for process in running:
            process.wait(seconds)
    finally:
        for process in running:
            process.kill()
    for rank, process in enumerate(running):
        found = folder / str(rank) / f"{rank}.json"
        if found.exists():
            failures |= json.loads(found.read_text())
        if process.returncode:
            failures["processes"] = (folder / str(rank) / "log").read_text()[-3000:]
    return failures


def train(checkpoints: dict[str, str], processes: int) -> dict[str, dict]:
    """Three steps of 8 rows each for every language model, by all processes together; the losses and the weights."""
    results = {}
    for subject in language_models():
        model = build(subject.ours, subject, folder=Path(checkpoints[str(subject)]), **no_dropout(subject))
        rows = training_rows(subject, model.config, 24)
        options = {"max_steps": 3, "learning_rate": 0.05, "logging_strategy": "steps", "logging_steps": 1}
        runner = trainer(model, rows, batch=8 // processes, **options)
        runner.train()
        results[str(subject)] = {
            "losses": [line["loss"] for line in runner.state.log_history if "loss" in line],
            "weights": state(model),
        }
    return results


def launch(folder: Path) -> tuple[dict[str, dict], dict[str, dict]]:
    """`train` in this process, and in two, started by torch's launcher as `accelerate launch` does with two devices (on
    the CPU `accelerate launch` starts one, whatever `--num_processes` says)."""
    checkpoints = {str(subject): str(stock_folder(subject)) for subject in language_models()}
    (folder / "checkpoints.json").write_text(json.dumps(checkpoints))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    done = subprocess.run(
        [*command, __file__, "train", str(folder)],
        capture_output=True,
        text=True,
        env={**environment(), "ACCELERATE_USE_CPU": "true"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return train(checkpoints, 1), torch.load(folder / "results.pt")


if __name__ == "__main__":
    if sys.argv[1] == "train":
        place = Path(sys.argv[2])
        harness.set_folder(place)
        found = train(json.loads((place / "checkpoints.json").read_text()), int(os.environ["WORLD_SIZE"]))
        if int(os.environ["RANK"]) == 0:
            torch.save(found, place / "results.pt")
    else:
        work(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
