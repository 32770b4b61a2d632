"""GPT-NeoX-20B: An Open-Source Autoregressive Language Model (Black et al., 2022, https://arxiv.org/abs/2204.06745).

Official checkpoints: EleutherAI/gpt-neox-20b and the Pythia suite (https://arxiv.org/abs/2304.01373). LayerNorm blocks
whose attention and feed-forward run side by side (`use_parallel_residual`) or one after the other, rotary positions on
a part of each head, one fused projection for queries, keys and values.

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
)
from hf_ext.layers.attention import AttentionCore
from hf_ext.layers.embeddings import look_up
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.positions import RotaryEmbedding, Rotation
from hf_ext.modeling import DecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.gpt_neox.configuration_gpt_neox import ExtGPTNeoXConfig

ORDER = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "past_key_values")


class ExtGPTNeoXAttention(AttentionCore):
    """Causal attention; the fused projection holds query, key and value of each head side by side."""

    def __init__(self, config: ExtGPTNeoXConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            is_causal=True,
            dropout=config.attention_dropout,
        )
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.attention_bias)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.attention_bias)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        fused = self.query_key_value(x).view(*x.shape[:2], -1, 3 * self.head_dim).transpose(1, 2)  # (B, H, T, 3 * D)
        mixed, weights = self.attend_heads(*fused.chunk(3, dim=-1), **kwargs)
        return self.dense(mixed), weights


class ExtGPTNeoXMLP(nn.Module):
    """dense, activation, dense."""

    def __init__(self, config: ExtGPTNeoXConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = make_activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class ExtGPTNeoXLayer(GradientCheckpointingLayer):
    """Pre-norm block; in the parallel form both sub-layers read the block's input (section 2.1 of the paper)."""

    def __init__(self, config: ExtGPTNeoXConfig, layer_idx: int) -> None:
        super().__init__()
        self.use_parallel_residual = config.use_parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_dropout = nn.Dropout(config.hidden_dropout)
        self.post_mlp_dropout = nn.Dropout(config.hidden_dropout)
        self.attention = ExtGPTNeoXAttention(config, layer_idx)
        self.mlp = ExtGPTNeoXMLP(config)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        attended = self.post_attention_dropout(self.attention(self.input_layernorm(x), **kwargs)[0])
        if self.use_parallel_residual:
            return self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(x))) + attended + x
        x = attended + x
        return self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(x))) + x


class ExtGPTNeoXPreTrainedModel(ExtPreTrainedModel):
    """Base of all GPT-NeoX classes."""

    config: ExtGPTNeoXConfig
    base_model_prefix = "gpt_neox"
    _no_split_modules = ["ExtGPTNeoXLayer"]
    # Buffers that older official files carry: causal masks and frequencies.
    _keys_to_ignore_on_load_unexpected = [r"attention\.bias", r"attention\.masked_bias", r"rotary_emb\.inv_freq"]
    _can_record_outputs = {"hidden_states": ExtGPTNeoXLayer, "attentions": ExtGPTNeoXAttention}


@positional(*ORDER)
class ExtGPTNeoXModel(DecoderModel, ExtGPTNeoXPreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtGPTNeoXConfig) -> None:
        super().__init__(config)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.emb_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(ExtGPTNeoXLayer(config, i) for i in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.rotary_emb = RotaryEmbedding(config=config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_in

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_in = value

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, **positions: object) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.embed_in, input_ids, name="input_ids", limit_name="vocab_size")
        return self.emb_dropout(inputs_embeds)

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.final_layer_norm(hidden_states)

    def rotation(self, hidden_states: Tensor, position_ids: Tensor) -> Rotation:
        return self.rotary_emb(position_ids, hidden_states.dtype)


@positional(*ORDER)
class ExtGPTNeoXForCausalLM(CausalLMModel, ExtGPTNeoXPreTrainedModel, GenerationMixin):
    """Next-token prediction. The head is `embed_out`, as in the files; the stock class renames it in memory."""

    _tied_weights_keys = {"embed_out.weight": "gpt_neox.embed_in.weight"}
    _tp_plan = {"embed_out": "colwise_gather_output"}
    _pp_plan = {"embed_out": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"embed_out": "keep_full_weight"}

    def __init__(self, config: ExtGPTNeoXConfig) -> None:
        super().__init__(config)
        self.gpt_neox = ExtGPTNeoXModel(config)
        self.embed_out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.embed_out

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.embed_out = new_embeddings


@positional(*ORDER)
class ExtGPTNeoXForSequenceClassification(LastTokenClassificationModel, ExtGPTNeoXPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtGPTNeoXConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.gpt_neox = ExtGPTNeoXModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


@positional("input_ids", "past_key_values", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
class ExtGPTNeoXForTokenClassification(DecoderTokenClassificationModel, ExtGPTNeoXPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtGPTNeoXConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.gpt_neox = ExtGPTNeoXModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional(
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "start_positions",
    "end_positions",
)
class ExtGPTNeoXForQuestionAnswering(DecoderQuestionAnsweringModel, ExtGPTNeoXPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtGPTNeoXConfig) -> None:
        super().__init__(config)
        self.gpt_neox = ExtGPTNeoXModel(config)
        self.qa_outputs = TaskLinear(config.hidden_size, 2)
        self.post_init()
