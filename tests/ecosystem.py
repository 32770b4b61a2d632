"""What people do with a model besides calling it: train it, adapt it, quantise it, move it, export it.

One function per check, over one class of each architecture. What the library does with the stock class is the
reference; where that fails, the check says so (`StockFails`), and ours need not do better.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from harness import (
    IGNORED,
    PEFT_WARNINGS,
    TASKS,
    Subject,
    adapter,
    assert_close,
    assert_identical,
    build,
    collator_for,
    compare_gradients,
    compare_outputs,
    loss_and_gradients,
    loss_of,
    nf4,
    no_dropout,
    no_warning,
    pair,
    randomise,
    real_positions,
    scratch,
    settle,
    stock_adapter,
    tensors_of,
    trainer,
    training_rows,
)
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from peft.utils.hotswap import hotswap_adapter
from torch import nn
from transformers import EarlyStoppingCallback, Trainer
from transformers.exporters import OnnxConfig, OnnxExporter


class StockFails(Exception):
    """The stock class cannot do this either."""


REFUSALS = (AssertionError, KeyError, RuntimeError, TypeError, ValueError)  # a slip in a test is none


def task(subject: Subject) -> str | None:
    """PEFT's name for what the head does; its wrapper for encoder-decoders knows token ids only."""
    return None if subject.is_speech else TASKS.get(subject.kind)


# --- adapters -----------------------------------------------------------------------------------------------------

ADAPTERS: dict[str, Callable[..., PeftConfig]] = {
    "rsLoRA": lambda **o: LoraConfig(r=4, use_rslora=True, **o),
    "DoRA": lambda **o: LoraConfig(r=4, use_dora=True, **o),
    "PiSSA": lambda **o: LoraConfig(r=2, lora_alpha=2, init_lora_weights="pissa", **o),
    "AdaLoRA": lambda **o: AdaLoraConfig(init_r=4, total_step=10, **o),
    "IA3": lambda **o: IA3Config(**o),
    "LoHa": lambda **o: LoHaConfig(r=2, **o),
    "LoKr": lambda **o: LoKrConfig(r=2, **o),
    "OFT": lambda **o: OFTConfig(r=0, oft_block_size=4, **o),
    "VeRA": lambda **o: VeraConfig(r=4, **o),
}
PROMPTS: dict[str, Callable[..., PeftConfig]] = {
    "prompt tuning": lambda **o: PromptTuningConfig(num_virtual_tokens=3, **o),
    "P-tuning": lambda **o: PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **o),
    "prefix tuning": lambda **o: PrefixTuningConfig(num_virtual_tokens=3, **o),
}


def for_stock(subject: Subject, stock: nn.Module, config: PeftConfig, ours: PeftConfig) -> PeftConfig:
    """The adapter that ours got by default, for the stock class: its type may have no default, and its modules other
    names in memory."""

    def called(targets: set[str]) -> list[str]:
        names = {name: subject.stock_name(f"{name}.").removesuffix(".") for name, _ in stock.named_modules()}
        return [name for name, ours in names.items() if any(f".{ours}".endswith(f".{t}") for t in targets)]

    config.target_modules = called(ours.target_modules)
    if isinstance(config, IA3Config):
        config.feedforward_modules = called(ours.feedforward_modules)
    return config


