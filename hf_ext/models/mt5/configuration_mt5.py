"""Configuration of mT5 (Xue et al., 2020, https://arxiv.org/abs/2010.11934).

Official checkpoints: google/mt5-small, google/mt5-xxl, and every `model_type: mt5` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.models.t5.configuration_t5 import ExtT5Config


@strict
class ExtMT5Config(ExtT5Config):
    """Fields and defaults of the official `mt5` configuration; the defaults are mT5-small's."""

    model_type = "ext_mt5"
    official_model_type = "mt5"

    vocab_size: int = 250112
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    feed_forward_proj: str = "gated-gelu"
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = 0

    def derive_scaling(self, kwargs: dict[str, Any]) -> None:
        """Nothing is scaled, and there is no field for it."""
