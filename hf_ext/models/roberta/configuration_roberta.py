"""Configuration of RoBERTa (Liu et al., 2019, https://arxiv.org/abs/1907.11692).

Official checkpoints: FacebookAI/roberta-base, FacebookAI/roberta-large, and every `model_type: roberta` file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.models.bert.configuration_bert import ExtBertConfig


@strict
class ExtRobertaConfig(ExtBertConfig):
    """Fields and defaults of the official `roberta` configuration.

    Positions begin after `pad_token_id`: a row may hold `max_position_embeddings - pad_token_id - 1` tokens, 512 of 514
    in the official checkpoints.
    """

    model_type = "ext_roberta"
    official_model_type = "roberta"

    vocab_size: int = 50265
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2

    def validate_architecture(self) -> None:
        super().validate_architecture()
        pad, positions = self.pad_token_id, self.max_position_embeddings
        if pad is None or pad < 0:
            raise ValueError(
                f"pad_token_id must be at least 0, got {pad}: positions are counted from it. Official files have 1."
            )
        if positions < pad + 2:
            raise ValueError(
                f"max_position_embeddings ({positions}) must be at least pad_token_id + 2 ({pad + 2}): positions begin "
                "after the padding id."
            )
