"""Convert a RoBERTa that was trained with fairseq into the Hugging Face format, with its tokenizer.

    python examples/convert_fairseq_roberta.py --output sapiens-heavy
    python examples/convert_fairseq_roberta.py --checkpoint model.pt --dictionary dict.txt --output my-roberta

Without a checkpoint it takes Sapiens (Prihoda et al., 2022, https://doi.org/10.1080/19420862.2021.2020203), a masked
language model of human antibody sequences in the PyPI package of that name: a token is an amino acid. The result is an
official checkpoint that `ExtRobertaForMaskedLM`, the stock class and `pipeline("fill-mask")` load. Its tokenizer takes
one symbol of the dictionary at a time, which suits letters; a model with word pieces needs the tokenizer that it was
trained with beside the weights.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import hf_ext
from hf_ext.data.packages import fetch_package

SAPIENS = ("sapiens", "1.0.5", "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # fairseq numbers them first, and `<mask>` after the dictionary

NAMES = {  # fairseq -> official, the longer ones first
    "decoder.sentence_encoder.": "roberta.",
    "decoder.lm_head.": "lm_head.",
    "embed_tokens": "embeddings.word_embeddings",
    "embed_positions": "embeddings.position_embeddings",
    "emb_layer_norm": "embeddings.LayerNorm",
    "roberta.layers.": "roberta.encoder.layer.",
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
    "lm_head.weight": "lm_head.decoder.weight",
}


def official_name(name: str) -> str:
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return name


def read_checkpoint(file: Path) -> tuple[argparse.Namespace, dict[str, Tensor]]:
    """The training arguments and the weights. Nothing but tensors and those arguments is unpickled."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    return checkpoint["args"], checkpoint["model"]


def convert(file: Path, words: list[str]) -> hf_ext.ExtRobertaForMaskedLM:
    """The model. A name that is left over, or missing, is an error: nothing is initialised at random."""
    args, weights = read_checkpoint(file)
    vocab_size, width = weights["decoder.sentence_encoder.embed_tokens.weight"].shape
    if vocab_size != len(words):
        raise SystemExit(f"the dictionary has {len(words)} symbols, special ones included, the weights {vocab_size}.")
    config = hf_ext.ExtRobertaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=args.encoder_layers,
        num_attention_heads=args.encoder_attention_heads,
        intermediate_size=args.encoder_ffn_embed_dim,
        hidden_act=args.activation_fn,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.attention_dropout,
        max_position_embeddings=weights["decoder.sentence_encoder.embed_positions.weight"].shape[0],
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    model = hf_ext.ExtRobertaForMaskedLM(config)
    state = {official_name(name): value.float() for name, value in weights.items() if not name.endswith("version")}
    state["lm_head.decoder.bias"] = state["lm_head.bias"]
    state["roberta.embeddings.token_type_embeddings.weight"] = torch.zeros(1, width)  # fairseq has no segments
    model.load_state_dict(state, strict=True)
    return model.eval()


def make_tokenizer(words: list[str], longest: int) -> PreTrainedTokenizerFast:
    """A symbol of the dictionary is a token; `<s>` before and `</s>` after each text."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    special = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="<s>",
        sep_token="</s>",
        mask_token="<mask>",
        model_max_length=longest,
        **special,
    )


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=None, help="fairseq .pt file; Sapiens if not given")
    parser.add_argument("--dictionary", type=Path, default=None, help="its dict.txt")
    parser.add_argument("--chain", choices=["heavy", "light"], default="heavy", help="which model of Sapiens")
    parser.add_argument("--output", type=Path, default=Path("converted-roberta"), help="folder to write")
    args = parser.parse_args(arguments)
    if (args.checkpoint is None) != (args.dictionary is None):
        parser.error("--checkpoint and --dictionary belong together")
    if args.output.exists() and any(args.output.iterdir()):
        parser.error(f"{args.output} is not empty; give another folder")

    with tempfile.TemporaryDirectory() as folder:
        checkpoint, dictionary = args.checkpoint, args.dictionary
        if checkpoint is None:
            with zipfile.ZipFile(fetch_package(*SAPIENS)) as archive:
                place = "sapiens/models/v1"
                checkpoint = Path(archive.extract(f"{place}/checkpoint_v{args.chain[0]}.pt", folder))
                dictionary = Path(archive.extract(f"{place}/dict.txt", folder))
        lines = dictionary.read_text(encoding="utf-8").splitlines()
        words = [*SPECIAL, *(line.rsplit(" ", 1)[0] for line in lines), "<mask>"]
        model = convert(checkpoint, words)
    hf_ext.export_official(model, args.output)
    make_tokenizer(words, model.config.max_position_embeddings - 2).save_pretrained(args.output)
    print(f"{args.output}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(words)} symbols")
    return {"model": model, "words": words}


if __name__ == "__main__":
    main()
