"""Our class and the stock class side by side: seconds and peak memory of the same work.

Time: both models in one process, warmed up on the very batch, then alternating (ours, stock, stock, ours, ...), so that
a busy machine slows both alike; the median of the repeats is reported. A training step is forward and backward with
dropout as configured, gradients freed first; no optimizer, whose cost is the same for both.

Memory: every measurement in a fresh process that builds one model, runs the work once on a minimal batch so that lazily
loaded libraries are in, and then records the peak of a single step above what was in use before it (see
`hf_ext.inspection.memory`). A training step's peak thus includes the gradients and excludes the weights.

Scenarios: `inference-*` and `training-*` on a `ragged` batch (log-normal lengths, about a third of the padded area
filled, padded on the right) and on a `full` one; `generate-1` and `generate-8` for models that generate. Images are as
large as the configuration says, so that for models of images alone there is no ragged batch.
"""

import ast
import contextlib
import difflib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedConfig

from hf_ext.inspection.inputs import (
    Batch,
    attention_for,
    bare_objective,
    complete_config,
    generate_greedily,
    generates,
    is_seq2seq_head,
    longest_input,
    make_batch,
    ragged_lengths,
    require_stock,
    resolve_head,
    stock_class,
    takes,
)
from hf_ext.inspection.memory import PeakMemory, measured_environment

SCENARIOS = ("inference-ragged", "inference-full", "training-ragged", "training-full", "generate-1", "generate-8")
SIDES = ("ours", "stock")
NEW_TOKENS = 32
PROMPT = 32
# What a bare architecture name stands for: the head it is pre-trained with.
_PREFERRED_HEADS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_PREFERRED_HEADS += ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")


@dataclass(frozen=True)
class BenchmarkRow:
    """One scenario. Peaks are bytes above the baseline, None where memory was not measured.

    `tokens` are the ones that count: real tokens of the batch, new tokens when generating, patches of images alone;
    `padded_tokens` is the area that a computation on padding goes through.
    """

    scenario: str
    batch_size: int
    tokens: int
    padded_tokens: int
    ours_seconds: float
    stock_seconds: float
    ours_peak: int | None = None
    stock_peak: int | None = None
    stock_attention: str | None = None  # attention implementation of the stock class

    @property
    def speed_ratio(self) -> float:
        """Stock seconds over ours: above 1, ours is faster."""
        return self.stock_seconds / self.ours_seconds

    @property
    def memory_ratio(self) -> float | None:
        """Stock peak over ours: above 1, ours takes less."""
        if self.ours_peak is None or self.stock_peak is None:
            return None
        return self.stock_peak / max(self.ours_peak, 1)

    def tokens_per_second(self, side: str) -> float:
        """Real (or new) tokens per second of "ours" or "stock"."""
        return self.tokens / (self.ours_seconds if side == "ours" else self.stock_seconds)

    def to_dict(self) -> dict:
        """For JSON: the fields and the ratios."""
        return {**asdict(self), "speed_ratio": self.speed_ratio, "memory_ratio": self.memory_ratio}


@dataclass(frozen=True)
class _Subject:
    """Everything that a fresh process needs to build either model."""

    model: str  # checkpoint, or architecture name
    random: bool  # random weights of an architecture
    class_name: str
    overrides: dict
    dtype: str
    attn_implementation: str
    device: str
    seed: int
    stock_source: str  # where the stock class loads from; differs from `model` for a checkpoint in our format

    def build(self, side: str):
        from hf_ext.auto import architecture_of

        if self.random:
            architecture = _architecture_named(self.model)
        else:
            architecture = architecture_of(PreTrainedConfig.get_config_dict(self.model)[0]["model_type"])
        model_class = architecture.load(self.class_name) if side == "ours" else stock_class(self.class_name)
        torch.manual_seed(self.seed)
        implementation = attention_for(model_class, self.attn_implementation)
        options = {"attn_implementation": implementation, "dtype": getattr(torch, self.dtype)}
        if self.random:
            config = complete_config(model_class.config_class(**self.overrides), self.class_name)
            model = model_class._from_config(config, **options)
        else:
            source = self.model if side == "ours" else self.stock_source
            config = model_class.config_class.from_pretrained(source, **self.overrides)
            config = complete_config(config, self.class_name)
            model = model_class.from_pretrained(source, config=config, **options)
        return model.to(self.device).eval()


