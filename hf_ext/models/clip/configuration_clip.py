"""Configurations of CLIP (Radford et al., 2021, https://arxiv.org/abs/2103.00020): both towers, and the pair.

Official checkpoints: openai/clip-vit-base-patch32, laion/CLIP-ViT-B-32-laion2B-s34B-b79K, and every `model_type: clip`
file. The configuration of a tower reads the file of a pair too, and takes its part of it.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig, ExtImageConfig

TP_PLAN = {
    "encoder.layers.*.self_attn.q_proj": "colwise",
    "encoder.layers.*.self_attn.k_proj": "colwise",
    "encoder.layers.*.self_attn.v_proj": "colwise",
    "encoder.layers.*.self_attn.out_proj": "rowwise",
    "encoder.layers.*.mlp.fc1": "colwise",
    "encoder.layers.*.mlp.fc2": "rowwise",
}


@strict
class ExtCLIPTextConfig(ExtConfig):
    """Fields and defaults of the official `clip_text_model` configuration.

    `eos_token_id` says where the text is pooled: at its first token with this id, or one of these. The number 2 is what
    early files hold by mistake, whatever the vocabulary: see `ExtCLIPTextModel.eos_places`. In a vocabulary whose end
    of text really is 2, write `[2]`.
    """

    model_type = "ext_clip_text_model"
    official_model_type = "clip_text_model"
    base_config_key = "text_config"
    base_model_tp_plan = TP_PLAN
    base_model_fsdp_plan = {"encoder.layers.*": "free_full_weight", "final_layer_norm": "keep_full_weight"}

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int | None = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float | int | None = 1e-5
    attention_dropout: float | int | None = 0.0
    initializer_range: float | int = 0.02
    initializer_factor: float | int | None = 1.0
    pad_token_id: int | None = 1
    bos_token_id: int | None = 49406
    eos_token_id: int | list[int] | None = 49407

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "max_position_embeddings"):
            self.require_at_least(field, 1)
        require_tower(self)

    def refuse_inexpressible(self) -> None:
        super().refuse_inexpressible()
        if isinstance(self.eos_token_id, list):
            raise ValueError(
                f"eos_token_id={self.eos_token_id}: the official class pools at one id only; set a number, which must "
                "not be 2."
            )


@strict
class ExtCLIPVisionConfig(ExtImageConfig):
    """Fields and defaults of the official `clip_vision_model` configuration."""

    model_type = "ext_clip_vision_model"
    official_model_type = "clip_vision_model"
    base_config_key = "vision_config"
    base_model_tp_plan = TP_PLAN
    base_model_fsdp_plan = {"encoder.layers.*": "free_full_weight", "post_layernorm": "keep_full_weight"}

    hidden_size: int = 768
    intermediate_size: int = 3072
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    patch_size: int | list[int] | tuple[int, int] = 32
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float | int = 1e-5
    attention_dropout: float | int | None = 0.0
    initializer_range: float | int = 0.02
    initializer_factor: float | int = 1.0

    def validate_architecture(self) -> None:
        super().validate_architecture()
        require_tower(self)


def require_numbers(config: ExtConfig, *fields: str) -> None:
    """Raise ValueError where official files may hold a null that no initial value can be computed from."""
    for field in fields:
        if getattr(config, field) is None:
            raise ValueError(f"{field} must be a number, such as {getattr(type(config), field)}, got None.")


def require_tower(config: ExtCLIPTextConfig | ExtCLIPVisionConfig) -> None:
    """Raise ValueError unless the fields that both towers have agree."""
    require_numbers(config, "initializer_factor", "initializer_range")
    for field in ("hidden_size", "intermediate_size", "num_attention_heads"):
        config.require_at_least(field, 1)
    config.require_at_least("num_hidden_layers", 0)
    config.require_divisible("hidden_size", "num_attention_heads")
    config.require_probability("attention_dropout")


@strict
class ExtCLIPConfig(ExtConfig):
    """Fields and defaults of the official `clip` configuration.

    Args:
        text_config, vision_config: of the towers.
        projection_dim: width of the space that texts and images share.
        logit_scale_init_value: logarithm of the initial inverse temperature.
        contrast_across_processes: whether, in distributed training, the loss compares each pair with those of all
            processes.
    """

    model_type = "ext_clip"
    official_model_type = "clip"
    sub_configs_defaults = {"vision_config": ExtCLIPVisionConfig, "text_config": ExtCLIPTextConfig}
    runtime_fields = (*ExtConfig.runtime_fields, "contrast_across_processes")
    base_model_tp_plan = {
        **{f"text_model.{name}": rule for name, rule in TP_PLAN.items()},
        **{f"vision_model.{name}": rule for name, rule in TP_PLAN.items()},
    }
    base_model_fsdp_plan = {
        f"{tower}_model.{name}": rule
        for tower, config in (("text", ExtCLIPTextConfig), ("vision", ExtCLIPVisionConfig))
        for name, rule in config.base_model_fsdp_plan.items()
    }

    text_config: dict | ExtCLIPTextConfig | None = None
    vision_config: dict | ExtCLIPVisionConfig | None = None
    projection_dim: int | None = 512
    logit_scale_init_value: float | int | None = 2.6592
    initializer_factor: float | int | None = 1.0
    contrast_across_processes: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        # Early files hold a tower's fields a second time; those fields count.
        for name, tower in (("text_config", ExtCLIPTextConfig), ("vision_config", ExtCLIPVisionConfig)):
            second = kwargs.pop(f"{name}_dict", None)
            if second is not None:
                first = getattr(self, name) or {}
                first = first.to_dict() if isinstance(first, tower) else first
                setattr(self, name, {**first, **tower(**second).to_dict()})
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        self.require_at_least("projection_dim", 1)
        require_numbers(self, "initializer_factor", "logit_scale_init_value")

    def refuse_inexpressible(self) -> None:
        super().refuse_inexpressible()
        self.text_config.refuse_inexpressible()
        self.vision_config.refuse_inexpressible()
