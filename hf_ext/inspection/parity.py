"""One checkpoint through our class and through the stock class; everything that a user could notice is compared.

The two models are never in memory together: ours runs first, its outputs and files are kept, and it is dropped before
the stock one loads. At its highest, memory holds one model, its gradients, and the outputs of one small batch.

Weights and gradients are compared through files. The names on disk are the official ones, whereas some stock classes
use other names in memory; a gradient takes its parameter's place and is saved like a weight, and so goes through the
same renames.
"""

import contextlib
import gc
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from hf_ext.inspection.inputs import (
    Batch,
    attention_for,
    bare_objective,
    complete_config,
    generate_greedily,
    generates,
    is_causal_head,
    is_seq2seq_head,
    longest_input,
    make_batch,
    ragged_lengths,
    require_stock,
    resolve_head,
    stock_class,
)

# Largest difference allowed, relative to the largest value of the tensor it is in. The order in which a sum is taken is
# the only freedom an implementation has: attention over real tokens only, or a loss in chunks, sums in another order.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# A gradient has gone through every layer twice and is summed over all tokens; rounding grows with both.
GRADIENT_FACTOR = 10
# Some gradients are zero in exact arithmetic (a bias on the keys shifts all scores of a query alike), so that all there
# is of them is rounding. A gradient is measured against at least this share of the largest one in the model.
GRADIENT_FLOOR = 1e-3
# A cross-entropy is a difference of logits; near zero it has their rounding, which is not small relative to it.
LOSS_FLOOR = 0.1

NEW_TOKENS = 32


@dataclass(frozen=True)
class ParityRow:
    """One comparison. Differences are None where the row compares no numbers."""

    name: str
    ok: bool
    max_abs: float | None = None
    max_rel: float | None = None
    tolerance: float | None = None
    detail: str = ""


@dataclass
class ParityReport:
    """What `compare` found; `ok` when every row is."""

    checkpoint: str
    ours: str
    stock: str
    dtype: str
    attention: str
    rows: list[ParityRow] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def failed(self) -> list[ParityRow]:
        return [row for row in self.rows if not row.ok]

    def to_dict(self) -> dict:
        """For JSON: the fields, the rows, and `ok`."""
        return {**asdict(self), "ok": self.ok}


