"""Two processes on the CPU: tensor, pipeline and data parallelism of every registered architecture.

`run()` starts the processes once and lets each go through all of `WORK`; `tests/test_parallel.py` reports what they
found. A process compares its share with the whole model, which it loads as well.

Shapes: B batch, T tokens.
"""

import contextlib
import functools
import gc
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
    one_per_architecture,
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
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from transformers import DistributedConfig

import hf_ext

PROCESSES = 2
WAIT = timedelta(seconds=300)


def language_models(configs: str = "one") -> list[Subject]:
    """The causal and masked language models."""
    return subjects("causal", "masked", configs=configs)


def trained() -> list[Subject]:
    """The language models, and one class of every encoder-decoder, vision model and pair of towers."""
    return language_models() + one_per_architecture("seq2seq", "pair", "image_row")


def sharded() -> list[Subject]:
    """Those without a parameter of no dimension, which torch does not shard: the temperature of a pair of towers."""
    return language_models() + one_per_architecture("seq2seq", "image_row")


def has_plan(subject: Subject) -> bool:
    """Whether the model says how its layers are split."""
    return bool(subject.our_config.base_model_tp_plan)


def runs_in_stages(subject: Subject) -> bool:
    """The library's pipeline knows only models whose parts are named as LLaMA's are."""
    return {"embed_tokens", "layers", "norm"} <= set(subject.our_config.base_model_pp_plan or ())


def head_counts(fields: dict) -> list[int]:
    """Numbers of heads in a configuration and those inside it."""
    inner = [count for value in fields.values() if isinstance(value, dict) for count in head_counts(value)]
    return inner + [x for name, x in fields.items() if isinstance(x, int) and re.search(r"_heads?$", name)]


def heads_divide(subject: Subject) -> bool:
    """Whether each process gets whole heads; a plan may also leave attention whole, on every process."""
    config = subject.our_config(**subject.fields)
    if not any("attn." in name or "attention." in name.lower() for name in config.base_model_tp_plan):
        return True
    return all(count % PROCESSES == 0 for count in head_counts(config.to_dict()))


def planned() -> list[Subject]:
    """The models with a plan: causal ones in every configuration, the others in one whose heads can be divided."""
    others = {s.class_name for s in trained() if s.kind != "causal"}
    whole_heads = subjects(where=lambda s: s.class_name in others and has_plan(s) and heads_divide(s))
    one_each = {s.class_name: s for s in reversed(whole_heads)}
    return [s for s in subjects("causal") if has_plan(s)] + list(one_each.values())[::-1]


def whole(x: Tensor) -> Tensor:
    """The full tensor of one that is spread over the processes."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def step(subject: Subject, model: nn.Module, inputs: dict, labels: dict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits (of a pair of towers, the embeddings) of a forward pass, loss of a training step, and its gradients,
    without those of fixed positions: loading makes them trained ones, in the official class too, but not in parts."""
    model.eval()
    with torch.no_grad():
        output = model(**inputs, **({"skip_padding": False} if subject.kind in ("causal", "masked", "seq2seq") else {}))
    rows = torch.cat([output.text_embeds, output.image_embeds], -1) if subject.kind == "pair" else output.logits
    model.train()
    loss = model(**inputs, **labels).loss
    loss.backward()
    fixed = subject.head.without_gradient
    found = {n: whole(x) for n, x in gradients(model).items() if not any(re.fullmatch(p, n) for p in fixed)}
    return rows, loss.detach(), found


def compare(actual: tuple, expected: tuple, what: str) -> None:
    for mine, reference, name in zip(actual[:2], expected[:2], ("logits", "loss"), strict=True):
        assert_close(whole(mine), reference, f"{what}, {name}")
    assert set(actual[2]) == set(expected[2]), what
    for name, reference in expected[2].items():
        assert_close(actual[2][name], reference, f"{what}, gradient of {name}")


def share(subject: Subject, inputs: dict, labels: dict) -> tuple[dict, dict]:
    """Inputs and labels of this process: two of four rows, and what a loss over tokens is divided by if all processes
    average their gradients: the labels of all, per process."""
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    part, targets = (
        {name: x[rows] if isinstance(x, Tensor) else x for name, x in given.items()} for given in (inputs, labels)
    )
    if "labels" in labels and labels["labels"].dim() == 2:
        counted = labels["labels"][:, 1:] if subject.kind == "causal" else labels["labels"]
        targets["num_items_in_batch"] = (counted != IGNORED).sum() / PROCESSES
    return part, targets