def check_adapter(subject: Subject, method: str) -> None:
    """Found by the default targets, trained as on the stock class, saved, reloaded and merged."""
    stock, ours = pair(subject, **no_dropout(subject))
    inputs = subject.inputs(ours.config, "right")
    if subject.kind == "span":
        inputs.pop("token_type_ids", None)  # PEFT's own wrapper for question answering does not pass them on
    labels, real = subject.labels(ours.config, inputs), real_positions(inputs)
    make = ADAPTERS[method]
    torch.manual_seed(0)
    try:
        with no_warning(PEFT_WARNINGS):
            tuned = get_peft_model(ours, make(task_type=task(subject)))
    except TypeError as error:  # a kind of layer that the method does not know: then it does not in the stock class
        own = subject.architecture.adapters
        targets = {"target_modules": list(own.projections)} if own else {}
        try:
            get_peft_model(stock, make(task_type=task(subject), **targets))
        except TypeError:
            raise StockFails(f"{method} knows no such layer: {error}") from error
        raise
    torch.manual_seed(0)
    given = tuned.peft_config["default"]
    official = get_peft_model(stock, for_stock(subject, stock, make(task_type=task(subject)), given))
    rename = subject.stock_name
    names = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (tuned, official)]
    assert names[0] == {rename(name) for name in names[1]}
    if method not in ("PiSSA", "OFT"):  # those are started near the identity, and stay near it
        settle(tuned)
        settle(official, rename)
    loss, found = loss_and_gradients(tuned, subject, inputs, labels)
    expected_loss, expected = loss_and_gradients(official, subject, inputs, labels, rename=rename, **subject.as_stock)
    assert_close(loss, expected_loss, "loss")
    compare_gradients(found, expected, method)
    rate = 0.01
    for model in (tuned, official):
        model.eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
    with torch.no_grad():
        expected, reference = tuned(**inputs), official(**inputs)
        compare_outputs(expected, reference, f"{method}, after a step", real)
        folder = scratch()
        tuned.save_pretrained(folder)
        with no_warning((*PEFT_WARNINGS, "eva|pissa")):
            loaded = PeftModel.from_pretrained(build(subject.ours, subject, **no_dropout(subject)), folder).eval()
        compare_outputs(loaded(**inputs), expected, f"{method}, reloaded", real)
        merged = loaded.merge_and_unload()
        assert type(merged) is subject.ours
        compare_outputs(merged(**inputs), expected, f"{method}, merged", real, 5e-5)


def check_prompt(subject: Subject, method: str) -> None:
    """Virtual tokens before the text, as embeddings or as cached keys and values."""
    stock, ours = pair(subject, **no_dropout(subject))
    inputs = {n: x for n, x in subject.inputs(ours.config, "right").items() if n != "token_type_ids"}
    labels = subject.labels(ours.config, inputs)
    results, models = [], []
    for model in (stock, ours):
        torch.manual_seed(0)
        model.train()
        options = {"inference_mode": False}
        try:
            tuned = get_peft_model(model, PROMPTS[method](task_type=task(subject), **options))
            settle(tuned)
            loss, found = loss_and_gradients(tuned, subject, inputs, labels)
            with torch.no_grad():
                output = tuned.eval()(**inputs)
        except REFUSALS as error:
            if model is stock:
                raise StockFails(f"{type(error).__name__}: {error}") from error
            raise
        results.append((loss, {n: g for n, g in found.items() if "prompt_encoder" in n}, output))
        models.append(tuned)
    (expected_loss, expected, reference), (loss, found, output) = results
    assert_close(loss, expected_loss, "loss")
    compare_gradients(found, expected, method)
    real = real_positions(inputs)
    if not subject.seq2seq and output.logits.dim() == 3:
        virtual = torch.ones(len(real), output.logits.shape[1] - real.shape[1], dtype=torch.bool)
        real = torch.cat([virtual, real], 1)
        assert_close(output.logits[real], reference.logits[real], "logits")
    else:
        assert_close(output.logits, reference.logits, "logits")
    folder = scratch()
    models[1].save_pretrained(folder)
    loaded = PeftModel.from_pretrained(build(subject.ours, subject, **no_dropout(subject)), folder).eval()
    with torch.no_grad():
        assert_identical({"logits": loaded(**inputs).logits}, {"logits": output.logits}, "reloaded")
    if subject.generates:
        prompt = {"input_ids": inputs["input_ids"][:2, :4]}
        tokens = [m.generate(**prompt, max_new_tokens=5, do_sample=False) for m in models]
        assert torch.equal(*tokens)


def check_no_target(subject: Subject) -> None:
    """An adapter that would adapt nothing is refused, with the name that was not found."""
    model = build(subject.ours, subject)
    try:
        get_peft_model(model, LoraConfig(target_modules=["no_such_layer"]))
    except ValueError as error:
        assert "no_such_layer" in str(error)
    else:
        raise AssertionError("an adapter without a layer was accepted")


def check_hotswap(subject: Subject) -> None:
    """One adapter in the place of another, without loading the model anew."""
    folders, expected = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tuned = get_peft_model(build(subject.ours, subject), LoraConfig(r=4, init_lora_weights=False)).eval()
        inputs = subject.inputs(tuned.config, "right")
        folders.append(scratch())
        tuned.save_pretrained(folders[-1])
        with torch.no_grad():
            expected.append(tuned(**inputs))
    model = PeftModel.from_pretrained(build(subject.ours, subject), folders[0]).eval()
    for which in (1, 0):
        hotswap_adapter(model, str(folders[which]), adapter_name="default")
        with torch.no_grad():
            output = model(**inputs)
        for name, value in tensors_of(expected[which]).items():
            assert torch.equal(tensors_of(output)[name], value), name


