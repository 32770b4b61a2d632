"""Configuration of GPT (Radford et al., 2018, Improving Language Understanding by Generative Pre-Training,
https://cdn.openai.com/research-covers/language-unsupervised/language_understanding_paper.pdf).

Official checkpoints: openai-community/openai-gpt, and every `model_type: openai-gpt` file.
"""

from typing import Any

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig

# `afn` -> the library's name. The official class calls the tanh approximation, which GPT was trained with, "gelu".
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


@strict
class ExtOpenAIGPTConfig(ExtConfig):
    """Fields and defaults of the official `openai-gpt` configuration; the defaults are the one released model.

    `afn` is the activation of the feed-forwards, where "gelu" means the tanh approximation. The `summary_*` fields
    describe the choice head of the double-heads model.
    """

    model_type = "ext_openai_gpt"
    official_model_type = "openai-gpt"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "tokens_embed": "embedding_rowwise",  # as the head, which may be tied to it
        "h.*.attn.c_attn": "conv1d_colwise_3",
        "h.*.attn.c_proj": "conv1d_rowwise",
        "h.*.mlp.c_fc": "conv1d_colwise",
        "h.*.mlp.c_proj": "conv1d_rowwise",
    }
    base_model_fsdp_plan = {"tokens_embed": "free_full_weight", "h.*": "free_full_weight"}
    # The official class keeps no keys and values, so its configuration has no such field. Without an annotation this
    # is a default and no field, and stays out of the files unless it is changed.
    use_cache = True
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 40478
    n_positions: int = 512
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    afn: str = "gelu"
    resid_pdrop: float | int = 0.1
    embd_pdrop: float | int = 0.1
    attn_pdrop: float | int = 0.1
    layer_norm_epsilon: float | int = 1e-5
    initializer_range: float | int = 0.02
    summary_type: str = "cls_index"
    summary_use_proj: bool = True
    summary_activation: str | None = None
    summary_proj_to_labels: bool = True
    summary_first_dropout: float | int = 0.1
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, use_cache: bool | None = None, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if use_cache is not None and use_cache != self.use_cache:  # the library drops it: it is no field
            self.use_cache = use_cache

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "n_positions", "n_embd", "n_head"):
            self.require_at_least(field, 1)
        self.require_at_least("n_layer", 0)
        self.require_divisible("n_embd", "n_head")
        for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"):
            self.require_probability(field)
        if self.afn not in ACTIVATIONS:
            raise ValueError(
                f'afn must be one of {", ".join(ACTIVATIONS)}, got {self.afn!r}; "gelu" is the tanh approximation here.'
            )
