"""Parity report, benchmark, peak memory, sizes: against independent values, and with faults put in on purpose."""

import json

import pytest
import torch
import transformers
from harness import randomise, subjects
from safetensors.torch import load_file, save_file

import hf_ext
from hf_ext.inspection import benchmark as bench
from hf_ext.inspection import parity
from hf_ext.inspection.inputs import IGNORED, generates, is_causal_head, make_batch, ragged_lengths, resolve_head
from hf_ext.inspection.memory import PeakMemory
from hf_ext.inspection.parameters import cache_bytes, count_parameters, forward_flops

BERT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
HALVES = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 2}
HALVES |= {"vocab_size": 99, "d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
BART = {**HALVES, "max_position_embeddings": 40}
MARIAN = {**BART, "pad_token_id": 98, "decoder_start_token_id": 98, "eos_token_id": 0}
WHISPER = {**HALVES, "num_mel_bins": 8, "max_source_positions": 30, "max_target_positions": 40, "pad_token_id": 96}
WHISPER |= {"bos_token_id": 97, "eos_token_id": 97, "decoder_start_token_id": 98}
LLAMA = {**BERT, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small lose more by waiting for a second thread than they win; on a busy machine ten times as much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bert_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(1)
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(2)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


ENCODER_DECODERS = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**MARIAN)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)),
}


@pytest.fixture(scope="module")
def encoder_decoder_folder(tmp_path_factory):
    """Folder of a tiny checkpoint, by architecture."""
    folders = {}

    def folder(name):
        if name not in folders:
            torch.manual_seed(3)
            folders[name] = tmp_path_factory.mktemp(name)
            ENCODER_DECODERS[name]().save_pretrained(folders[name])
        return folders[name]

    return folder


def failed(report) -> set[str]:
    return {row.name for row in report.failed}


# ------------------------------------------------------------------------------------------------- parity


def test_parity_of_a_masked_language_model(bert_folder):
    report = parity.compare(bert_folder)
    assert report.ok, report.failed
    assert (report.ours, report.stock) == ("ExtBertForMaskedLM", "BertForMaskedLM")
    names = {row.name for row in report.rows}
    assert {"logits", "hidden states", "loss, evaluation", "loss, training without dropout"} <= names
    assert {"gradients of every parameter", "saved weights file", "loading: missing keys"} <= names
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_parity_of_a_causal_language_model(llama_folder):
    report = parity.compare(llama_folder, attn_implementation="eager")
    assert report.ok, report.failed
    assert report.attention == "eager"
    names = {row.name for row in report.rows}
    assert {"logits (left padding)", "logits (right padding)", "greedy tokens"} <= names


@pytest.mark.parametrize(
    "head", ["sequence-classification", "ForTokenClassification", "AutoModelForPreTraining", "multiple-choice", "model"]
)
def test_parity_of_heads_that_the_checkpoint_has_no_weights_for(bert_folder, head):
    report = parity.compare(bert_folder, head=head, batch_size=2, length=12)
    assert report.ok, report.failed


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("t5", None),
        ("whisper", None),
        ("bart", "question-answering"),
        *(
            pytest.param(name, None, marks=pytest.mark.slow)
            for name in ENCODER_DECODERS
            if name not in ("t5", "whisper")
        ),
        *(
            pytest.param(name, head, marks=pytest.mark.slow)
            for name, head in (
                ("t5", "T5EncoderModel"),
                ("t5", "token-classification"),
                ("t5", "sequence-classification"),
                ("whisper", "model"),
                ("whisper", "causal-lm"),
            )
        ),
    ],
)
def test_parity_of_an_encoder_decoder(encoder_decoder_folder, name, head):
    report = parity.compare(encoder_decoder_folder(name), head=head, batch_size=3, length=12)
    assert report.ok, report.failed
    rows = {row.name: row for row in report.rows}
    if head is None:
        expected = {"logits", "encoder last hidden state", "decoder hidden states", "encoder hidden states"}
        assert expected | {"loss, evaluation", "greedy tokens"} <= rows.keys()
        assert rows["greedy tokens"].detail == "3 rows equal"