# --- new tokens ---------------------------------------------------------------------------------------------------


def embedding_names(model: nn.Module) -> tuple[str, str]:
    """Names of the input embedding and of the head's matrix."""
    wanted = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules()}
    return tuple(names[id(module)].rpartition(".")[2] for module in wanted)


NEW_TOKENS = ("trainable_token_indices", "modules_to_save")


def check_new_tokens(subject: Subject, way: str) -> None:
    """Tokens that are added to a tied model and trained through an adapter are there after merging and reloading.

    PEFT forgets the bias of a tied head (BERT), and an embedding that two halves share (T5): so it does with the stock
    classes.
    """
    try:
        train_new_tokens(subject, subject.stock, way)
    except REFUSALS as error:
        raise StockFails(f"{type(error).__name__}: {error}") from error
    train_new_tokens(subject, subject.ours, way)


def train_new_tokens(subject: Subject, cls: type, way: str) -> None:
    """The new rows are trained, and adapter, merged model and its file all give the same."""
    base = build(cls, subject, tie_word_embeddings=True)
    old = base.get_input_embeddings().weight.shape[0]
    base.resize_token_embeddings(old + 3, mean_resizing=False)
    grown = scratch()
    base.save_pretrained(grown)
    embedding, head = embedding_names(base)
    new = [old, old + 1, old + 2]
    options = {way: {embedding: new} if way == "trainable_token_indices" else [embedding, head]}
    inputs = subject.inputs(base.config, "right", tokens=9)
    inputs["input_ids"][:, 1:3] = torch.tensor(new[:2])
    inputs["attention_mask"][:, :3] = 1
    labels, real = subject.labels(base.config, inputs), real_positions(inputs)
    targets = adapter(subject).target_modules if cls is subject.ours else stock_adapter(subject).target_modules
    # In eval mode there is no dropout; the stock MPT writes no probability that it would read again.
    model = get_peft_model(cls.from_pretrained(grown), LoraConfig(r=2, target_modules=targets, **options)).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        loss_of(model, subject, inputs, labels).backward()
        optimizer.step()
    with torch.no_grad():
        expected = model(**inputs)
        before, after = (m.get_input_embeddings()(torch.tensor(new[:2])) for m in (base, model))
        assert (after - before).abs().max() > 1e-4, "the new rows were not trained"
        folder = scratch()
        model.save_pretrained(folder)
        fresh = PeftModel.from_pretrained(cls.from_pretrained(grown), folder).eval()
        compare_outputs(fresh(**inputs), expected, "adapter reloaded", real)
        merged = fresh.merge_and_unload()
        compare_outputs(merged(**inputs), expected, "merged", real)
        folder = scratch()
        merged.save_pretrained(folder)
        compare_outputs(cls.from_pretrained(folder).eval()(**inputs), expected, "merged and reloaded", real)


# --- quantised training -------------------------------------------------------------------------------------------


