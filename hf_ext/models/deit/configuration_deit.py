"""Configuration of DeiT (Touvron et al., 2020, https://arxiv.org/abs/2012.12877).

Official checkpoints: facebook/deit-base-distilled-patch16-224, and every `model_type: deit` file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.models.vit.configuration_vit import ExtViTConfig


@strict
class ExtDeiTConfig(ExtViTConfig):
    """Fields and defaults of the official `deit` configuration: those of ViT."""

    model_type = "ext_deit"
    official_model_type = "deit"
