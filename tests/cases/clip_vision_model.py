"""The vision tower of CLIP."""

from cases.base import Case, Head
from cases.clip_text_model import NONSENSE, clip_legacy_keys

CONFIGS = {
    "square": {
        "hidden_size": 24,
        "intermediate_size": 30,
        "projection_dim": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 12,
        "patch_size": 4,
    },
    "rest": {
        "hidden_size": 16,
        "intermediate_size": 25,
        "projection_dim": 6,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_channels": 1,
        "image_size": 14,
        "patch_size": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "initializer_factor": 0.7,
    },
}

CASE = Case(
    is_decoder=False,
    heads={"ExtCLIPVisionModel": Head("image"), "ExtCLIPVisionModelWithProjection": Head("image_embedding")},
    configs=CONFIGS,
    dropout={"attention_dropout": 0.2},
    nonsense=(*NONSENSE, ({"image_size": 8, "patch_size": 16}, "image_size")),
    legacy_keys=clip_legacy_keys,
    wide={
        "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 24, "patch_size": 4,
        "projection_dim": 50,
    },
    adapter_targets=["q_proj", "v_proj"],
)  # fmt: skip
