"""Configuration of Falcon (Almazrouei et al., 2023, https://arxiv.org/abs/2311.16867).

Official checkpoints: tiiuae/falcon-7b, falcon-40b, falcon-180B, falcon-11B, falcon-rw-1b, and every
`model_type: falcon` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtFalconConfig(ExtConfig):
    """Fields and defaults of the official `falcon` configuration; the defaults are the 7B model.

    Key/value heads: one with `multi_query`, `num_kv_heads` with `new_decoder_architecture`, else as many as query
    heads. Positions: linear biases with `alibi`, else rotary. `parallel_attn` puts attention and feed-forward side by
    side, behind one norm, or behind a norm each (`num_ln_in_parallel_attn`, by default 2 in the new architecture).
    """

    model_type = "ext_falcon"
    official_model_type = "falcon"
    keys_to_ignore_at_inference = ["past_key_values"]
    # Attention stays whole: one key/value head, or the slopes of ALiBi, belong to the heads of all ranks together.
    base_model_tp_plan = {
        "word_embeddings": "embedding_rowwise",  # as the head, which may be tied to it
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }
    base_model_fsdp_plan = {
        "word_embeddings": "free_full_weight",
        "h.*": "free_full_weight",
        "ln_f": "keep_full_weight",
    }
    base_model_pp_plan = {
        "word_embeddings": (["input_ids"], ["inputs_embeds"]),
        "h": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "ln_f": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 65024
    hidden_size: int = 4544
    num_hidden_layers: int = 32
    num_attention_heads: int = 71
    num_ln_in_parallel_attn: int | None = None
    layer_norm_epsilon: float | int = 1e-5
    initializer_range: float | int = 0.02
    use_cache: bool = True
    hidden_dropout: float | int | None = 0.0
    attention_dropout: float | int | None = 0.0
    num_kv_heads: int | None = None
    alibi: bool | None = False
    new_decoder_architecture: bool | None = False
    multi_query: bool | None = True
    parallel_attn: bool | None = True
    bias: bool | None = False
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    bos_token_id: int | None = 11
    eos_token_id: int | list[int] | None = 11
    pad_token_id: int | None = None
    ffn_hidden_size: int | None = None
    activation: str | None = "gelu"
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for derived in ("num_key_value_heads", "head_dim"):  # properties here; files of other writers may hold them
            kwargs.pop(derived, None)
        n_embed = kwargs.pop("n_embed", None)
        if n_embed is not None:
            self.hidden_size = n_embed
        if self.num_kv_heads is None:
            self.num_kv_heads = self.num_attention_heads
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """G, under the name by which the library gives its caches their shape. No field: official files know none."""
        if self.new_decoder_architecture:
            return self.num_kv_heads
        return 1 if self.multi_query else self.num_attention_heads

    @property
    def norm_per_branch(self) -> bool:
        """Whether attention and feed-forward, side by side, have a norm each."""
        return bool(self.new_decoder_architecture) and self.num_ln_in_parallel_attn != 1

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "num_attention_heads", "num_kv_heads", "ffn_hidden_size"):
            self.require_at_least(field, 1)
        self.require_at_least("max_position_embeddings", 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("hidden_size", "num_attention_heads")
        for field in ("hidden_dropout", "attention_dropout"):
            self.require_probability(field)
        self.validate_heads()
        self.validate_norms()
        self.require_rope_type()
        if self.head_dim % 2:  # the official configuration asks for it with linear biases too
            raise ValueError(
                f"the width of a head, hidden_size / num_attention_heads, is {self.head_dim}; rotary positions turn "
                "pairs of coordinates and need an even one. Change either field."
            )

    def validate_heads(self) -> None:
        """Raise ValueError unless the numbers of heads agree."""
        if self.new_decoder_architecture:
            self.require_divisible("num_attention_heads", "num_kv_heads")
        elif not self.multi_query and self.num_kv_heads != self.num_attention_heads:
            raise ValueError(
                f"num_kv_heads ({self.num_kv_heads}) differs from num_attention_heads ({self.num_attention_heads}); "
                "groups of heads need new_decoder_architecture=True, a single key/value head multi_query=True."
            )

    def validate_norms(self) -> None:
        """Raise ValueError for blocks that the official class builds and then cannot run."""
        norms = self.num_ln_in_parallel_attn
        if norms not in (None, 1, 2):
            raise ValueError(f"num_ln_in_parallel_attn must be 1, 2 or None, got {norms}.")
        if self.new_decoder_architecture and not self.parallel_attn:
            raise ValueError("parallel_attn=False does not go with new_decoder_architecture=True; set it to True.")
        if norms == 2 and self.parallel_attn and not self.new_decoder_architecture:
            raise ValueError(
                "num_ln_in_parallel_attn=2 needs new_decoder_architecture=True; set it to 1, or leave it out."
            )
