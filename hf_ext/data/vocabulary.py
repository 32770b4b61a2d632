"""A vocabulary trained on the data at hand."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<pad>", "<s>", "</s>"


def train_bpe(texts: Iterable[str], *, vocab_size: int, longest: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (Radford et al., 2019) for an encoder-decoder: any text can be spelled, each one ends with `END`.

    Args:
        texts: what to learn from, in all languages.
        vocab_size: with the 256 bytes and `PAD`, `START`, `END`, which get the ids 0, 1, 2.
        longest: most tokens of a text where truncation is asked for.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()  # a word is the same at the start of a text
    tokenizer.decoder = decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(END, tokenizer.token_to_id(END))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", pair=f"$A {END} $B:1 {END}:1", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=START, eos_token=END, model_max_length=longest
    )