def load_split(subject: Subject, **sizes: object) -> nn.Module:
    """Our model, loaded from its file into its place among the processes."""
    folder = stock_folder(subject)
    config = subject.our_config.from_pretrained(folder)
    for name, value in no_dropout(subject).items():
        subject.case.assign(config, name, value)
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
    for padding in subject.patterns("none", "right"):
        inputs = subject.inputs(reference.config, padding)
        labels = subject.labels(reference.config, inputs)
        compare(step(subject, model, inputs, labels), step(subject, reference, inputs, labels), padding)
    if not subject.generates:
        return
    prompt = inputs[subject.reads][:2]
    ways = ({}, {"num_beams": 2}, {"cache_implementation": "static"})
    for options in ways if subject.kind == "causal" else ways[:1]:
        tokens = [m.eval().generate(prompt, max_new_tokens=5, min_new_tokens=5, **options) for m in (model, reference)]
        assert torch.equal(*tokens), options


def check_pipeline(subject: Subject) -> None:
    """The first half of the blocks here, the second there."""
    model = load_split(subject, pp_size=PROCESSES).eval()
    reference = build(subject.ours, subject)
    inputs = subject.inputs(reference.config, "right")
    with torch.no_grad():
        assert_close(model(**inputs).logits, reference(**inputs).logits, "logits of the pipeline")
    prompt = {"input_ids": inputs["input_ids"][:2], "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    tokens = [m.generate(**prompt, max_new_tokens=5, min_new_tokens=5) for m in (model, reference)]
    assert torch.equal(*tokens)


def shared_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of the parameters that have several, together."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(several) for several in names.values() if len(several) > 1]


def shard(model: nn.Module) -> None:
    """FSDP2 as `accelerate` wraps: every class that is not to be split, then the whole."""
    shared = {model.get_parameter(names[0]) for names in shared_parameters(model)}
    for module in reversed(list(model.modules())):  # the inner ones first
        # A tied table belongs to two modules, and only the whole model holds both.
        if type(module).__name__ in model._no_split_modules and not shared & set(module.parameters()):
            fully_shard(module)
    fully_shard(model)


def check_sharded_files(subject: Subject) -> None:
    """A checkpoint that each process writes its part of is read back to the same parts, ties included, and the whole
    that is gathered from them is what one process has."""
    written, read = (build(subject.ours, subject) for _ in range(2))
    whole = {name: value.clone() for name, value in written.state_dict().items()}
    ties = shared_parameters(written)
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
    assert shared_parameters(read) == shared_parameters(written) == ties


def check_sharded_data(subject: Subject) -> None:
    """Each process has half of the rows and a part of every block's parameters: divided by the model's plan, and by
    the classes that it says are not to be split, as `accelerate` does."""
    by_hand, reference = (build(subject.ours, subject, **no_dropout(subject)) for _ in range(2))
    shard(by_hand)
    by_plan = load_split(subject, fsdp_size=PROCESSES)
    assert all(isinstance(x, DTensor) for model in (by_hand, by_plan) for x in model.parameters())
    inputs = subject.inputs(reference.config, "right")
    labels = subject.labels(reference.config, inputs)
    part, targets = share(subject, inputs, labels)
    expected = step(subject, reference, inputs, labels)
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for model, what in ((by_hand, "by hand"), (by_plan, "by plan")):
        logits, total, found = step(subject, model, part, targets)
        dist.all_reduce(total)
        compare((logits, total / PROCESSES, found), (expected[0][rows], *expected[1:]), what)


def check_data_parallel(subject: Subject) -> None:
    """DistributedDataParallel with checkpointing; it searches for unused parameters only where the official class has
    some: BERT's pooler under heads that do not pool, and what else a case lists."""
    model, reference = (build(subject.ours, subject, **no_dropout(subject)) for _ in range(2))
    model.gradient_checkpointing_enable()
    wrapped = None
    for seed in (0, 1):  # the second step fails if the first one missed a parameter
        inputs = subject.inputs(reference.config, "right", seed=seed)
        labels = subject.labels(reference.config, inputs)
        reference.zero_grad()
        expected = step(subject, reference, inputs, labels)[2]
        if wrapped is None:
            unused = [n for n, p in reference.named_parameters() if p.requires_grad and p.grad is None]
            assert all(any(re.fullmatch(x, name) for x in subject.head.without_gradient) for name in unused), unused
            wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=bool(unused))
        part, targets = share(subject, inputs, labels)
        model.zero_grad()
        wrapped.train()(**part, **targets).loss.backward()
        for name, reached in expected.items():
            assert_close(model.get_parameter(name).grad, reached, f"gradient of {name}")


