"""ViT: configurations, heads, and what official files look like."""

import re

from cases.base import Case, Head

# Patterns of names in the stock class's memory, and in the files.
STOCK_NAMES = (
    (r"\blayers\.(\d+)\.", r"encoder.layer.\1."),
    (r"attention\.q_proj\.", "attention.attention.query."),
    (r"attention\.k_proj\.", "attention.attention.key."),
    (r"attention\.v_proj\.", "attention.attention.value."),
    (r"attention\.o_proj\.", "attention.output.dense."),
    (r"mlp\.fc1\.", "intermediate.dense."),
    (r"mlp\.fc2\.", "output.dense."),
)


def file_name(name: str) -> str:
    """A name in the stock class's memory -> the name in the file."""
    for pattern, official in STOCK_NAMES:
        name = re.sub(pattern, official, name)
    return name


CONFIGS = {
    "square": {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 30,
        "image_size": 12,
        "patch_size": 4,
        "encoder_stride": 4,
        "num_labels": 3,
    },
    # Pixels beyond the last whole patch, one channel, no biases, another pooler.
    "rest": {
        "hidden_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 19,
        "hidden_act": "relu",
        "image_size": 15,
        "patch_size": 5,
        "encoder_stride": 5,
        "num_channels": 1,
        "qkv_bias": False,
        "pooler_output_size": 9,
        "pooler_act": "relu",
        "layer_norm_eps": 1e-6,
        "num_labels": 2,
    },
    "oblong": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 33,
        "hidden_act": "gelu_new",
        "image_size": (9, 17),
        "patch_size": (3, 4),
        "num_channels": 4,
        "num_labels": 3,
    },
}
# The stock class takes square images and patches only when it puts the image together again.
SQUARE = {"image_size": 12, "patch_size": 3, "encoder_stride": 3}

NONSENSE = (
    ({"hidden_size": 30, "num_attention_heads": 4}, "hidden_size"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_hidden_layers": -1}, "num_hidden_layers"),
    ({"intermediate_size": 0}, "intermediate_size"),
    ({"num_channels": 0}, "num_channels"),
    ({"patch_size": 0}, "patch_size"),
    ({"image_size": [8, 8, 8]}, "image_size"),
    ({"image_size": 8, "patch_size": 16}, "image_size"),
    ({"image_size": (32, 8), "patch_size": 16}, "image_size"),
    ({"encoder_stride": 0}, "encoder_stride"),
    ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob"),
    ({"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob"),
    ({"model_type": "bert"}, "bert"),
)
WIDE = {
    "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 24, "patch_size": 4,
    "num_labels": 7,
}  # fmt: skip

CASE = Case(
    is_decoder=False,
    heads={
        "ExtViTModel": Head("image"),
        "ExtViTForImageClassification": Head("image_row"),
        "ExtViTForMaskedImageModeling": Head("masked_image", overrides=SQUARE),
    },
    configs=CONFIGS,
    dropout={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2},
    nonsense=NONSENSE,
    official_files={
        "vit-base-patch16-224": {
            "architectures": ["ViTForImageClassification"],
            "attention_probs_dropout_prob": 0.0,
            "encoder_stride": 16,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 768,
            "id2label": {"0": "tench, Tinca tinca", "1": "goldfish, Carassius auratus"},
            "image_size": 224,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "label2id": {"tench, Tinca tinca": "0", "goldfish, Carassius auratus": "1"},
            "layer_norm_eps": 1e-12,
            "model_type": "vit",
            "num_attention_heads": 12,
            "num_channels": 3,
            "num_hidden_layers": 12,
            "patch_size": 16,
            "qkv_bias": True,
            "torch_dtype": "float32",
            "transformers_version": "4.13.0.dev0",
        },
        "dino-vits16": {
            "architectures": ["ViTModel"],
            "hidden_size": 384,
            "intermediate_size": 1536,
            "model_type": "vit",
            "num_attention_heads": 6,
            "pooler_act": "tanh",
            "pooler_output_size": 384,
        },
    },
    wide=WIDE,
    stock_name=file_name,
    adapter_targets=["query", "value"],
    stock_adapter_targets=["q_proj", "v_proj"],
)