def check_qlora(subject: Subject) -> None:
    """The recipe of the QLoRA paper: NF4, the constants quantised too, an adapter that learns, is kept and merged."""
    fields = {**subject.fields, **subject.case.wide, **no_dropout(subject)}
    torch.manual_seed(0)
    source = subject.stock(subject.stock_config(**fields))
    randomise(source)
    folder = scratch()
    source.save_pretrained(folder)
    options = nf4(bnb_4bit_use_double_quant=True)

    def load() -> nn.Module:
        return subject.ours.from_pretrained(folder, quantization_config=options, dtype=torch.float32).eval()

    model = prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)
    config = LoraConfig(r=4, task_type=task(subject), target_modules="all-linear")
    tuned = get_peft_model(model, config)
    inputs = subject.inputs(model.config, "right")
    labels, real = subject.labels(model.config, inputs), real_positions(inputs)
    trained = [p for p in tuned.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    losses = []
    for _ in range(6):
        loss, _ = loss_and_gradients(tuned, subject, inputs, labels)
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < losses[0], losses
    tuned.eval()
    with torch.no_grad():
        expected = tuned(**inputs)
        adapter = scratch()
        tuned.save_pretrained(adapter)
        again = PeftModel.from_pretrained(load(), adapter).eval()
        compare_outputs(again(**inputs), expected, "reloaded", real)
        whole = PeftModel.from_pretrained(load().dequantize(), adapter).eval()
        compare_outputs(whole(**inputs), expected, "dequantised", real, 1e-4)
        merged = whole.merge_and_unload()
        compare_outputs(merged(**inputs), expected, "merged", real, 1e-4)
        out = scratch()
        merged.save_pretrained(out)
        kept = subject.ours.from_pretrained(out).eval()
        assert getattr(kept, "quantization_method", None) is None
        compare_outputs(kept(**inputs), expected, "merged and reloaded", real, 1e-4)


# --- Trainer ------------------------------------------------------------------------------------------------------


def measured(prediction: object) -> dict[str, float]:
    """The mean size of the predictions where there are labels, which any change of either changes."""
    first = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    scores, labels = torch.as_tensor(first).double(), torch.as_tensor(prediction.label_ids)
    if scores.shape[:-1] == labels.shape:
        scores = scores[labels != IGNORED]
    return {"size": float(scores.abs().mean())}


def counting_as_the_loss(runner: Trainer, subject: Subject) -> Trainer:
    """Trainer takes GPT-2's loss for one that does not shift the labels, by the class's name, and divides it by too
    many."""
    runner._loss_shifts_labels = subject.kind == "causal"
    return runner


def check_trainer(subject: Subject) -> None:
    """The same run, with the options that people use, gives the same curve as the stock class."""
    curves, answers = [], []
    for cls in (subject.stock, subject.ours):
        model = build(cls, subject, **no_dropout(subject), **(subject.as_stock if cls is subject.stock else {}))
        rows = training_rows(subject, model.config, 8, unequal=False)
        if rows[0]["labels"].dim():  # a batch without a target has no loss in the stock class
            rows = [row for row in rows if (row["labels"][1:] != IGNORED).any()]
        folder = scratch()
        runner = trainer(
            model,
            rows,
            batch=2,
            collator=collator_for(subject, 2),
            output_dir=str(folder),
            num_train_epochs=2,
            max_steps=-1,
            learning_rate=5e-3,
            optim="adamw_torch",
            lr_scheduler_type="cosine",
            warmup_steps=2,
            max_grad_norm=0.5,
            weight_decay=0.1,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_strategy="steps",
            logging_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            save_total_limit=1,
            report_to=["tensorboard"],
            train_sampling_strategy="group_by_length" if "input_ids" in rows[0] else "random",
        )
        counting_as_the_loss(runner, subject)
        runner.compute_metrics = measured
        runner.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
        runner.train()
        curves.append([entry for entry in runner.state.log_history if "loss" in entry or "eval_loss" in entry])
        answers.append(runner.predict(rows))
        best = Path(runner.state.best_model_checkpoint)
        assert (best / "model.safetensors").is_file()
        assert list(folder.rglob("events.out.tfevents.*")), "nothing was written for TensorBoard"
    reference, found = curves
    assert len(found) == len(reference) >= 4
    for expected, entry in zip(reference, found, strict=True):
        assert expected.keys() == entry.keys()
        for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "eval_size"):
            if name in expected:
                assert abs(entry[name] - expected[name]) < 1e-3 * max(1.0, abs(expected[name])), (name, entry, expected)


def losses_of_a_run(subject: Subject, **arguments: object) -> list[float]:
    """Two steps of SGD; the weights stay in fp32."""
    model = build(subject.ours, subject, **no_dropout(subject))
    model.config.use_cache = False
    rows = training_rows(subject, model.config, 4)
    arguments = {"max_steps": 2, "logging_strategy": "steps", "logging_steps": 1, "learning_rate": 0.01, **arguments}
    runner = trainer(model, rows, batch=4, collator=collator_for(subject, 4), **arguments)
    runner.train()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    losses = [entry["loss"] for entry in runner.state.log_history if "loss" in entry]
    assert len(losses) == 2
    return losses


def check_bf16(subject: Subject) -> None:
    """Mixed precision: the losses of fp32 to the digits that bf16 has."""
    for half, exact in zip(losses_of_a_run(subject, bf16=True), losses_of_a_run(subject), strict=True):
        assert abs(half - exact) < 0.03 * max(1.0, abs(exact))


