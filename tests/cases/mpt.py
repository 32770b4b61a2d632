"""MPT: configurations, heads, and what official files look like."""

import random

from cases.base import Case, Head
from cases.bloom import without_prefix


def mpt_configs(seed: int = 0) -> dict[str, dict]:
    """Numbers of heads, bounds on the projections, a scale of one's own, tied or not."""
    draw = random.Random(seed)
    configs = {}
    for name, heads, width, attention, fields in (
        ("four-heads", 4, 8, {}, {"use_cache": True}),
        ("three-heads-clipped-untied", 3, 7, {"clip_qkv": 0.4}, {"tie_word_embeddings": False}),
        ("two-heads-scaled", 2, 10, {"softmax_scale": 0.7}, {"norm_type": "layernorm"}),
        ("six-heads-flash", 6, 4, {"attn_impl": "flash", "attn_uses_sequence_id": True}, {}),
        ("one-head", 1, 24, {"clip_qkv": 1.5, "softmax_scale": 0.3}, {"learned_pos_emb": False}),
    ):
        configs[name] = {
            "vocab_size": draw.randint(41, 99),
            "d_model": heads * width,
            "n_layers": draw.choice([2, 3]),
            "n_heads": heads,
            "max_seq_len": 64,
            "layer_norm_epsilon": draw.choice([1e-6, 1e-5]),
            "pad_token_id": draw.choice([0, 3]),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": 3,
            "attn_config": attention,
            **fields,
        }
    return configs


def mpt_assign(config: object, name: str, value: object) -> None:
    """Attention's dropout is a field of `attn_config`; the stock configuration takes integers only, its layers any."""
    if name == "attn_pdrop":
        vars(config.attn_config)[name] = value
    else:
        setattr(config, name, value)


CASE = Case(
    is_decoder=True,
    heads={
        "ExtMptModel": Head("base"),
        "ExtMptForCausalLM": Head("causal"),
        "ExtMptForSequenceClassification": Head("row"),
        "ExtMptForTokenClassification": Head("token"),
        "ExtMptForQuestionAnswering": Head("span"),
    },
    configs=mpt_configs(),
    dropout={"attn_pdrop": 0.2, "classifier_dropout": 0.3},
    nonsense=(
        ({"d_model": 30, "n_heads": 4}, "d_model"),
        ({"n_heads": 0}, "n_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"n_layers": -1}, "n_layers"),
        ({"max_seq_len": 0}, "max_seq_len"),
        ({"expansion_ratio": 2}, "expansion_ratio"),
        ({"no_bias": False}, "no_bias"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ({"norm_type": "rmsnorm"}, "norm_type"),
        ({"emb_pdrop": 0.1}, "emb_pdrop"),
        ({"resid_pdrop": 0.1}, "attn_config.attn_pdrop"),
        ({"attn_config": {"attn_pdrop": 1.5}}, "attn_pdrop"),
        ({"attn_config": {"clip_qkv": -1.0}}, "clip_qkv"),
        ({"attn_config": {"softmax_scale": 0}}, "softmax_scale"),
        ({"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln"),
        ({"attn_config": {"alibi": False}}, "alibi"),
        ({"model_type": "bloom"}, "bloom"),
    ),
    inexpressible=(({"attn_config": {"attn_pdrop": 0.1}}, "attn_pdrop"),),
    official_files={
        "mpt-7b": {
            "architectures": ["MPTForCausalLM"],
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_impl": "torch",
                "attn_pdrop": 0,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "clip_qkv": None,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "d_model": 4096,
            "emb_pdrop": 0,
            "embedding_fraction": 1.0,
            "expansion_ratio": 4,
            "init_config": {"init_div_is_residual": True, "init_gain": 0, "name": "kaiming_normal_"},
            "init_device": "cpu",
            "learned_pos_emb": True,
            "logit_scale": None,
            "max_seq_len": 2048,
            "model_type": "mpt",
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "resid_pdrop": 0,
            "tokenizer_name": "EleutherAI/gpt-neox-20b",
            "torch_dtype": "bfloat16",
            "transformers_version": "4.28.1",
            "use_cache": False,
            "verbose": 0,
            "vocab_size": 50432,
        },
        "long and clipped": {
            "model_type": "mpt",
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 6.0, "attn_uses_sequence_id": False},
            "d_model": 4096,
            "max_seq_len": 8192,
            "n_heads": 32,
            "n_layers": 32,
            "vocab_size": 50432,
        },
    },
    legacy_keys=without_prefix,
    stock_attention={"all": "eager"},
    eight_bit_tolerance=0.05,
    own_padding={"all": ("left",)},  # hidden scores are replaced there, so that they get no gradient
    assign=mpt_assign,
    wide={"d_model": 96, "n_heads": 4, "vocab_size": 211, "num_labels": 7},
)
