"""A tiny BERT with a tokenizer, for tests of what happens to files rather than of what a model computes."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_ext import ExtBertConfig, ExtBertForMaskedLM

BERT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 16,
}


def bert(cls: type[PreTrainedModel] = ExtBertForMaskedLM, **fields: object) -> PreTrainedModel:
    """The model, in eval mode; `fields` of its configuration beside or instead of `BERT`."""
    return cls(ExtBertConfig(**{**BERT, **fields})).eval()


def saved_bert(folder: Path, cls: type[PreTrainedModel] = ExtBertForMaskedLM) -> Path:
    """The model's folder."""
    bert(cls).save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(BERT["vocab_size"] - 5))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", mask_token="[MASK]"
    )
