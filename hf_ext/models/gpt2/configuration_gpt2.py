"""Configuration of GPT-2 (Radford et al., 2019, Language Models are Unsupervised Multitask Learners,
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf).

Official checkpoints: openai-community/gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilbert/distilgpt2, and every
`model_type: gpt2` file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.configuration import ExtConfig


@strict
class ExtGPT2Config(ExtConfig):
    """Fields and defaults of the official `gpt2` configuration; the defaults are GPT-2 small.

    `n_inner` of `None` is four times `n_embd`. `scale_attn_weights` divides the scores by the root of the head width,
    `scale_attn_by_inverse_layer_idx` by the layer's number as well, and `reorder_and_upcast_attn` computes them in fp32
    where attention is spelled out (eager). The `summary_*` fields describe the choice head of the double-heads model.
    """

    model_type = "ext_gpt2"
    official_model_type = "gpt2"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "wte": "embedding_rowwise",  # as the head, which may be tied to it
        "h.*.attn.c_attn": "conv1d_colwise_3",
        "h.*.attn.c_proj": "conv1d_rowwise",
        "h.*.crossattention.q_attn": "conv1d_colwise",
        "h.*.crossattention.c_attn": "conv1d_colwise_2",
        "h.*.crossattention.c_proj": "conv1d_rowwise",
        "h.*.mlp.c_fc": "conv1d_colwise",
        "h.*.mlp.c_proj": "conv1d_rowwise",
    }
    base_model_fsdp_plan = {"wte": "free_full_weight", "h.*": "free_full_weight", "ln_f": "keep_full_weight"}
    attribute_map = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
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
    scale_attn_weights: bool = True
    use_cache: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256
    pad_token_id: int | None = None
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    def validate_architecture(self) -> None:
        super().validate_architecture()
        for field in ("vocab_size", "n_positions", "n_embd", "n_head"):
            self.require_at_least(field, 1)
        self.require_at_least("n_layer", 0)
        if self.n_inner is not None:
            self.require_at_least("n_inner", 1)
        self.require_divisible("n_embd", "n_head")
        for field in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"):
            self.require_probability(field)
