"""Configuration of BERT (Devlin et al., 2018, https://arxiv.org/abs/1810.04805).

Official checkpoints: google-bert/bert-base-uncased, google-bert/bert-large-cased, and every `model_type: bert` file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig

PARTS = ("attention", "crossattention")  # of a block, the second if there is an encoder


@strict
class ExtBertConfig(ExtConfig):
    """Fields and defaults of the official `bert` configuration; the defaults are BERT-base uncased.

    `is_decoder` makes self-attention causal and gives the model a key/value cache; `add_cross_attention` adds a
    cross-attention sub-layer to every block of such a decoder.
    """

    model_type = "ext_bert"
    official_model_type = "bert"
    base_model_tp_plan = {
        **{f"encoder.layer.*.{part}.self.{x}": "colwise" for part in PARTS for x in ("query", "key", "value")},
        **{f"encoder.layer.*.{part}.output.dense": "rowwise" for part in PARTS},
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
    base_model_fsdp_plan = {"embeddings.word_embeddings": "free_full_weight", "encoder.layer.*": "free_full_weight"}

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
    pad_token_id: int | None = 0
    use_cache: bool = True
    classifier_dropout: float | int | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "type_vocab_size"):
            self.require_at_least(field, 1)
        self.require_at_least("max_position_embeddings", 1)
        self.require_at_least("num_hidden_layers", 0)
        self.require_divisible("hidden_size", "num_attention_heads")
        for field in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            self.require_probability(field)
        if self.add_cross_attention and not self.is_decoder:
            raise ValueError("add_cross_attention=True needs is_decoder=True: only a decoder looks at an encoder.")
