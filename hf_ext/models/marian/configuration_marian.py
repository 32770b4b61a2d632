"""Configuration of Marian (Junczys-Dowmunt et al., 2018, https://arxiv.org/abs/1804.00344).

Official checkpoints: Helsinki-NLP/opus-mt-en-de and the other OPUS-MT models, and every `model_type: marian` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.models.bart.configuration_bart import BartFamilyConfig


@strict
class ExtMarianConfig(BartFamilyConfig):
    """Fields and defaults of the official `marian` configuration.

    `share_encoder_decoder_embeddings=False` gives each language a vocabulary of its own: `vocab_size` words to read and
    `decoder_vocab_size` to write. The decoder starts from the padding token.
    """

    model_type = "ext_marian"
    official_model_type = "marian"

    vocab_size: int = 58101
    decoder_vocab_size: int | None = None
    decoder_start_token_id: int | None = 58100
    pad_token_id: int | None = 58100
    eos_token_id: int | list[int] | None = 0
    bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = 0
    share_encoder_decoder_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        self.decoder_vocab_size = self.decoder_vocab_size or self.vocab_size
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self.require_at_least("decoder_vocab_size", 1)
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"decoder_vocab_size ({self.decoder_vocab_size}) differs from vocab_size ({self.vocab_size}), but one "
                "table serves both languages; set share_encoder_decoder_embeddings=False for two vocabularies."
            )