def benchmark(
    model: str | Path,
    *,
    head: str | None = None,
    overrides: dict | None = None,
    batch_size: int = 16,
    length: int = 256,
    repeats: int = 5,
    scenarios: Sequence[str] | None = None,
    threads: int | None = None,
    dtype: str = "float32",
    attn_implementation: str = "sdpa",
    device: str | None = None,
    seed: int = 0,
    new_tokens: int = NEW_TOKENS,
    memory: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[BenchmarkRow]:
    """Times our class against the stock class; see the module for the method.

    Args:
        model: checkpoint (Hub id or folder), or the name of an architecture (`bert`), then with random weights in the
            sizes of its default config.
        head: see `inputs.resolve_head`; None goes by the checkpoint, and for a bare name takes its pre-training head.
        overrides: config fields to change, by name, in both models.
        batch_size: rows of the inference and training batches.
        length: tokens of the longest row; nothing for models of images alone.
        repeats: timed runs of each model per scenario.
        scenarios: from `SCENARIOS`, or the first part of names ("training"); None takes all that fit the model.
        threads: CPU threads; None leaves torch's setting.
        dtype: "float32", "bfloat16" or "float16".
        attn_implementation: of both models; an old stock class without sdpa runs eager instead, and the rows say so.
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        new_tokens: tokens to generate in each row.
        memory: False leaves the peaks out, and the fresh processes with them.
        progress: called with a line before each step.

    Raises:
        ValueError: an unknown model, head, scenario, config field or dtype.
        RuntimeError: a measuring process failed; the message carries its last line.
    """
    if repeats < 1 or batch_size < 1 or (threads is not None and threads < 1) or new_tokens < 1:
        raise ValueError(
            f"repeats={repeats}, batch_size={batch_size}, threads={threads}, new_tokens={new_tokens}: "
            "each must be at least 1."
        )
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={dtype!r}: one of float32, bfloat16, float16 is needed.")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = _expand(scenarios)
    say = progress or (lambda line: None)
    with tempfile.TemporaryDirectory(prefix="hf-ext-bench-") as folder, _threads(threads):
        subject = _subject(str(model), head, overrides or {}, dtype, attn_implementation, device, seed, Path(folder))
        say("building both models")
        models = {side: subject.build(side) for side in SIDES}
        limit = longest_input(models["ours"].config)
        if not any(takes(type(models["ours"]), name) for name in ("input_ids", "decoder_input_ids")):  # images alone
            limit, wanted = None, [name for name in wanted if not name.endswith("ragged")]
        if limit is not None and length > limit:
            raise ValueError(f"length={length} exceeds the {limit} positions of this model; use a shorter one.")
        if generates(models["ours"]):
            room = (limit or length + new_tokens) - new_tokens
            if room < 2 and any(name.startswith("generate") for name in wanted):
                raise ValueError(f"new_tokens={new_tokens} leaves no room for a prompt in the {limit} positions.")
        elif scenarios is None:
            wanted = [name for name in wanted if not name.startswith("generate")]
        elif any(name.startswith("generate") for name in wanted):
            raise ValueError(f"{subject.class_name} does not generate; leave the generate scenarios out.")

        rows = []
        for name in wanted:
            say(f"timing {name}")
            steps, works = {}, {}
            for side in SIDES:
                works[side] = _Work.make(models[side], name, batch_size, length, new_tokens, seed)
                steps[side] = works[side].step(models[side])
            seconds = _interleaved(steps, repeats, device)
            work = works["ours"]
            rows.append(
                BenchmarkRow(
                    name,
                    work.batch.real.shape[0],
                    work.tokens,
                    work.batch.padded_tokens,
                    statistics.median(seconds["ours"]),
                    statistics.median(seconds["stock"]),
                    stock_attention=models["stock"].config._attn_implementation,
                )
            )
        del models, steps, works, work  # the measuring processes need the memory
        gc.collect()
        if not memory:
            return rows
        measured = []
        for row in rows:
            say(f"measuring the memory of {row.scenario}")
            settings = {
                "scenario": row.scenario,
                "batch_size": batch_size,
                "length": length,
                "new_tokens": new_tokens,
                "seed": seed,
                "threads": threads,
            }
            peaks = {side: _measure_in_fresh_process(subject, side, settings) for side in SIDES}
            measured.append(BenchmarkRow(**{**asdict(row), "ours_peak": peaks["ours"], "stock_peak": peaks["stock"]}))
    return measured


def parse_overrides(pairs: Sequence[str]) -> dict:
    """`["hidden_size=128", "tie_word_embeddings=False"]` as a dict; a value that is no Python literal is a string."""
    values = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ValueError(f"{pair!r} is not of the form key=value.")
        spelled = {"true": "True", "false": "False", "null": "None", "none": "None"}.get(value.strip().lower(), value)
        try:
            values[key.strip()] = ast.literal_eval(spelled.strip())
        except (ValueError, SyntaxError):
            values[key.strip()] = value.strip()
    return values


def _expand(scenarios: Sequence[str] | None) -> list[str]:
    if scenarios is None:
        return list(SCENARIOS)
    for given in scenarios:
        if not any(name == given or name.startswith(given + "-") for name in SCENARIOS):
            raise ValueError(f"scenario {given!r} is unknown; choose from {', '.join(SCENARIOS)}, or a first part.")
    return [name for name in SCENARIOS if any(name == given or name.startswith(given + "-") for given in scenarios)]


def _architecture_named(name: str):
    import hf_ext

    for architecture in hf_ext.architectures().values():
        if name in (architecture.name, architecture.model_type, architecture.official_model_type):
            return architecture
    return None


def _subject(model, head, overrides, dtype, attn_implementation, device, seed, folder: Path) -> _Subject:
    import hf_ext
    from hf_ext.auto import architecture_of

    # A folder may happen to be called "bert"; it counts as a checkpoint only if it is one.
    architecture = None if (Path(model) / "config.json").is_file() else _architecture_named(model)
    random = architecture is not None
    stock_source = model
    if random:
        require_stock(architecture)
        if head is None:
            head = next(name for name in _PREFERRED_HEADS if name in architecture.heads)
        class_name = resolve_head(architecture, head)
    else:
        stated, _ = PreTrainedConfig.get_config_dict(model)
        if not stated.get("model_type"):
            raise ValueError(f"config.json of {model} has no model_type, so its architecture is unknown.")
        architecture = architecture_of(stated["model_type"])
        require_stock(architecture)
        class_name = resolve_head(architecture, head, stated.get("architectures"))
        if stated["model_type"] == architecture.model_type:
            stock_source = str(folder / "official")
            hf_ext.export_official(architecture.load(class_name).from_pretrained(model), stock_source)
    default = architecture.config_class()
    known = {name for name in vars(default) if not name.startswith("_")} | set(default.attribute_map)
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"{architecture.config_class.__name__} has no field {key!r}{hint}")
    return _Subject(
        model, random, class_name, overrides, dtype, attn_implementation, device, seed, stock_source=stock_source
    )