def test_a_fault_in_the_encoder_only_is_found(encoder_decoder_folder, monkeypatch):
    def change(model):
        model.model.encoder.layers[1].fc2.bias.data[3] += 0.01

    faulty(monkeypatch, hf_ext.ExtBartForConditionalGeneration, change)
    report = parity.compare(encoder_decoder_folder("bart"))
    assert {"encoder hidden states", "encoder last hidden state", "logits"} <= failed(report)
    (states,) = (row for row in report.rows if row.name == "encoder hidden states")
    assert states.detail.startswith("layer 2 ")


def test_there_is_nothing_to_compare_the_textbook_model_with(tmp_path):
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf_ext.ExtTransformerConfig(**sizes, intermediate_size=8)
    hf_ext.ExtTransformerForConditionalGeneration(config).save_pretrained(tmp_path)
    for call in (parity.compare, bench.benchmark):
        with pytest.raises(ValueError, match="ext_transformer is an architecture of this package only"):
            call(tmp_path)
    with pytest.raises(ValueError, match="ext_transformer is an architecture of this package only"):
        bench.benchmark("transformer")


def test_parity_of_a_checkpoint_in_our_format(llama_folder, tmp_path):
    hf_ext.ExtLlamaForCausalLM.from_pretrained(llama_folder).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "ext_llama"
    report = parity.compare(tmp_path)
    assert report.ok, report.failed


SEEING = {  # class -> rows that must be among those of its report
    "ExtViTModel": {"last hidden state", "hidden states"},
    "ExtDeiTForImageClassificationWithTeacher": {"distillation logits"},
    "ExtSwinForMaskedImageModeling": {"reconstruction", "loss, evaluation"},
    "ExtCLIPModel": {"logits per text", "text hidden states", "image hidden states", "loss, evaluation"},
    "ExtCLIPForImageClassification": {"logits", "loss, evaluation"},
    "ExtCLIPTextModelWithProjection": {"text embeds", "hidden states"},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("ExtSwinForMaskedImageModeling", "ExtCLIPModel") else pytest.mark.slow)
        for name in SEEING
    ],
)
def test_parity_of_models_of_images_and_of_pairs(name, tmp_path):
    (subject,) = subjects(configs="one", where=lambda s: s.class_name == name)
    model = subject.stock(subject.stock_config(**subject.fields))
    randomise(model)
    model.save_pretrained(tmp_path)
    report = parity.compare(tmp_path)
    assert report.ok, report.failed
    assert {row.name for row in report.rows} >= SEEING[name] | {"gradients of every parameter", "saved weights file"}


def faulty(monkeypatch, model_class, change):
    """Makes `from_pretrained` of a class hand out models with a fault."""
    original = model_class.from_pretrained.__func__

    def with_fault(cls, *args, **kwargs):
        result = original(cls, *args, **kwargs)
        change(result[0] if isinstance(result, tuple) else result)
        return result

    monkeypatch.setattr(model_class, "from_pretrained", classmethod(with_fault))


def test_one_changed_weight_is_found(bert_folder, monkeypatch):
    def change(model):
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.weight[3, 5] += 0.01

    faulty(monkeypatch, hf_ext.ExtBertForMaskedLM, change)
    report = parity.compare(bert_folder)
    assert not report.ok
    assert {"logits", "hidden states", "gradients of every parameter", "saved weights file"} <= failed(report)
    file = next(row for row in report.rows if row.name == "saved weights file")
    assert "bert.encoder.layer.1.output.dense.weight" in file.detail
    states = next(row for row in report.rows if row.name == "hidden states")
    assert states.detail.startswith("layer 2 ")  # where the fault first shows


def test_a_wrong_norm_epsilon_is_found(bert_folder, monkeypatch):
    def change(model):
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-5

    faulty(monkeypatch, hf_ext.ExtBertForMaskedLM, change)
    report = parity.compare(bert_folder)
    assert "hidden states" in failed(report)
    assert "saved weights file" not in failed(report)  # the weights are right, the computation is not


