"""Swin: configurations, heads, and what official files look like."""

import re

import torch
from torch import Tensor

from cases.base import Case, Head

STOCK_NAMES = (
    (r"attention\.q_proj\.", "attention.self.query."),
    (r"attention\.k_proj\.", "attention.self.key."),
    (r"attention\.v_proj\.", "attention.self.value."),
    (r"attention\.relative_position_bias\.", "attention.self."),
    (r"attention\.o_proj\.", "attention.output.dense."),
    (r"mlp\.fc1\.", "intermediate.dense."),
    (r"mlp\.fc2\.", "output.dense."),
)


def file_name(name: str) -> str:
    """A name in the stock class's memory -> the name in the file."""
    for pattern, official in STOCK_NAMES:
        name = re.sub(pattern, official, name)
    return name


def backbone_file_name(name: str) -> str:
    """The same for the backbone, which has the encoder without a prefix."""
    return re.sub(r"swin\.(encoder|embeddings)\.", r"\1.", file_name(name))


def legacy_keys(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As older files: the index of the biases as a buffer."""
    old = dict(tensors)
    for name in tensors:
        if name.endswith("relative_position_bias_table"):
            old[name.replace("bias_table", "index")] = torch.zeros(16, 16, dtype=torch.long)
    return old


CASE = Case(
    is_decoder=False,
    heads={
        "ExtSwinModel": Head("image"),
        "ExtSwinForImageClassification": Head("image_row"),
        # The stock class puts square images together only.
        "ExtSwinForMaskedImageModeling": Head("masked_image", overrides={"image_size": 16, "patch_size": 2}),
        "ExtSwinBackbone": Head(
            "backbone",
            overrides={"out_features": ["stage1", "stage2"]},
            stock_name=backbone_file_name,
            unused_in_stock=(r"swin\.layernorm\.(weight|bias)",),
        ),
    },
    configs={
        # The second stage is one window.
        "square": {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "mlp_ratio": 2.0,
            "encoder_stride": 4,
            "num_labels": 3,
        },
        # Rows and columns that windows and merging do not divide; learned positions.
        "oblong": {
            "image_size": (18, 30),
            "patch_size": 2,
            "num_channels": 1,
            "embed_dim": 12,
            "depths": [2, 2],
            "num_heads": [3, 2],
            "window_size": 3,
            "mlp_ratio": 1.5,
            "encoder_stride": 4,
            "qkv_bias": False,
            "hidden_act": "relu",
            "use_absolute_embeddings": True,
            "layer_norm_eps": 1e-6,
            "num_labels": 2,
        },
    },
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "drop_path_rate": 0.3},
    nonsense=(
        ({"embed_dim": 10, "num_heads": [3, 6, 12, 24]}, "embed_dim"),
        ({"embed_dim": 0}, "embed_dim"),
        ({"depths": [2, 2]}, "depths"),
        ({"depths": [2, 0, 6, 2]}, "depths"),
        ({"window_size": 0}, "window_size"),
        ({"mlp_ratio": 0.001}, "mlp_ratio"),
        ({"num_channels": 0}, "num_channels"),
        ({"patch_size": 0}, "patch_size"),
        ({"drop_path_rate": 1.5}, "drop_path_rate"),
        ({"hidden_dropout_prob": -0.5}, "hidden_dropout_prob"),
        ({"out_features": ["stage9"]}, "out_features"),
        ({"model_type": "vit"}, "vit"),
    ),
    official_files={
        "swin-tiny-patch4-window7-224": {
            "architectures": ["SwinForImageClassification"],
            "attention_probs_dropout_prob": 0.0,
            "depths": [2, 2, 6, 2],
            "drop_path_rate": 0.1,
            "embed_dim": 96,
            "encoder_stride": 32,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 768,
            "id2label": {"0": "tench, Tinca tinca", "1": "goldfish, Carassius auratus"},
            "image_size": 224,
            "initializer_range": 0.02,
            "label2id": {"tench, Tinca tinca": 0, "goldfish, Carassius auratus": 1},
            "layer_norm_eps": 1e-05,
            "mlp_ratio": 4.0,
            "model_type": "swin",
            "num_channels": 3,
            "num_heads": [3, 6, 12, 24],
            "num_layers": 4,
            "patch_size": 4,
            "path_norm": True,
            "qkv_bias": True,
            "torch_dtype": "float32",
            "transformers_version": "4.16.0.dev0",
            "use_absolute_embeddings": False,
            "window_size": 7,
        },
        "a backbone": {"model_type": "swin", "out_features": ["stage2", "stage4"], "stage_names": ["stem"]},
    },
    legacy_keys=legacy_keys,
    wide={"image_size": 32, "patch_size": 4, "embed_dim": 48, "num_heads": [2, 4], "num_labels": 7},
    stock_name=file_name,
    adapter_targets=["query", "value"],
    stock_adapter_targets=["q_proj", "v_proj"],
    fixed_size=False,
)