@contextlib.contextmanager
def _threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class _Work:
    """The work of one scenario: a batch and what is done with it."""

    kind: str  # "inference", "training" or "generate"
    batch: Batch
    tokens: int
    new_tokens: int

    @classmethod
    def make(cls, model, scenario: str, batch_size: int, length: int, new_tokens: int, seed: int) -> "_Work":
        kind, variant = scenario.split("-")
        device = model.device
        if kind == "generate":
            rows = int(variant)
            limit = longest_input(model.config)
            longest = max(2, min(PROMPT, length, (limit or PROMPT + new_tokens) - new_tokens))
            lengths = ragged_lengths(rows, longest, fill=0.6, seed=seed)
            side = "right" if is_seq2seq_head(type(model).__name__) else "left"
            batch = make_batch(type(model), model.config, lengths, padding_side=side, seed=seed).to(device)
            return cls(kind, batch, rows * new_tokens, new_tokens)
        if variant == "ragged":
            lengths = ragged_lengths(batch_size, length, seed=seed)
        else:
            lengths = torch.full((batch_size,), length)
        batch = make_batch(type(model), model.config, lengths, seed=seed).to(device)
        return cls(kind, batch, batch.real_tokens, 0)

    def step(self, model) -> Callable[[], None]:
        batch, inputs = self.batch, self.batch.inputs
        if self.kind == "training":

            def train() -> None:
                model.train()
                model.zero_grad(set_to_none=True)
                if batch.labels:
                    model(**inputs, **batch.labels).loss.backward()
                else:
                    bare_objective(model(**inputs), batch.real).backward()

            return train
        if self.kind == "inference":

            def infer() -> None:
                model.eval()
                with torch.no_grad():
                    model(**inputs)

            return infer
        model.generation_config = GenerationConfig()  # a checkpoint's own defaults may ask for sampling

        def generate() -> None:
            model.eval()
            generate_greedily(model, batch, self.new_tokens)

        return generate


def _finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _interleaved(steps: dict[str, Callable[[], None]], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each repeat; both warmed up first, the order reversed every time so that neither always follows."""
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    for repeat in range(repeats):
        order = list(steps) if repeat % 2 == 0 else list(reversed(steps))
        for side in order:
            _finish(device)
            start = time.perf_counter()
            steps[side]()
            _finish(device)
            seconds[side].append(time.perf_counter() - start)
    return seconds


# ------------------------------------------------------------------------------------------------- memory


_MARK = "hf-ext peak bytes: "


def _measure_in_fresh_process(subject: _Subject, side: str, settings: dict) -> int:
    request = json.dumps({"subject": asdict(subject), "side": side, **settings})
    # -c and not a pickled function: works from any script, guarded by __main__ or not.
    code = "from hf_ext.inspection.benchmark import measure_peak; measure_peak()"
    environment = measured_environment()
    # The child must find the very package that runs here, installed or not.
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run([sys.executable, "-c", code], input=request, capture_output=True, text=True, env=environment)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return int(line.removeprefix(_MARK))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise RuntimeError(f"measuring the memory of {side} in {settings['scenario']} failed: {last}")


def measure_peak() -> None:
    """Body of a measuring process: request as JSON on stdin, peak bytes above the baseline on stdout."""
    request = json.loads(sys.stdin.read())
    subject = _Subject(**request["subject"])
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    model = subject.build(request["side"])
    scenario, new_tokens, seed = request["scenario"], request["new_tokens"], request["seed"]
    # Same kind of work on the least of data: kernels and libraries get loaded, autograd's threads started.
    smallest = "generate-1" if scenario.startswith("generate") else scenario
    _Work.make(model, smallest, 2, 4, 2, seed).step(model)()
    work = _Work.make(model, scenario, request["batch_size"], request["length"], new_tokens, seed)
    step = work.step(model)
    model.zero_grad(set_to_none=True)
    with PeakMemory(subject.device) as memory:
        step()
    print(f"{_MARK}{memory.above}", flush=True)