def test_a_fault_in_the_backward_pass_only_is_found(llama_folder, monkeypatch):
    def change(model):
        model.model.layers[0].mlp.down_proj.weight.register_hook(lambda gradient: gradient * 1.01)

    faulty(monkeypatch, hf_ext.ExtLlamaForCausalLM, change)
    report = parity.compare(llama_folder)
    assert failed(report) == {"gradients of every parameter"}
    row = report.failed[0]
    assert row.detail.endswith("model.layers.0.mlp.down_proj.weight")
    assert row.max_rel == pytest.approx(0.01, rel=0.05)


def test_a_value_that_is_not_a_number_is_a_mismatch(bert_folder, monkeypatch):
    def change(model):
        with torch.no_grad():
            model.cls.predictions.bias[7] = float("nan")

    faulty(monkeypatch, hf_ext.ExtBertForMaskedLM, change)
    assert {"logits", "loss, evaluation"} <= failed(parity.compare(bert_folder))


def test_a_key_that_only_ours_misses_is_found(llama_folder, monkeypatch):
    original = hf_ext.ExtLlamaForCausalLM.from_pretrained.__func__

    def with_missing(cls, *args, **kwargs):
        model, info = original(cls, *args, **kwargs)
        return model, {**info, "missing_keys": {"model.norm.weight"}}

    monkeypatch.setattr(hf_ext.ExtLlamaForCausalLM, "from_pretrained", classmethod(with_missing))
    assert "loading: missing keys" in failed(parity.compare(llama_folder))


def test_unknown_architectures_and_heads_are_named(bert_folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "xlnet"}')
    with pytest.raises(ValueError, match="xlnet.*bert"):
        parity.compare(tmp_path)
    with pytest.raises(ValueError, match="no head 'speech'.*ExtBertForMaskedLM"):
        parity.compare(bert_folder, head="speech")


def test_heads_are_found_in_any_spelling():
    bert, llama = (hf_ext.architectures()[name] for name in ("ext_bert", "ext_llama"))
    for head in ("AutoModelForMaskedLM", "BertForMaskedLM", "ExtBertForMaskedLM", "ForMaskedLM", "masked-lm"):
        assert resolve_head(bert, head) == "ExtBertForMaskedLM"
    assert resolve_head(bert, "causal-lm") == "ExtBertLMHeadModel"
    assert resolve_head(llama, None, ["LlamaForCausalLM"]) == "ExtLlamaForCausalLM"
    assert resolve_head(llama, None, []) == "ExtLlamaModel"
    with pytest.raises(ValueError, match="saved from LlamaForFoo"):
        resolve_head(llama, None, ["LlamaForFoo"])
    with pytest.raises(ValueError, match="several heads"):
        resolve_head(bert, "classification")


# ------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("rows", "longest", "fill"), [(16, 256, 1 / 3), (64, 100, 0.5), (8, 512, 1 / 3), (32, 64, 0.9)]
)
def test_ragged_lengths_fill_what_they_say(rows, longest, fill):
    for seed in range(5):
        lengths = ragged_lengths(rows, longest, fill=fill, seed=seed)
        assert lengths.shape == (rows,)
        assert lengths.max() == longest and lengths.min() >= 2
        assert lengths.sum().item() / (rows * longest) == pytest.approx(fill, abs=0.02)
    assert torch.equal(ragged_lengths(rows, longest, seed=3), ragged_lengths(rows, longest, seed=3))