WORK: dict[str, tuple[Callable[[Subject], None], Callable[[], list[Subject]]]] = {
    "tensor": (check_tensor, planned),
    "pipeline": (check_pipeline, lambda: [s for s in language_models() if runs_in_stages(s)]),
    "sharded_data": (check_sharded_data, sharded),
    "sharded_files": (check_sharded_files, sharded),
    "data_parallel": (check_data_parallel, trained),
}


@functools.cache
def split_in_every_run() -> set[Subject]:
    """Of each class the first configuration whose heads can be divided; of Falcon all, whose attentions differ."""
    dividing = [s for s in planned() if heads_divide(s)]
    first = {s.class_name: s for s in reversed(dividing)}
    return {s for s in dividing if s == first[s.class_name] or s.model_type == "ext_falcon"}


def is_extra(name: str, subject: Subject) -> bool:
    """Whether a job is for slow tests: the blocks, and what is around them, are those of another architecture, or the
    heads are divided as in another configuration."""
    if name == "tensor" and heads_divide(subject) and subject not in split_in_every_run():
        return True
    return (
        subject.kind in ("seq2seq", "image_row")
        and subject.case.blocks_of is not None
        and subject.model_type != "ext_marian"  # which has tables of its own
        and name != "data_parallel"
    )


def jobs(extra: bool = False) -> list[tuple[str, Subject]]:
    """What there is to do, in the order in which it is done."""
    every = [(name, subject) for name, (_, found) in WORK.items() for subject in found()]
    return [job for job in every if is_extra(*job) == extra]


def work(rank: int, address: str, folder: Path, extra: bool) -> None:
    """One process: every job, and what went wrong in it."""
    todo = jobs(extra)
    torch.set_num_threads(1)
    harness.set_folder(folder)
    for _, subject in todo:
        stock_folder(subject)  # now, since later only the first process would write
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), PROCESSES, is_master=rank == 0, timeout=WAIT)
    gc.collect()
    gc.freeze()  # as in conftest.py
    failures = {}
    for name, subject in todo:
        job = f"{name}-{subject}"
        # A group for each job: every mesh adds groups, and the threads of a thousand of them take longer than the work.
        own = dist.PrefixStore(job, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=PROCESSES, timeout=WAIT)
        harness.seed_torch(0)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                WORK[name][0](subject)
            dist.barrier()
        except Exception:
            failures[job] = f"process {rank}: {traceback.format_exc(limit=-4)}"
        (folder / f"{rank}.json").write_text(json.dumps(failures))
        gc.collect()  # a model's wrapper that is freed after its group waits for ever
        dist.destroy_process_group()
        # What torch remembers of layouts holds meshes, and they their groups.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _gen_transform_infos.cache_clear()
        MeshTopoInfo.build_from_mesh.cache_clear()
        gc.collect()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def environment() -> dict[str, str]:
    """For processes that import this checkout, each on one thread."""
    search = [str(Path(hf_ext.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}


def run(folder: Path, extra: bool = False, seconds: float = 900) -> dict[str, str]:
    """Start the processes, wait for them, and return what failed: name of the job -> why."""
    port, running = free_port(), []
    for rank in range(PROCESSES):
        (folder / str(rank)).mkdir()
        place = str(folder / str(rank))
        command = [sys.executable, __file__, str(rank), f"localhost:{port}", place, *["extra"] * extra]
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
        work(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), "extra" in sys.argv)
