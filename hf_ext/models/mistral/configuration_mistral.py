"""Configuration of Mistral (Jiang et al., 2023, https://arxiv.org/abs/2310.06825).

Official checkpoints: mistralai/Mistral-7B-v0.1 to v0.3, mistralai/Mistral-Nemo-Base-2407, HuggingFaceH4/zephyr-7b-beta,
and every `model_type: mistral` file.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtMistralConfig(ExtConfig):
    """Fields and defaults of the official `mistral` configuration; the defaults are Mistral 7B v0.1.

    A token sees the last `sliding_window` tokens, its own included; `None` means all earlier ones (7B v0.2 and later).
    `head_dim` may differ from `hidden_size / num_attention_heads` (Mistral NeMo). Rotary positions as in LLaMA.
    """

    model_type = "ext_mistral"
    official_model_type = "mistral"
    keys_to_ignore_at_inference = ["past_key_values"]
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
    # The blocks of LLaMA ask; no Mistral file has biases.
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    initializer_range: float | int = 0.02
    rms_norm_eps: float | int = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    sliding_window: int | None = 4096
    attention_dropout: float | int | None = 0.0

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
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window must be at least 1, got {self.sliding_window}; None lets a token see all earlier ones."
            )
        self.require_rope_type()