def test_ragged_lengths_of_one_row_and_bad_values():
    assert ragged_lengths(1, 10).tolist() == [10]
    with pytest.raises(ValueError, match="longest=1"):
        ragged_lengths(4, 1)
    with pytest.raises(ValueError, match="fill"):
        ragged_lengths(4, 9, fill=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_and_labelled(side):
    config = transformers.LlamaConfig(**LLAMA, pad_token_id=7)
    batch = make_batch(transformers.LlamaForCausalLM, config, torch.tensor([9, 4, 2]), padding_side=side)
    ids, mask, labels = batch.inputs["input_ids"], batch.inputs["attention_mask"], batch.labels["labels"]
    assert mask.sum(1).tolist() == [9, 4, 2] and batch.real_tokens == 15 and batch.padded_tokens == 27
    assert (ids[mask == 0] == 7).all() and (ids[mask == 1] != 7).all()
    assert (labels[mask == 0] == IGNORED).all()
    # The logits of a padding position predict nothing: no label at the first real token of a left-padded row.
    assert (labels == IGNORED).sum(1).tolist() == ([0, 6, 8] if side == "left" else [0, 5, 7])


def test_batches_of_two_halves():
    config = hf_ext.ExtBartConfig(**BART)
    lengths = torch.tensor([9, 4, 2])
    batch = make_batch(hf_ext.ExtBartForConditionalGeneration, config, lengths)
    inputs, labels = batch.inputs, batch.labels["labels"]
    start = config.decoder_start_token_id
    assert inputs["decoder_input_ids"][:, 0].tolist() == [start] * 3 and start not in labels
    for row, length in enumerate(lengths):  # shifted by one
        assert torch.equal(inputs["decoder_input_ids"][row, 1:length], labels[row, : length - 1])
    assert batch.prompt.keys() == {"input_ids", "attention_mask"} and batch.real_tokens == 2 * 15
    assert (labels != IGNORED).sum(1).tolist() == inputs["attention_mask"].sum(1).tolist() == lengths.tolist()
    sound = make_batch(transformers.WhisperModel, transformers.WhisperConfig(**WHISPER), lengths)
    assert sound.prompt.keys() == {"input_features"} and sound.inputs["input_features"].shape == (3, 8, 60)
    assert sound.real_tokens == 15 + 3 * 30 and not sound.labels
    classified = make_batch(transformers.BartForSequenceClassification, config, lengths)
    assert ((classified.inputs["input_ids"] == config.eos_token_id).sum(1) == 1).all()


def test_a_masked_batch_labels_a_seventh():
    config = transformers.BertConfig(**{**BERT, "max_position_embeddings": 512})
    batch = make_batch(transformers.BertForMaskedLM, config, ragged_lengths(32, 256))
    chosen = (batch.labels["labels"] != IGNORED).sum().item()
    assert chosen / batch.real_tokens == pytest.approx(0.15, abs=0.03)
    with pytest.raises(ValueError, match="512 positions"):
        make_batch(transformers.BertForMaskedLM, config, torch.tensor([513]))
    assert is_causal_head("BertLMHeadModel") and not is_causal_head("BertForMaskedLM")


# ------------------------------------------------------------------------------------------------- benchmark


def test_benchmark_counts_tokens():
    scenarios = ["training-ragged", "inference-full"]
    rows = bench.benchmark(
        "bert", overrides=BERT, batch_size=8, length=32, repeats=1, threads=1, scenarios=scenarios, memory=False
    )
    assert [row.scenario for row in rows] == ["inference-full", "training-ragged"]
    full, ragged = rows
    assert (full.tokens, full.padded_tokens) == (8 * 32, 8 * 32)
    assert (ragged.tokens, ragged.padded_tokens) == (int(ragged_lengths(8, 32).sum()), 8 * 32)
    for row in rows:
        assert row.speed_ratio == row.stock_seconds / row.ours_seconds > 0


@pytest.mark.parametrize("head", ["question-answering", "multiple-choice"])
def test_longformer_heads_that_look_for_separators(head, tmp_path):
    sizes = {**BERT, "num_hidden_layers": 1, "attention_window": [4]}
    scenarios = ["training-ragged", "inference-full"]
    options = {"batch_size": 2, "length": 12, "repeats": 1, "scenarios": scenarios, "memory": False}
    assert len(bench.benchmark("longformer", head=head, overrides=sizes, **options)) == 2
    transformers.LongformerForMaskedLM(transformers.LongformerConfig(**sizes)).save_pretrained(tmp_path)
    report = parity.compare(tmp_path, head=head, batch_size=2, length=12)
    assert report.ok, report.failed


def test_benchmark_of_images_and_of_pairs():
    """Of images alone there is no ragged batch; patches count."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    options = {"batch_size": 2, "repeats": 1, "threads": 1, "scenarios": ["inference", "training"], "memory": False}
    rows = bench.benchmark("vit", overrides={**sizes, "image_size": 32, "patch_size": 16}, **options)
    assert [(row.scenario, row.tokens) for row in rows] == [("inference-full", 8), ("training-full", 8)]
    words = {"vocab_size": 50, "bos_token_id": 48, "eos_token_id": 49}
    pair = {"text_config": {**sizes, **words}, "vision_config": {**sizes, "image_size": 32, "patch_size": 16}}
    rows = bench.benchmark("clip", overrides=pair, length=12, **options)
    assert [row.scenario for row in rows] == ["inference-ragged", "inference-full", "training-ragged", "training-full"]
    assert rows[1].tokens == 24
    with pytest.raises(ValueError, match="length=78 exceeds the 77 positions"):
        bench.benchmark("clip", overrides=pair, length=78, **options)
    with pytest.raises(ValueError, match="ExtSwinBackbone has neither one output nor a loss"):
        bench.benchmark("swin", head="backbone", overrides={"depths": [1], "num_heads": [1], "embed_dim": 8}, **options)


def test_benchmark_measures_memory():
    sizes = {**BERT, "vocab_size": 20_000, "hidden_size": 64}
    (row,) = bench.benchmark(
        "bert", overrides=sizes, batch_size=8, length=32, repeats=1, threads=1, scenarios=["training-full"]
    )
    # A training step holds a gradient for every weight; the stock class also the logits of all positions, twice.
    gradients = 4 * count_parameters(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)))
    logits = 4 * 8 * 32 * sizes["vocab_size"]
    assert gradients < row.ours_peak < gradients + 2 * logits < row.stock_peak < gradients + 5 * logits
    assert row.to_dict()["memory_ratio"] == row.stock_peak / row.ours_peak


def test_benchmark_of_a_checkpoint_that_generates(llama_folder):
    rows = bench.benchmark(
        llama_folder, batch_size=2, length=16, repeats=2, scenarios=["generate"], new_tokens=5, memory=False
    )
    assert [(row.scenario, row.tokens) for row in rows] == [("generate-1", 5), ("generate-8", 40)]
    assert all(row.ours_peak is None and row.memory_ratio is None for row in rows)
    assert rows[0].tokens_per_second("ours") == pytest.approx(5 / rows[0].ours_seconds)


@pytest.mark.parametrize(("name", "sizes"), [("t5", T5), ("bart", BART), ("marian", MARIAN), ("whisper", WHISPER)])
def test_benchmark_of_an_encoder_decoder(name, sizes):
    scenarios = ["generate-1", "inference-ragged", "training-full"]
    rows = bench.benchmark(
        name, overrides=sizes, batch_size=3, length=8, repeats=1, scenarios=scenarios, new_tokens=3, memory=False
    )
    encoder = {"inference-ragged": int(ragged_lengths(3, 8).sum()), "training-full": 24, "generate-1": 0}
    assert [row.scenario for row in rows] == ["inference-ragged", "training-full", "generate-1"]
    for row in rows:
        if row.scenario == "generate-1":
            assert row.tokens == 3
        else:
            decoder = encoder[row.scenario]
            assert row.tokens == decoder + (3 * sizes["max_source_positions"] if name == "whisper" else decoder)


@pytest.mark.parametrize("subject", subjects(configs="one"), ids=str)
def test_what_generates(subject):
    """Some configurations carry `is_decoder` without a meaning, and some encoders own `generate`."""
    for model_class in (subject.ours, subject.stock):
        with torch.device("meta"):
            model = model_class(model_class.config_class(**subject.fields))
        assert generates(model) == (
            subject.kind in ("aligned", "seq2seq") or (subject.kind == "causal" and subject.causal)
        )


def test_repeats_alternate_after_a_warm_up():
    order = []
    steps = {side: lambda side=side: order.append(side) for side in ("ours", "stock")}
    seconds = bench._interleaved(steps, 3, "cpu")
    assert order == ["ours", "stock", "ours", "stock", "stock", "ours", "ours", "stock"]
    assert len(seconds["ours"]) == len(seconds["stock"]) == 3


def test_benchmark_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="did you mean 'hidden_size'"):
        bench.benchmark("bert", overrides={"hidden_siz": 8})
    with pytest.raises(ValueError, match="scenario 'fast'"):
        bench.benchmark("bert", scenarios=["fast"])
    with pytest.raises(ValueError, match="40 positions"):
        bench.benchmark("bert", overrides=BERT, length=41, scenarios=["inference"])
    with pytest.raises(ValueError, match="does not generate"):
        bench.benchmark("bert", overrides=BERT, length=16, scenarios=["generate"])


def test_overrides_are_read_as_values():
    given = ["a=3", "b=0.5", "c=true", "d=None", "e=gelu", "f=[1, 2]"]
    assert bench.parse_overrides(given) == {"a": 3, "b": 0.5, "c": True, "d": None, "e": "gelu", "f": [1, 2]}
    with pytest.raises(ValueError, match="key=value"):
        bench.parse_overrides(["hidden_size"])


# ------------------------------------------------------------------------------------------------- memory, sizes


def test_peak_memory_sees_what_is_freed_again():
    with PeakMemory() as memory:
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        del block
    assert 63 * 2**20 < memory.above < 80 * 2**20
    with PeakMemory() as memory:
        torch.ones(2**20, dtype=torch.uint8)
    assert memory.above < 16 * 2**20  # the earlier peak does not linger


def test_sampled_peak_memory(monkeypatch):
    monkeypatch.setattr("hf_ext.inspection.memory._reset_high_water_mark", lambda: False)
    with PeakMemory() as memory:
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        torch.randn(300, 300) @ torch.randn(300, 300)
        block.fill_(3)
    assert memory.method == "sampling"
    assert memory.above > 60 * 2**20


def test_parameters_count_once_when_tied():
    config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config)
    c, f, kv = 32, 48, 16
    layer = 2 * c * c + 2 * c * kv + 3 * c * f + 2 * c
    assert count_parameters(model) == 99 * c + 2 * layer + c
    model.model.embed_tokens.weight.requires_grad = False
    assert count_parameters(model, trainable_only=True) == 2 * layer + c


def test_cache_bytes_is_what_the_cache_holds():
    config = transformers.LlamaConfig(**LLAMA)
    expected = 2 * 2 * 3 * 2 * 11 * 8 * 4  # two tensors, layers, rows, KV heads, tokens, head width, bytes
    assert cache_bytes(config, batch_size=3, length=11, dtype=torch.float32) == expected
    assert cache_bytes(config, batch_size=3, length=11, dtype=torch.bfloat16) == expected // 2
    cache = transformers.LlamaForCausalLM(config)(torch.ones(3, 11, dtype=torch.long)).past_key_values
    assert sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values)) == expected


def test_cache_bytes_of_a_sliding_window():
    config = transformers.MistralConfig(**LLAMA, sliding_window=6)
    model = transformers.MistralForCausalLM(config)
    with torch.no_grad():
        cache = model(torch.ones(2, 5, dtype=torch.long)).past_key_values
        for _ in range(8):
            cache = model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache).past_key_values
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert cache_bytes(config, batch_size=2, length=13, dtype=torch.float32) == held


@pytest.mark.parametrize("name", ["ExtLlamaForCausalLM", "LlamaForCausalLM"])
def test_forward_flops_by_formula(name):
    library = hf_ext if name.startswith("Ext") else transformers
    model = getattr(library, name)(getattr(library, name.replace("ForCausalLM", "Config"))(**LLAMA))
    rows, length, c, f, kv, vocabulary = 3, 10, 32, 48, 16, 99
    weights = 2 * (2 * c * c + 2 * c * kv + 3 * c * f) + c * vocabulary
    attention = 2 * 2 * length * length * c  # two layers, scores and mix, over C
    expected = 2 * rows * (length * weights + attention)
    rotary = 2 * rows * (8 // 2) * length  # angles are an outer product written as a matrix product
    assert expected <= forward_flops(model, batch_size=rows, length=length) <= expected + rotary


def test_weights_that_differ_from_the_file_are_not_byte_equal(bert_folder, tmp_path):
    for side, shift in (("ours", 0.0), ("stock", 1e-7)):
        (tmp_path / side).mkdir()
        tensors = load_file(bert_folder / "model.safetensors")
        tensors["cls.predictions.bias"] += shift
        save_file(tensors, tmp_path / side / "model.safetensors", metadata={"format": "pt"})
    row = parity._file_row(tmp_path / "ours", tmp_path / "stock")
    assert not row.ok and row.detail == "1 tensors differ: cls.predictions.bias"
