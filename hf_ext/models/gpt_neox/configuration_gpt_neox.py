"""Configuration of GPT-NeoX (Black et al., 2022, https://arxiv.org/abs/2204.06745).

Official checkpoints: EleutherAI/gpt-neox-20b, EleutherAI/pythia-*, and every `model_type: gpt_neox` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtGPTNeoXConfig(ExtConfig):
    """Fields and defaults of the official `gpt_neox` configuration; the defaults are the 20B model.

    A share of each head is rotated: `rope_parameters["partial_rotary_factor"]`, 0.25 unless said otherwise; the
    `rotary_pct` and `rotary_emb_base` of official files are folded into `rope_parameters`.
    """

    model_type = "ext_gpt_neox"
    official_model_type = "gpt_neox"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "embed_in": "embedding_rowwise",  # the head, which may be tied to it, is divided along the vocabulary too
        "layers.*.attention.query_key_value": "colwise",
        "layers.*.attention.dense": "rowwise",
        "layers.*.mlp.dense_h_to_4h": "colwise",
        "layers.*.mlp.dense_4h_to_h": "rowwise",
    }
    base_model_fsdp_plan = {
        "embed_in": "free_full_weight",
        "layers.*": "free_full_weight",
        "final_layer_norm": "keep_full_weight",
    }
    base_model_pp_plan = {
        "embed_in": (["input_ids"], ["inputs_embeds"]),
        "emb_dropout": (["inputs_embeds"], ["hidden_states"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "final_layer_norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    attention_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    classifier_dropout: float | int = 0.1
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-5
    use_cache: bool = True
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    rope_parameters: dict | None = None
    attention_bias: bool = True
    is_decoder: bool = False

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Fold the names that official files use into `rope_parameters`."""
        self.rope_parameters = dict(kwargs.pop("rope_scaling", None) or self.rope_parameters or {})
        self.rope_parameters.setdefault("rope_theta", kwargs.pop("rotary_emb_base", self.default_theta))
        self.rope_parameters.setdefault("partial_rotary_factor", kwargs.pop("rotary_pct", 0.25))
        self.standardize_rope_params()
        return kwargs

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"):
            self.require_at_least(field, 1)
        self.require_at_least("max_position_embeddings", 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("hidden_size", "num_attention_heads")
        for field in ("attention_dropout", "hidden_dropout", "classifier_dropout"):
            self.require_probability(field)
        self.require_rope_type()
        share = self.rope_parameters["partial_rotary_factor"]
        width = self.hidden_size // self.num_attention_heads
        if not 0 < share <= 1 or int(width * share) < 2:
            raise ValueError(
                f"partial_rotary_factor ({share}) of a head of {width} leaves {int(width * share)} coordinates to "
                "rotate; it must lie in (0, 1] and leave at least 2."
            )
