"""Configuration of DistilBERT (Sanh et al., 2019, https://arxiv.org/abs/1910.01108).

Official checkpoints: distilbert/distilbert-base-uncased, distilbert/distilbert-base-cased-distilled-squad, and every
`model_type: distilbert` file.
"""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtDistilBertConfig(ExtConfig):
    """Fields and defaults of the official `distilbert` configuration; the defaults are DistilBERT-base uncased.

    `sinusoidal_pos_embds` gives the positions sines and cosines as initial values; they are trained all the same.
    """

    model_type = "ext_distilbert"
    official_model_type = "distilbert"
    attribute_map = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    base_model_tp_plan = {
        **{f"transformer.layer.*.attention.{x}": "colwise" for x in ("q_lin", "k_lin", "v_lin")},
        "transformer.layer.*.attention.out_lin": "rowwise",
        "transformer.layer.*.ffn.lin1": "colwise",
        "transformer.layer.*.ffn.lin2": "rowwise",
    }
    base_model_fsdp_plan = {"embeddings.word_embeddings": "free_full_weight", "transformer.layer.*": "free_full_weight"}
    is_decoder: ClassVar[bool] = False  # the skeleton asks

    vocab_size: int = 30522
    max_position_embeddings: int = 512
    sinusoidal_pos_embds: bool = False
    n_layers: int = 6
    n_heads: int = 12
    dim: int = 768
    hidden_dim: int = 4 * 768
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.1
    activation: str = "gelu"
    initializer_range: float | int = 0.02
    qa_dropout: float | int = 0.1
    seq_classif_dropout: float | int = 0.2
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("is_decoder"):
            raise ValueError("is_decoder must be False, got True: DistilBERT has no causal form.")
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "max_position_embeddings", "dim", "n_heads", "hidden_dim"):
            self.require_at_least(field, 1)
        self.require_at_least("n_layers", 0)
        self.require_divisible("dim", "n_heads")
        for field in ("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"):
            self.require_probability(field)