def check_torch_compile(subject: Subject) -> None:
    """`torch_compile=True`: the same losses; what the compiler makes of a graph is checked elsewhere."""
    compiled = losses_of_a_run(subject, torch_compile=True, torch_compile_backend="eager")
    torch._dynamo.reset()
    for value, exact in zip(compiled, losses_of_a_run(subject), strict=True):
        assert abs(value - exact) < 1e-4 * max(1.0, abs(exact))


def check_label_smoothing(subject: Subject) -> None:
    """`label_smoothing_factor`: Trainer computes the loss itself, from the logits."""
    losses = []
    for model in pair(subject, **no_dropout(subject)):
        rows = training_rows(subject, model.config, 4)
        runner = trainer(model, rows, batch=4, collator=collator_for(subject, 4), label_smoothing_factor=0.1)
        losses.append(counting_as_the_loss(runner, subject).evaluate()["eval_loss"])
    assert abs(losses[0] - losses[1]) < 1e-5 * max(1.0, losses[0]), losses


# --- placing ------------------------------------------------------------------------------------------------------


def blocks_on_disk(model: nn.Module) -> dict[str, str]:
    """A device map that leaves every block on the disk, and all else in memory."""
    blocks = {id(block) for block in model.base_model.blocks()}
    places = {}

    def place(module: nn.Module, name: str) -> None:
        if id(module) in blocks:
            places[name] = "disk"
        elif blocks.isdisjoint(id(inner) for inner in module.modules()):
            places[name] = "cpu"
        else:
            prefix = f"{name}." if name else ""
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            places.update((f"{prefix}{name}", "cpu") for name, _ in own)
            for child, inner in module.named_children():
                place(inner, f"{prefix}{child}")

    place(model, "")
    return places


def check_offload(subject: Subject) -> None:
    """Weights that stay on the disk until a block is computed, and weights that are dispatched into an empty model."""
    direct = build(subject.ours, subject)
    inputs = subject.inputs(direct.config, "right")
    with torch.no_grad():
        expected = direct(**inputs)
        ours_on_disk = scratch()
        direct.save_pretrained(ours_on_disk)
        placed = subject.ours.from_pretrained(
            ours_on_disk, device_map=blocks_on_disk(direct), offload_folder=str(scratch()), dtype=torch.float32
        ).eval()
        assert all(p.is_meta for block in placed.base_model.blocks() for p in block.parameters())
        compare_outputs(placed(**inputs), expected, "from the disk")

        if subject.ours._keys_to_ignore_on_save:
            return  # accelerate leaves empty what is in no file (Marian's sinusoids), in the stock class too
        with init_empty_weights():
            empty = subject.ours(direct.config)
        assert all(p.is_meta for p in empty.parameters())
        empty.tie_weights()  # accelerate loads one of two tied tensors
        whole = load_checkpoint_and_dispatch(empty, str(ours_on_disk), device_map={"": "cpu"}, strict=False).eval()
        compare_outputs(whole(**inputs), expected, "dispatched")


# --- ONNX ---------------------------------------------------------------------------------------------------------


def check_onnx(subject: Subject) -> None:
    """The library's own exporter, run in ONNX Runtime on another batch and another length."""
    model = build(subject.ours, subject)
    model.config.use_cache = False
    sample = subject.inputs(model.config, "right", batch=3, tokens=8)
    # Of images the batch alone varies: what follows from their size, as Swin's windows, is slow to trace for any size.
    shapes = {"dynamic_shapes": {"pixel_values": {0: torch.export.Dim.AUTO}}} if subject.is_image else {"dynamic": True}
    exported = OnnxExporter().export(model, sample, config=OnnxConfig(**shapes))
    for rows, length in ((3, 8), (2, 11)):
        inputs = subject.inputs(model.config, "right", batch=rows, tokens=length, seed=rows)
        with torch.no_grad():
            expected = tensors_of(model(**inputs, skip_padding=False) if subject.is_text else model(**inputs))
        output = exported(**inputs)
        assert expected.keys() <= output.keys(), f"{sorted(expected.keys() - output.keys())} not in {sorted(output)}"
        for name, value in expected.items():
            assert_close(torch.as_tensor(output[name]), value, f"{name} in ONNX Runtime", 1e-4)
