"""Configuration of Longformer (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150).

Official checkpoints: allenai/longformer-base-4096, allenai/longformer-large-4096 and every `model_type: longformer`
file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtLongformerConfig(ExtConfig):
    """Fields and defaults of the official `longformer` configuration.

    `attention_window` counts the keys that a token sees besides its own, half of them on each side: one number for all
    layers, or one per layer. Positions begin at `pad_token_id` + 1, so that `max_position_embeddings` holds that many
    more entries than a text may have tokens. `onnx_export` is kept for the official class; here it changes nothing.
    """

    model_type = "ext_longformer"
    official_model_type = "longformer"
    base_model_tp_plan = {
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
    base_model_fsdp_plan = {"embeddings.word_embeddings": "free_full_weight", "encoder.layer.*": "free_full_weight"}
    is_decoder = False  # no field: the official configuration has none

    attention_window: list[int] | int = 512
    sep_token_id: int | None = 2
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float | int = 0.02
    layer_norm_eps: float | int = 1e-12
    onnx_export: bool = False
    tie_word_embeddings: bool = True

    def windows(self) -> list[int]:
        """The window of each layer."""
        given = self.attention_window
        return list(given) if isinstance(given, list) else [given] * self.num_hidden_layers

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "type_vocab_size"):
            self.require_at_least(field, 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("hidden_size", "num_attention_heads")
        for field in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            self.require_probability(field)
        if self.pad_token_id is None:
            raise ValueError("pad_token_id is None, but positions are counted from it; give the id (official: 1).")
        if self.max_position_embeddings < self.pad_token_id + 2:
            raise ValueError(
                f"max_position_embeddings ({self.max_position_embeddings}) must be at least pad_token_id + 2 "
                f"({self.pad_token_id + 2}): positions begin at pad_token_id + 1."
            )
        given = self.attention_window
        if isinstance(given, list) and len(given) != self.num_hidden_layers:
            raise ValueError(
                f"attention_window has {len(given)} entries for num_hidden_layers={self.num_hidden_layers}; give one "
                "for each layer, or a single number."
            )
        for window in given if isinstance(given, list) else [given]:
            if window < 2 or window % 2:
                raise ValueError(
                    f"attention_window must be even and at least 2 (half of it on each side), got {window}; nearest: "
                    f"{max(window + window % 2, 2)}."
                )
