"""The scripts in examples/, with tiny settings: what they promise is asserted, not only that they run."""

import json
import os
import re
import runpy
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    WhisperConfig,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

import hf_ext
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
