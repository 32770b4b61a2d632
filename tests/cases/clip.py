"""CLIP: both towers, what official files look like."""

from torch import Tensor

from cases.base import Case, Head, image_inputs
from cases.clip_text_model import CASE as TEXT
from cases.clip_text_model import CONFIGS as TEXTS
from cases.clip_text_model import clip_legacy_keys, clip_texts
from cases.clip_vision_model import CASE as VISION
from cases.clip_vision_model import CONFIGS as IMAGES


def pairs(kind: str, config: object, padding: str = "none", **options: object) -> dict[str, Tensor]:
    """Texts and images, or images alone."""
    images = image_inputs(kind, config, **options)
    return {**clip_texts(kind, config, padding, **options), **images} if kind == "pair" else images


def assign(config: object, name: str, value: object) -> None:
    """Set a field where it belongs: dropout in both towers."""
    for part in (config.text_config, config.vision_config) if name == "attention_dropout" else (config,):
        setattr(part, name, value)


CASE = Case(
    is_decoder=False,
    heads={
        "ExtCLIPModel": Head("pair"),
        "ExtCLIPForImageClassification": Head(
            "image_row", without_gradient=(r"vision_model\.post_layernorm\.(weight|bias)",)
        ),
    },
    configs={
        "first-eos": {
            "text_config": TEXTS["first-eos"],
            "vision_config": IMAGES["square"],
            "projection_dim": 11,
            "num_labels": 3,
        },
        "legacy": {
            "text_config": TEXTS["legacy"],
            "vision_config": IMAGES["rest"],
            "projection_dim": 5,
            "logit_scale_init_value": 1.5,
            "initializer_factor": 1.3,
            "num_labels": 2,
        },
    },
    dropout={"attention_dropout": 0.2},
    nonsense=(
        ({"projection_dim": 0}, "projection_dim"),
        ({"text_config": {"hidden_size": 30, "num_attention_heads": 4}}, "hidden_size"),
        ({"vision_config": {"patch_size": 0}}, "patch_size"),
        ({"model_type": "bert"}, "bert"),
    ),
    official_files={
        "clip-vit-base-patch32": {
            "architectures": ["CLIPModel"],
            "initializer_factor": 1.0,
            "logit_scale_init_value": 2.6592,
            "model_type": "clip",
            "projection_dim": 512,
            "text_config": {
                "add_cross_attention": False,
                "attention_dropout": 0.0,
                "bos_token_id": 0,
                "dropout": 0.0,
                "eos_token_id": 2,
                "hidden_act": "quick_gelu",
                "hidden_size": 512,
                "intermediate_size": 2048,
                "layer_norm_eps": 1e-05,
                "max_position_embeddings": 77,
                "model_type": "clip_text_model",
                "num_attention_heads": 8,
                "num_hidden_layers": 12,
                "pad_token_id": 1,
                "projection_dim": 512,
                "vocab_size": 49408,
            },
            "text_config_dict": None,
            "transformers_version": None,
            "vision_config": {
                "dropout": 0.0,
                "hidden_size": 768,
                "image_size": 224,
                "model_type": "clip_vision_model",
                "num_attention_heads": 12,
                "num_hidden_layers": 12,
                "patch_size": 32,
            },
            "vision_config_dict": None,
        },
        "fields given twice": {
            "model_type": "clip",
            "text_config": {"hidden_size": 512, "num_attention_heads": 8},
            "text_config_dict": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
            "vision_config_dict": {"hidden_size": 1024, "num_attention_heads": 16, "patch_size": 14},
            "projection_dim": 768,
        },
    },
    legacy_keys=clip_legacy_keys,
    wide={
        "text_config": {**TEXTS["first-eos"], **TEXT.wide},
        "vision_config": {**IMAGES["square"], **VISION.wide},
        "projection_dim": 60,
        "num_labels": 7,
    },
    assign=assign,
    adapter_targets=["q_proj", "v_proj"],
    inputs=pairs,
)