def compare(
    checkpoint: str | Path,
    *,
    head: str | None = None,
    batch_size: int = 4,
    length: int = 64,
    seed: int = 0,
    dtype: torch.dtype | str = torch.float32,
    attn_implementation: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> ParityReport:
    """Compares our class with the stock class on one checkpoint.

    Rows of the report: keys found missing or unexpected at loading; every output and hidden state at real positions of
    a ragged batch (padded on the right, for causal heads also on the left); the loss in evaluation mode; the loss in
    training mode with dropout off, and the gradient of every parameter; the tokens of greedy generation (of a
    decoder from a left-padded batch); the saved files, byte by byte. Of encoder-decoders the outputs of both halves.

    Args:
        checkpoint: Hub id or folder, in the official format or in ours. One of ours is exported to a temporary folder
            for the stock class to load.
        head: see `inputs.resolve_head`; None goes by the checkpoint's `architectures`. A head that the checkpoint has
            no weights for is drawn at random in ours and handed to the stock class.
        batch_size: rows of the batch; lengths are ragged.
        length: tokens of the longest row; cut to what the position table holds.
        seed: of tokens, lengths, labels and drawn weights.
        dtype: both models run in it; the tolerance goes by it (`TOLERANCE`).
        attn_implementation: "eager", "sdpa", ...; None takes the library's default. An old stock class without sdpa
            runs eager.
        progress: called with a line before each step.

    Raises:
        ValueError: the architecture or the head is not one of ours, or takes no token ids.
        OSError: the checkpoint cannot be found or read.
    """
    import hf_ext
    from hf_ext.auto import architecture_of

    checkpoint = str(checkpoint)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if dtype not in TOLERANCE:
        raise ValueError(
            f"dtype={dtype}: one of {', '.join(str(d).removeprefix('torch.') for d in TOLERANCE)} is needed."
        )
    if batch_size < 2 or length < 4:
        raise ValueError(f"batch_size={batch_size}, length={length}: at least 2 rows of 4 tokens are needed.")
    say = progress or (lambda line: None)
    stated, _ = PreTrainedConfig.get_config_dict(checkpoint)
    if not stated.get("model_type"):
        raise ValueError(f"config.json of {checkpoint} has no model_type, so its architecture is unknown.")
    architecture = architecture_of(stated["model_type"])
    require_stock(architecture)
    name = resolve_head(architecture, head, stated.get("architectures"))
    ours_class, official_class = architecture.load(name), stock_class(name)
    options = {"dtype": dtype}
    stock_options = dict(options)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
        stock_options["attn_implementation"] = attention_for(official_class, attn_implementation)

    with tempfile.TemporaryDirectory(prefix="hf-ext-parity-") as folder:
        work = Path(folder)
        run = _Run(batch_size, length, seed)
        say(f"loading {name}")
        torch.manual_seed(seed)
        model, info = _load(ours_class, checkpoint, options)
        drawn = bool(info["missing_keys"])
        source, stock_info = checkpoint, None
        if drawn and stated["model_type"] != architecture.model_type:
            # The stock class draws its own head; what it misses is asked for here, its values come from ours.
            stock_info = _load(official_class, checkpoint, stock_options)[1]
        if drawn or stated["model_type"] == architecture.model_type:
            source = str(work / "exported")
            hf_ext.export_official(model, source)
        say(f"running {name}")
        ours = run(model, work / "ours")
        attention = model.config._attn_implementation
        del model
        gc.collect()

        say(f"loading {official_class.__name__}")
        model, own_info = _load(official_class, source, stock_options)
        say(f"running {official_class.__name__}")
        stock = run(model, work / "stock")
        del model
        gc.collect()

        say("comparing")
        report = ParityReport(checkpoint, name, official_class.__name__, str(dtype).removeprefix("torch."), attention)
        report.rows += _loading_rows(info, stock_info or own_info)
        report.rows += _output_rows(ours, stock, TOLERANCE[dtype])
        report.rows.append(_gradient_row(work / "ours", work / "stock", TOLERANCE[dtype] * GRADIENT_FACTOR))
        if ours.tokens is not None or stock.tokens is not None:
            report.rows.append(_token_row(ours.tokens, stock.tokens))
        report.rows.append(_file_row(work / "ours" / "weights", work / "stock" / "weights"))
    return report


def _load(model_class: type, source: str, options: dict):
    """Model in evaluation mode, without dropout in training mode either, and the library's loading report."""
    config = complete_config(model_class.config_class.from_pretrained(source), model_class.__name__)
    _switch_dropout_off(config)
    model, info = model_class.from_pretrained(source, config=config, output_loading_info=True, **options)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval(), info


def _switch_dropout_off(config: PreTrainedConfig) -> None:
    # Random masks would differ: ours draws them for real tokens only. In the config, because some attention reads the
    # rate at every call, and below in the modules, because some heads have a rate that is in no config.
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _switch_dropout_off(value)
        elif isinstance(value, float | int) and any(
            part in name for part in ("dropout", "pdrop", "layerdrop", "drop_path")
        ):
            setattr(config, name, type(value)(0))  # strict fields take their own type only


@dataclass
class _Results:
    outputs: dict[str, Tensor]  # at real positions, on the CPU
    losses: dict[str, float]
    tokens: Tensor | None


class _Run:
    """Runs a model through every check; the same batches and seeds for whichever model is given."""

    def __init__(self, batch_size: int, length: int, seed: int):
        self.batch_size, self.length, self.seed = batch_size, length, seed

    def __call__(self, model, folder: Path) -> _Results:
        limit = longest_input(model.config) or self.length
        longest = min(self.length, limit)
        lengths = ragged_lengths(self.batch_size, longest, fill=0.6, seed=self.seed)
        name = type(model).__name__
        sides = ("right", "left") if is_causal_head(name) else ("right",)
        batches = {s: make_batch(type(model), model.config, lengths, padding_side=s, seed=self.seed) for s in sides}
        results = _Results({}, {}, None)
        with torch.no_grad():
            for side, batch in batches.items():
                note = "" if len(sides) == 1 else f" ({side} padding)"
                self._outputs(model, batch, note, results)
                if batch.labels:
                    results.losses["loss, evaluation" + note] = float(model(**batch.inputs, **batch.labels).loss)
            if generates(model):
                results.tokens = self._greedy(model, limit)
        weights = folder / "weights"
        _save(model, weights)
        results.losses["loss, training without dropout"] = self._backward(model, batches["right"])
        with _gradients_as_weights(model):
            _save(model, folder / "gradients")
        return results

    def _outputs(self, model, batch: Batch, note: str, results: _Results) -> None:
        # Twice: asking for hidden states may take another path than the plain call (skipping padding, for one).
        for name, value in model(**batch.inputs).items():
            if isinstance(value, Tensor):
                results.outputs[name.replace("_", " ") + note] = _at_real_positions(name, value, batch)
        full = model(**batch.inputs, output_hidden_states=True)
        halves = {"": full, "text ": full.get("text_model_output"), "image ": full.get("vision_model_output")}
        for half, outputs in halves.items():
            for name, states in (outputs or {}).items():
                if name.endswith("hidden_states"):
                    for layer, value in enumerate(states):
                        place = f"{half}{name.replace('_', ' ')}{note}|{layer}"
                        results.outputs[place] = _at_real_positions(name, value, batch)

    def _backward(self, model, batch: Batch) -> float:
        model.train()
        model.zero_grad(set_to_none=True)
        if batch.labels:
            loss = model(**batch.inputs, **batch.labels).loss
        else:
            loss = bare_objective(model(**batch.inputs), batch.real, self.seed)
        loss.backward()
        model.eval()
        return float(loss.detach())

    def _greedy(self, model, limit: int) -> Tensor:
        new = max(min(NEW_TOKENS, limit // 2), 1)
        lengths = ragged_lengths(self.batch_size, max(min(self.length, limit - new), 2), fill=0.6, seed=self.seed + 1)
        side = "right" if is_seq2seq_head(type(model).__name__) else "left"
        batch = make_batch(type(model), model.config, lengths, padding_side=side, seed=self.seed + 1)
        with _own_generation_config(model):
            return generate_greedily(model, batch, new).cpu()


def _at_real_positions(name: str, value: Tensor, batch: Batch) -> Tensor:
    """Rows of real tokens (N, ...) of an output (R, T, ...) or (B, S, ...); any other tensor as it is."""
    value = value.detach().cpu()
    real = batch.encoder_real if name.startswith("encoder_") else batch.real
    return value[real] if value.shape[:2] == real.shape else value


@contextlib.contextmanager
def _own_generation_config(model) -> Iterator[None]:
    # The library merges the model's defaults into what a call leaves open, and refuses to save some combinations.
    if getattr(model, "generation_config", None) is None:
        yield
        return
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _save(model, folder: Path) -> None:
    with _own_generation_config(model):
        model.save_pretrained(folder, max_shard_size="1000GB")  # one file, so that there is one to compare


@contextlib.contextmanager
def _gradients_as_weights(model) -> Iterator[None]:
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, data in weights:
            gradient = torch.zeros_like(data) if parameter.grad is None else parameter.grad.contiguous()
            parameter.data = gradient
        yield
    finally:
        for parameter, data in weights:
            parameter.data = data


# ------------------------------------------------------------------------------------------------- rows


def _loading_rows(ours: dict, stock: dict) -> Iterator[ParityRow]:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        found, reference = list(ours.get(kind) or ()), list(stock.get(kind) or ())
        if not found:
            detail = "none"
        elif len(found) <= len(reference):
            detail = f"{len(found)}, as the stock class"
        else:
            detail = f"{len(found)}, stock {len(reference)}: {', '.join(map(str, sorted(found)[:3]))}"
        yield ParityRow(f"loading: {kind.replace('_', ' ')}", len(found) <= len(reference), detail=detail)


def _difference(ours: Tensor, stock: Tensor, floor: float = 0.0) -> tuple[float, float]:
    """Largest absolute difference, and the same relative to the largest stock value (or `floor`); NaN stays NaN."""
    if stock.numel() == 0:
        return 0.0, 0.0
    stock = stock.double()
    largest = (ours.double() - stock).abs().max().item()
    scale = max(stock.abs().max().item(), floor)
    return largest, largest if scale == 0 else largest / scale


def _output_rows(ours: _Results, stock: _Results, tolerance: float) -> Iterator[ParityRow]:
    # "hidden states|3" are the parts of one row; its worst part speaks for it.
    groups: dict[str, list[str]] = {}
    for name in stock.outputs:
        groups.setdefault(name.split("|")[0], []).append(name)
    for extra in sorted({name.split("|")[0] for name in ours.outputs} - set(groups)):
        yield ParityRow(extra, False, detail="only ours returns it")
    for group, names in groups.items():
        if group not in {name.split("|")[0] for name in ours.outputs}:
            yield ParityRow(group, False, detail="ours does not return it")
            continue
        of_ours = sum(name.split("|")[0] == group for name in ours.outputs)
        shapes = {n: (tuple(ours.outputs[n].shape), tuple(stock.outputs[n].shape)) for n in names if n in ours.outputs}
        wrong = next((pair for pair in shapes.values() if pair[0] != pair[1]), None)
        if of_ours != len(names):
            yield ParityRow(group, False, detail=f"{of_ours} tensors, stock {len(names)}")
        elif wrong:
            yield ParityRow(group, False, detail=f"shape {wrong[0]}, stock {wrong[1]}")
        else:
            pairs = [(*_difference(ours.outputs[name], stock.outputs[name]), name) for name in names]
            absolute, relative, worst = max(pairs, key=_worst_first)
            detail = f"layer {worst.split('|')[1]} of 0-{len(names) - 1}" if "|" in worst else ""
            yield ParityRow(group, relative <= tolerance, absolute, relative, tolerance, detail)
    for name, value in stock.losses.items():
        absolute, relative = _difference(torch.tensor(ours.losses[name]), torch.tensor(value), LOSS_FLOOR)
        yield ParityRow(name, relative <= tolerance, absolute, relative, tolerance, f"stock {value:.6f}")


def _worst_first(pair: tuple) -> float:
    return float("inf") if pair[1] != pair[1] else pair[1]  # NaN is worse than anything


def _weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def _gradient_row(ours: Path, stock: Path, tolerance: float) -> ParityRow:
    name = "gradients of every parameter"
    with (
        safe_open(_weights_file(ours / "gradients"), "pt") as a,
        safe_open(_weights_file(stock / "gradients"), "pt") as b,
    ):
        strangers = set(a.keys()) ^ set(b.keys())
        if strangers:
            return ParityRow(name, False, detail=f"only one of the two has {', '.join(sorted(strangers)[:3])}")
        reference = sorted(b.keys())
        largest = max(b.get_tensor(key).abs().max().item() for key in reference)
        pairs = []
        for key in reference:
            left, right = a.get_tensor(key), b.get_tensor(key)
            if left.shape != right.shape:
                return ParityRow(name, False, detail=f"{key}: shape {tuple(left.shape)}, stock {tuple(right.shape)}")
            pairs.append((*_difference(left, right, GRADIENT_FLOOR * largest), key))
        if largest == 0:
            return ParityRow(name, False, detail="all gradients of the stock class are zero")
    absolute, relative, worst = max(pairs, key=_worst_first)
    return ParityRow(name, relative <= tolerance, absolute, relative, tolerance, f"{len(pairs)}, most at {worst}")


def _token_row(ours: Tensor | None, stock: Tensor | None) -> ParityRow:
    name = "greedy tokens"
    if ours is None or stock is None:
        return ParityRow(name, False, detail=f"{'ours' if ours is None else 'the stock class'} does not generate")
    if ours.shape != stock.shape:
        return ParityRow(name, False, detail=f"shape {tuple(ours.shape)}, stock {tuple(stock.shape)}")
    wrong = int((ours != stock).any(dim=1).sum())
    detail = f"{len(stock)} rows equal" if not wrong else f"{wrong} of {len(stock)} rows differ"
    return ParityRow(name, wrong == 0, detail=detail)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_row(ours: Path, stock: Path) -> ParityRow:
    name = "saved weights file"
    if _digest(_weights_file(ours)) == _digest(_weights_file(stock)):
        return ParityRow(name, True, detail="byte-equal")
    with safe_open(_weights_file(ours), "pt") as a, safe_open(_weights_file(stock), "pt") as b:
        strangers = sorted(set(a.keys()) ^ set(b.keys()))
        if strangers:
            return ParityRow(name, False, detail=f"only one of the two holds {', '.join(strangers[:3])}")
        different = [key for key in sorted(b.keys()) if not torch.equal(a.get_tensor(key), b.get_tensor(key))]
    what = f"{len(different)} tensors differ: {', '.join(different[:3])}" if different else "same tensors, other bytes"
    return ParityRow(name, False, detail=what)
