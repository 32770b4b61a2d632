"""Configuration of MPT (MosaicML, 2023, https://www.databricks.com/blog/mpt-7b).

Official checkpoints: mosaicml/mpt-7b, mpt-7b-instruct, mpt-30b and every `model_type: mpt` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from hf_ext.configuration import ExtConfig


@strict
class ExtMptAttentionConfig(PreTrainedConfig):
    """The fields of `attn_config`, with the official defaults.

    Args:
        attn_pdrop: dropout of the attention weights and of both residual branches.
        clip_qkv: bound on the absolute values of queries, keys and values, None for no bound.
        softmax_scale: factor on the scores, None for one over the root of the head width.
        attn_impl, attn_uses_sequence_id: say how the training run computed; they change nothing.
        attn_type, prefix_lm, qk_ln, alibi, alibi_bias_max: the official class knows the defaults only.
    """

    base_config_key = "attn_config"

    attn_type: str = "multihead_attention"
    attn_pdrop: float | int = 0
    attn_impl: str = "torch"
    clip_qkv: float | int | None = None
    softmax_scale: float | int | None = None
    prefix_lm: bool = False
    qk_ln: bool = False
    attn_uses_sequence_id: bool = False
    alibi: bool = True
    alibi_bias_max: int = 8

    def __post_init__(self, **kwargs: Any) -> None:
        for field in ("clip_qkv", "softmax_scale"):
            value = getattr(self, field)
            setattr(self, field, value if value is None else float(value))  # the official class takes no integers
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        if content["attn_pdrop"] == 0:
            content["attn_pdrop"] = 0  # and here no other than integers
        return content


@strict
class ExtMptConfig(ExtConfig):
    """Fields and defaults of the official `mpt` configuration; the widths of a checkpoint are in its file.

    What the official class does not compute (other position embeddings, biases, other norms, scaled logits) it passes
    over in silence; here it is refused, because such a checkpoint would be computed wrongly. `max_seq_len` limits
    nothing: ALiBi goes beyond it. `learned_pos_emb`, `embedding_fraction` and `init_device` change nothing.
    """

    model_type = "ext_mpt"
    official_model_type = "mpt"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_attention_heads": "n_heads", "hidden_size": "d_model", "num_hidden_layers": "n_layers"}
    # Attention stays whole: the slopes belong to the heads of all ranks together.
    base_model_tp_plan = {
        "blocks.*.ffn.up_proj": "colwise",
        "blocks.*.ffn.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "wte": (["input_ids"], ["inputs_embeds"]),
        "blocks": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm_f": (["hidden_states"], ["hidden_states"]),
    }

    d_model: int = 2048
    n_heads: int = 16
    n_layers: int = 24
    expansion_ratio: int = 4
    max_seq_len: int = 2048
    vocab_size: int = 50368
    resid_pdrop: float | int = 0.0
    layer_norm_epsilon: float | int = 1e-5
    emb_pdrop: float | int = 0.0
    learned_pos_emb: bool = True
    attn_config: dict | ExtMptAttentionConfig | None = None
    init_device: str = "cpu"
    logit_scale: float | str | None = None
    no_bias: bool = True
    embedding_fraction: float | int = 1.0
    norm_type: str = "low_precision_layernorm"
    use_cache: bool = False
    initializer_range: float | int = 0.02
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if not isinstance(self.attn_config, ExtMptAttentionConfig):
            self.attn_config = ExtMptAttentionConfig(**(self.attn_config or {}))
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "d_model", "n_heads", "max_seq_len"):
            self.require_at_least(field, 1)
        self.require_at_least("n_layers", 0)
        self.require_divisible("d_model", "n_heads")
        attention = self.attn_config
        if not 0.0 <= attention.attn_pdrop < 1.0:
            raise ValueError(f"attn_pdrop is a probability and must lie in [0, 1), got {attention.attn_pdrop}.")
        for field in ("clip_qkv", "softmax_scale"):
            value = getattr(attention, field)
            if value is not None and value <= 0:
                raise ValueError(f"{field} must be positive, or None, got {value}.")
        self.refuse_unknown_parts()

    def refuse_unknown_parts(self) -> None:
        """Raise ValueError for what the official class passes over, at the cost of wrong results."""
        for owner, field, known in (
            (self, "expansion_ratio", (4,)),
            (self, "no_bias", (True,)),
            (self, "logit_scale", (None,)),
            (self, "norm_type", ("low_precision_layernorm", "layernorm")),
            (self, "emb_pdrop", (0,)),
            (self, "resid_pdrop", (0,)),
            (self.attn_config, "attn_type", ("multihead_attention",)),
            (self.attn_config, "prefix_lm", (False,)),
            (self.attn_config, "qk_ln", (False,)),
            (self.attn_config, "alibi", (True,)),
            (self.attn_config, "alibi_bias_max", (8,)),  # the class reads it nowhere
        ):
            value = getattr(owner, field)
            if value not in known:
                hint = " Dropout of both residual branches is attn_config.attn_pdrop." if "pdrop" in field else ""
                raise ValueError(
                    f"{field} is {value!r}, which the `mpt` architecture of transformers has no computation for; it "
                    f"must be {' or '.join(map(repr, known))}.{hint}"
                )

    def refuse_inexpressible(self) -> None:
        if self.attn_config.attn_pdrop:
            raise ValueError(
                f"attn_pdrop is {self.attn_config.attn_pdrop}, and the official configuration takes no fractions; set "
                "config.attn_config.attn_pdrop = 0 before exporting (it is used in training alone)."
            )
