"""Configuration of BLOOM (BigScience Workshop, 2022, https://arxiv.org/abs/2211.05100).

Official checkpoints: bigscience/bloom, bloom-560m to bloom-7b1, bloomz, and every `model_type: bloom` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtBloomConfig(ExtConfig):
    """Fields and defaults of the official `bloom` configuration.

    `pretraining_tp` says how the training run split its matrices and changes nothing; `slow_but_exact` together with it
    is refused (see `validate_architecture`). `n_embed` of official files is `hidden_size`.
    """

    model_type = "ext_bloom"
    official_model_type = "bloom"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    # Attention stays whole: the slopes belong to the heads of all ranks together.
    base_model_tp_plan = {
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }
    base_model_pp_plan = {
        "word_embeddings": (["input_ids"], ["inputs_embeds"]),
        "word_embeddings_layernorm": (["inputs_embeds"], ["hidden_states"]),
        "h": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "ln_f": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 250880
    hidden_size: int = 64
    n_layer: int = 2
    n_head: int = 8
    layer_norm_epsilon: float | int = 1e-5
    initializer_range: float | int = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = None
    apply_residual_connection_post_layernorm: bool = False
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    pretraining_tp: int = 1
    slow_but_exact: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        n_embed = kwargs.pop("n_embed", None)
        if n_embed is not None:
            self.hidden_size = n_embed
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "n_head"):
            self.require_at_least(field, 1)
        self.require_at_least("n_layer", 0)
        self.require_divisible("hidden_size", "n_head")
        for field in ("hidden_dropout", "attention_dropout"):
            self.require_probability(field)
        if self.slow_but_exact and self.pretraining_tp > 1:
            raise ValueError(
                f"slow_but_exact=True with pretraining_tp={self.pretraining_tp}: the official class then leaves out "
                "the biases behind attention and feed-forward, which no checkpoint was trained without; set "
                "slow_but_exact=False."
            )
