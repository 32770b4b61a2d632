"""Configuration of LLaMA 1, 2 and 3.x (Touvron et al., 2023, https://arxiv.org/abs/2302.13971).

Official checkpoints: meta-llama/*, HuggingFaceTB/SmolLM2-*, and every `model_type: llama` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtLlamaConfig(ExtConfig):
    """Fields and defaults of the official `llama` configuration; the defaults are LLaMA 7B.

    `num_key_value_heads` smaller than `num_attention_heads` is grouped-query attention (1 is multi-query). Rotary
    positions are described by `rope_parameters` (`rope_type` one of default, linear, dynamic, yarn, longrope, llama3);
    the older `rope_theta` and `rope_scaling` of official files are folded into it.
    """

    model_type = "ext_llama"
    official_model_type = "llama"
    keys_to_ignore_at_inference = ["past_key_values"]
    # How `tp_plan="auto"` splits a block: columns into the heads and the feed-forward, rows out of them, one sum each.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pretraining_tp: int | None = 1
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int | None = 0.0
    mlp_bias: bool = False
    head_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_attention_heads < 1:
            raise ValueError(f"num_attention_heads must be at least 1, got {self.num_attention_heads}.")
        if self.head_dim is None:
            self.require_divisible("hidden_size", "num_attention_heads")
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "head_dim"):
            self.require_at_least(field, 1)
        self.require_at_least("num_key_value_heads", 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("num_attention_heads", "num_key_value_heads")
        self.require_probability("attention_dropout")
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim must be even, got {self.head_dim}: rotary positions turn pairs of coordinates. "
                "Change head_dim, or hidden_size and num_attention_heads."
            )
        self.require_rope_type()

    def refuse_inexpressible(self) -> None:
        # With an explicit head_dim the width need not be a multiple of the heads; the official class asks for it.
        self.require_divisible("hidden_size", "num_attention_heads")
