"""LLaMA: Open and Efficient Foundation Language Models (Touvron et al., 2023, https://arxiv.org/abs/2302.13971).

Also LLaMA 2 (https://arxiv.org/abs/2307.09288) and 3.x (https://arxiv.org/abs/2407.21783), and every
`model_type: llama` file: meta-llama/*, HuggingFaceTB/SmolLM2-*. Pre-RMSNorm blocks, rotary positions, SwiGLU,
grouped-query attention from LLaMA 2 on.

Shapes: B batch, T tokens, C model width, H heads, G key/value heads, D head width.
"""

from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ext.heads import (
    CausalLMModel,
    DecoderQuestionAnsweringModel,
    DecoderTokenClassificationModel,
    LastTokenClassificationModel,
    TaskLinear,
    classifier_dropout,
)
from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.embeddings import look_up
from hf_ext.layers.feedforward import GatedFeedForward
from hf_ext.layers.norms import RMSNorm
from hf_ext.layers.positions import RotaryEmbedding, Rotation
from hf_ext.modeling import DecoderModel, ExtPreTrainedModel
from hf_ext.models.llama.configuration_llama import ExtLlamaConfig


class ExtLlamaAttention(AttentionCore):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, config: ExtLlamaConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            is_causal=True,
            dropout=config.attention_dropout,
        )
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        return self.o_proj(mixed), weights


class ExtLlamaDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block: x + attention(norm(x)), then x + feedforward(norm(x))."""

    attention_class = ExtLlamaAttention  # child architectures have their own

    def __init__(self, config: ExtLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = self.attention_class(config, layer_idx)
        self.mlp = GatedFeedForward(
            width=config.hidden_size,
            inner_width=config.intermediate_size,
            activation=config.hidden_act,
            bias=config.mlp_bias,
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class ExtLlamaPreTrainedModel(ExtPreTrainedModel):
    """Base of all LLaMA classes."""

    config: ExtLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["ExtLlamaDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]  # older official files carry this buffer
    _can_record_outputs = {"hidden_states": ExtLlamaDecoderLayer, "attentions": ExtLlamaAttention}


class ExtLlamaModel(DecoderModel, ExtLlamaPreTrainedModel):
    """The bare decoder."""

    block_class = ExtLlamaDecoderLayer  # child architectures have their own

    def __init__(self, config: ExtLlamaConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.block_class(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config=config)
        self.post_init()

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, **positions: object) -> Tensor:
        if inputs_embeds is not None:
            return inputs_embeds
        return look_up(self.embed_tokens, input_ids, name="input_ids", limit_name="vocab_size")

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.norm(hidden_states)

    def rotation(self, hidden_states: Tensor, position_ids: Tensor) -> Rotation:
        return self.rotary_emb(position_ids, hidden_states.dtype)


class ExtLlamaForCausalLM(CausalLMModel, ExtLlamaPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtLlamaConfig) -> None:
        super().__init__(config)
        self.model = ExtLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class ExtLlamaForSequenceClassification(LastTokenClassificationModel, ExtLlamaPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtLlamaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ExtLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class ExtLlamaForTokenClassification(DecoderTokenClassificationModel, ExtLlamaPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtLlamaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ExtLlamaModel(config)
        self.dropout = classifier_dropout(config, fallback=0.1)
        self.score = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.score(self.dropout(hidden_states))


class ExtLlamaForQuestionAnswering(DecoderQuestionAnsweringModel, ExtLlamaPreTrainedModel):
    """Start and end of an answer. In this class only, official files name the base model `transformer`."""

    base_model_prefix = "transformer"

    def __init__(self, config: ExtLlamaConfig) -> None:
        super().__init__(config)
        self.transformer = ExtLlamaModel(config)
        self.qa_outputs = TaskLinear(config.hidden_size, 2)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.transformer.embed_tokens = value
