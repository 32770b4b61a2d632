"""BLOOM: A 176B-Parameter Open-Access Multilingual Language Model (BigScience Workshop, 2022,
https://arxiv.org/abs/2211.05100).

Official checkpoints: bigscience/bloom, bloom-560m to bloom-7b1, the bloomz models, and every `model_type: bloom` file,
with the prefix `transformer.` or without it. Pre-LN blocks, linear biases instead of positions, a LayerNorm right after
the embedding, one fused projection for queries, keys and values.

Shapes: B batch, T tokens, C model width, H heads, D head width.
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
from hf_ext.layers.alibi import AlibiAttentionCore
from hf_ext.layers.embeddings import look_up
from hf_ext.layers.positions import Alibi
from hf_ext.modeling import AlibiDecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.bloom.configuration_bloom import ExtBloomConfig

INPUTS = ("input_ids", "past_key_values", "attention_mask", "inputs_embeds")
SWITCHES = ("output_attentions", "output_hidden_states", "return_dict")


class ExtBloomAttention(AlibiAttentionCore):
    """Causal attention; the fused projection holds query, key and value of each head side by side."""

    def __init__(self, config: ExtBloomConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.n_head,
            head_dim=config.hidden_size // config.n_head,
            is_causal=True,
            dropout=config.attention_dropout,
        )
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        fused = self.query_key_value(x).view(*x.shape[:2], -1, 3 * self.head_dim).transpose(1, 2)  # (B, H, T, 3 * D)
        mixed, weights = self.attend_heads(*fused.chunk(3, dim=-1), **kwargs)
        return self.dense(mixed), weights


class ExtBloomMLP(nn.Module):
    """C -> 4 C -> C, with the tanh form of GELU."""

    def __init__(self, config: ExtBloomConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.act = nn.GELU(approximate="tanh")
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class ExtBloomBlock(GradientCheckpointingLayer):
    """Pre-LN block; the residual may start behind the norm (`apply_residual_connection_post_layernorm`)."""

    def __init__(self, config: ExtBloomConfig, layer_idx: int) -> None:
        super().__init__()
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.self_attention = ExtBloomAttention(config, layer_idx)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = ExtBloomMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        normed = self.input_layernorm(x)
        x = self.dropout(self.self_attention(normed, **kwargs)[0]) + (normed if self.residual_after_norm else x)
        normed = self.post_attention_layernorm(x)
        return self.dropout(self.mlp(normed)) + (normed if self.residual_after_norm else x)


class ExtBloomPreTrainedModel(ExtPreTrainedModel):
    """Base of all BLOOM classes."""

    config: ExtBloomConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["ExtBloomBlock"]
    _can_record_outputs = {"hidden_states": ExtBloomBlock, "attentions": ExtBloomAttention}


@positional(*INPUTS, "use_cache", *SWITCHES)
class ExtBloomModel(AlibiDecoderModel, ExtBloomPreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtBloomConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.h = nn.ModuleList(ExtBloomBlock(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.alibi = Alibi(num_heads=config.n_head, scaling=(config.hidden_size // config.n_head) ** -0.5)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.word_embeddings = value

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, **positions: object) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.word_embeddings, input_ids, name="input_ids", limit_name="vocab_size")
        return self.word_embeddings_layernorm(inputs_embeds)

    def blocks(self) -> nn.ModuleList:
        return self.h

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.ln_f(hidden_states)


@positional(*INPUTS, "labels", "use_cache", *SWITCHES, "logits_to_keep")
class ExtBloomForCausalLM(CausalLMModel, ExtBloomPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "transformer.word_embeddings.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtBloomConfig) -> None:
        super().__init__(config)
        self.transformer = ExtBloomModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


@positional(*INPUTS, "labels", "use_cache", *SWITCHES)
class ExtBloomForSequenceClassification(LastTokenClassificationModel, ExtBloomPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtBloomConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtBloomModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


@positional(*INPUTS, "labels", "use_cache", *SWITCHES)
class ExtBloomForTokenClassification(DecoderTokenClassificationModel, ExtBloomPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtBloomConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtBloomModel(config)
        self.dropout = classifier_dropout(config, fallback=config.hidden_dropout)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional("input_ids", "attention_mask", "inputs_embeds", "start_positions", "end_positions", *SWITCHES)
class ExtBloomForQuestionAnswering(DecoderQuestionAnsweringModel, ExtBloomPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtBloomConfig) -> None:
        super().__init__(config)
        self.transformer = ExtBloomModel(config)
        self.qa_outputs = TaskLinear(config.hidden_size, 2)
        self.post_init()
