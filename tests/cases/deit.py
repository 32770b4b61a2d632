"""DeiT: ViT's configurations, a further token and a further head."""

from cases.base import Case, Head
from cases.vit import CASE as VIT
from cases.vit import CONFIGS, NONSENSE, SQUARE, WIDE, file_name

CASE = Case(
    blocks_of="vit",
    is_decoder=False,
    heads={
        "ExtDeiTModel": Head("image"),
        "ExtDeiTForImageClassification": Head("image_row"),
        "ExtDeiTForImageClassificationWithTeacher": Head("image_teacher"),
        "ExtDeiTForMaskedImageModeling": Head("masked_image", overrides=SQUARE),
    },
    configs={name: CONFIGS[name] for name in ("square", "oblong")},
    dropout=VIT.dropout,
    nonsense=(*NONSENSE[:3], ({"model_type": "vit"}, "vit")),
    official_files={
        "deit-base-distilled-patch16-224": {
            "architectures": ["DeiTForImageClassificationWithTeacher"],
            "attention_probs_dropout_prob": 0.0,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 768,
            "id2label": {"0": "tench, Tinca tinca", "1": "goldfish, Carassius auratus"},
            "image_size": 224,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "label2id": {"tench, Tinca tinca": 0, "goldfish, Carassius auratus": 1},
            "layer_norm_eps": 1e-12,
            "model_type": "deit",
            "num_attention_heads": 12,
            "num_channels": 3,
            "num_hidden_layers": 12,
            "patch_size": 16,
            "transformers_version": "4.6.0.dev0",
        }
    },
    wide=WIDE,
    stock_name=file_name,
    adapter_targets=VIT.adapter_targets,
    stock_adapter_targets=VIT.stock_adapter_targets,
)
