"""Configuration of mBART (Liu et al., 2020, https://arxiv.org/abs/2001.08210).

Official checkpoints: facebook/mbart-large-cc25, facebook/mbart-large-50-many-to-many-mmt, and every
`model_type: mbart` file.
"""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from hf_ext.models.bart.configuration_bart import ExtBartConfig


@strict
class ExtMBartConfig(ExtBartConfig):
    """Fields and defaults of the official `mbart` configuration: BART's, without a start token of the decoder, which
    is the token of the language to write in."""

    model_type = "ext_mbart"
    official_model_type = "mbart"
    default_num_labels: ClassVar[int] = 2

    decoder_start_token_id: int | None = None
