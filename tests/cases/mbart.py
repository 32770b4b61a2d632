"""mBART: configurations, heads, and what official files look like."""

from dataclasses import replace

from cases.bart import CASE as BART
from cases.bart import bart_configs

CONFIGS = {
    name: {**fields, "decoder_start_token_id": 4}
    for name, fields in bart_configs(seed=11).items()
    if name in ("gelu", "relu-scaled")
}

CASE = replace(
    BART,
    blocks_of="bart",
    heads={name.replace("ExtBart", "ExtMBart"): head for name, head in BART.heads.items()},
    configs=CONFIGS,
    official_files={
        "facebook/mbart-large-cc25": {
            "_num_labels": 3,
            "activation_dropout": 0.0,
            "activation_function": "gelu",
            "add_bias_logits": False,
            "add_final_layer_norm": True,
            "architectures": ["MBartForConditionalGeneration"],
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "classif_dropout": 0.0,
            "classifier_dropout": 0.0,
            "d_model": 1024,
            "decoder_attention_heads": 16,
            "decoder_ffn_dim": 4096,
            "decoder_layerdrop": 0.0,
            "decoder_layers": 12,
            "dropout": 0.1,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "encoder_layerdrop": 0.0,
            "encoder_layers": 12,
            "eos_token_id": 2,
            "forced_eos_token_id": 2,
            "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
            "init_std": 0.02,
            "is_encoder_decoder": True,
            "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
            "max_length": 1024,
            "max_position_embeddings": 1024,
            "model_type": "mbart",
            "normalize_before": True,
            "normalize_embedding": True,
            "num_beams": 5,
            "num_hidden_layers": 12,
            "output_past": True,
            "pad_token_id": 1,
            "scale_embedding": True,
            "static_position_embeddings": False,
            "task_specific_params": {"translation_en_to_ro": {"decoder_start_token_id": 250020}},
            "vocab_size": 250027,
        },
    },  # fmt: skip
    adapter_targets=["q_proj", "v_proj"],
)
