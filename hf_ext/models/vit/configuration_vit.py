"""Configuration of ViT (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929).

Official checkpoints: google/vit-base-patch16-224, facebook/dino-vits16, and every `model_type: vit` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtImageConfig


@strict
class ExtViTConfig(ExtImageConfig):
    """Fields and defaults of the official `vit` configuration; the defaults are ViT-B/16.

    `encoder_stride` is what the head for masked image modelling enlarges its grid by: the patch size.
    """

    model_type = "ext_vit"
    official_model_type = "vit"
    base_model_tp_plan = {
        "encoder.layer.*.attention.attention.query": "colwise",
        "encoder.layer.*.attention.attention.key": "colwise",
        "encoder.layer.*.attention.attention.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
    base_model_fsdp_plan = {"encoder.layer.*": "free_full_weight", "layernorm": "keep_full_weight"}

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-12
    qkv_bias: bool = True
    encoder_stride: int = 16
    pooler_output_size: int | None = None
    pooler_act: str = "tanh"

    def __post_init__(self, **kwargs: Any) -> None:
        self.pooler_output_size = self.pooler_output_size or self.hidden_size
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("hidden_size", "num_attention_heads", "intermediate_size", "encoder_stride"):
            self.require_at_least(field, 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("hidden_size", "num_attention_heads")
        for field in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            self.require_probability(field)
