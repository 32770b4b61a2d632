"""Configuration of BigBird (Zaheer et al., 2020, https://arxiv.org/abs/2007.14062).

Official checkpoints: google/bigbird-roberta-base, google/bigbird-roberta-large, google/bigbird-base-trivia-itc and
every `model_type: big_bird` file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.models.bert.configuration_bert import ExtBertConfig

ATTENTION_TYPES = ("block_sparse", "original_full")


@strict
class ExtBigBirdConfig(ExtBertConfig):
    """Fields and defaults of the official `big_bird` configuration.

    `attention_type` "block_sparse" lets tokens see a window of three blocks of `block_size` tokens, the first and the
    last block, and `num_random_blocks` more; inputs of at most (5 + 2 * num_random_blocks) * block_size tokens, and all
    inputs with "original_full", are attended fully. A decoder (`is_decoder`) always attends fully, to earlier tokens.
    `use_bias` is about queries, keys and values; `rescale_embeddings` multiplies word embeddings by the square root of
    their width.
    """

    model_type = "ext_big_bird"
    official_model_type = "big_bird"
    base_model_tp_plan = {  # the heads stay together: their random blocks are drawn in one go
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }

    vocab_size: int = 50358
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    sep_token_id: int | None = 66
    attention_type: str = "block_sparse"
    use_bias: bool = True
    rescale_embeddings: bool = False
    block_size: int = 64
    num_random_blocks: int = 3

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.attention_type not in ATTENTION_TYPES:
            raise ValueError(
                f"attention_type must be one of {', '.join(ATTENTION_TYPES)}, got {self.attention_type!r}."
            )
        self.require_at_least("block_size", 1)
        self.require_at_least("num_random_blocks", 0)
