"""An ordinary transformers script, as it is and under `hf_ext.takeover()`: the same vectors, measured side by side.

    python examples/takeover_existing_script.py --model sentence-transformers/all-MiniLM-L6-v2

`load` and `embed` are the existing script: they know nothing of this package. Inside the `with` block the Auto classes
build our classes, and nothing else changes. Texts of unequal lengths make batches with much padding, which the stock
class computes and ours leaves out. Both sides run the same batches in turn, so that whatever else the machine does
hits both alike; the medians are compared.

Without `--model` a small BERT with random weights is made, which takes no download; speed does not depend on values.
For a script in a file of its own there is `python -m hf_ext.takeover script.py`.
"""

import argparse
import statistics
import tempfile
import time
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)

import hf_ext

# --- the existing script ------------------------------------------------------------------------------------------


def load(checkpoint: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer, through the Auto classes."""
    return AutoModel.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)


@torch.inference_mode()
def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], batch_size: int) -> Tensor:
    """One vector of length 1 per text, the mean over its tokens: (texts, C)."""
    vectors = []
    for start in range(0, len(texts), batch_size):
        batch = tokenizer(texts[start : start + batch_size], padding=True, truncation=True, return_tensors="pt")
        hidden = model(**batch).last_hidden_state  # (B, T, C)
        mask = batch["attention_mask"][..., None]
        vectors.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(vectors), dim=-1)


# --- a checkpoint and texts ---------------------------------------------------------------------------------------


def paragraphs(count: int) -> list[str]:
    """Texts of very unequal lengths from CPython's own reference."""
    found = [p.strip() for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()]
    return [found[i * len(found) // count] for i in range(min(count, len(found)))]


def make_checkpoint(folder: str, texts: list[str], width: int, layers: int) -> str:
    """An official BERT checkpoint with random weights, and a WordPiece tokenizer trained on the texts."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=512,
    ).save_pretrained(folder)  # fmt: skip
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 32, intermediate_size=4 * width,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> dict:
    """Measure, print, and return `stock` and `ours` (median seconds), `difference` and `cosine` of the vectors."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", help="folder or Hub id of an encoder; default: a small one with random weights")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=256, help="of the random model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=4, help="of the random model")
    args = parser.parse_args(argv)

    set_seed(0)
    texts = paragraphs(args.texts)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.model or make_checkpoint(folder, texts, args.width, args.layers)
        sides = {"stock": load(checkpoint)}
        with hf_ext.takeover():
            sides["ours"] = load(checkpoint)
    # The first run of each warms up caches and is not timed.
    vectors = {side: embed(*loaded, texts, args.batch_size) for side, loaded in sides.items()}
    seconds = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side, loaded in sides.items():
            start = time.perf_counter()
            embed(*loaded, texts, args.batch_size)
            seconds[side].append(time.perf_counter() - start)

    result = {side: statistics.median(times) for side, times in seconds.items()}
    result["classes"] = [type(model).__name__ for model, _ in sides.values()]
    result["difference"] = (vectors["stock"] - vectors["ours"]).abs().max().item()
    result["cosine"] = (vectors["stock"] * vectors["ours"]).sum(-1).min().item()
    print(f"{result['classes'][0]}: {result['stock']:.3f} s; {result['classes'][1]}: {result['ours']:.3f} s for")
    print(f"{len(texts)} texts, {result['stock'] / result['ours']:.2f} times as fast (medians of {args.repeats}).")
    print(f"Largest difference between the vectors: {result['difference']:.1e}")
    return result


if __name__ == "__main__":
    main()
