"""The Falcon Series of Open Language Models (Almazrouei et al., 2023, https://arxiv.org/abs/2311.16867).

Official checkpoints: tiiuae/falcon-7b (multi-query, parallel blocks), falcon-40b, falcon-180B and falcon-11B (grouped
queries, `new_decoder_architecture`), falcon-rw-1b and falcon-rw-7b (multi-head, sequential blocks, linear biases
instead of rotary positions), and every `model_type: falcon` file.

Shapes: B batch, T tokens, K keys, C model width, F feed-forward width, H heads, G key/value heads, D head width.
"""

import torch
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
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.positions import Alibi, Columns, RotaryEmbedding, Rotation, alibi_slopes
from hf_ext.modeling import AlibiDecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.falcon.configuration_falcon import ExtFalconConfig

INPUTS = ("input_ids", "past_key_values", "attention_mask", "inputs_embeds")
PLACED = ("input_ids", "past_key_values", "attention_mask", "position_ids", "inputs_embeds")
SWITCHES = ("output_attentions", "output_hidden_states", "return_dict")


class RoundedAlibi(Alibi):
    """Linear biases as Falcon was trained with them: rounded to bf16, and added before the scores are scaled.

    Rounded, they are no product of a slope and an index any more: a key carries one number for each query head of its
    group, and a query picks its own.

    Args:
        num_heads: H.
        scaling: the factor on the scores.
        group: query heads per key/value head, H / G.
    """

    def __init__(self, *, num_heads: int, scaling: float, group: int) -> None:
        super().__init__(num_heads=num_heads, scaling=scaling)
        self.group = group

    def rounded(self, index: Tensor) -> Tensor:
        """index (B or 1, K) -> (B or 1, H, K), bf16. It depends on where the index starts."""
        return alibi_slopes(self.num_heads, device=index.device).bfloat16()[:, None] * index[:, None]

    def columns(self, index: Tensor, dtype: torch.dtype) -> Columns:
        """index (B or 1, K) -> (1, H, 1, H / G) and (B or 1, G, K, H / G)"""
        picks = torch.eye(self.group, dtype=dtype, device=index.device).repeat(self.num_heads // self.group, 1)
        return picks[None, :, None], self.rounded(index).unflatten(1, (-1, self.group)).transpose(2, 3).to(dtype)

    def bias(self, index: Tensor, own: Tensor | int) -> Tensor:
        """index (B or 1, K) -> (B or 1, H, 1, K), fp32"""
        return self.rounded(index)[:, :, None].float() * self.scaling


class ExtFalconAttention(AlibiAttentionCore):
    """Causal attention; the fused projection holds, group by group, the queries of the group, its key, its value."""

    def __init__(self, config: ExtFalconConfig, layer_idx: int) -> None:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=config.head_dim,
            is_causal=True,
            # As in the official class, which drops attention weights with linear biases only.
            dropout=config.attention_dropout if config.alibi else 0.0,
        )
        self.group = heads // kv_heads
        width = (heads + 2 * kv_heads) * config.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=config.bias)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        fused = self.query_key_value(x).view(*x.shape[:2], -1, self.group + 2, self.head_dim)  # (B, T, G, H / G + 2, D)
        parts = (part.flatten(2, 3).transpose(1, 2) for part in fused.split([self.group, 1, 1], dim=3))
        mixed, weights = self.attend_heads(*parts, **kwargs)
        return self.dense(mixed), weights


class ExtFalconMLP(nn.Module):
    """C -> F -> C."""

    def __init__(self, config: ExtFalconConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        self.act = make_activation(config.activation)
        self.dense_4h_to_h = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class ExtFalconDecoderLayer(GradientCheckpointingLayer):
    """Pre-LN block: attention and feed-forward side by side, behind one norm or one each, or one after the other."""

    def __init__(self, config: ExtFalconConfig, layer_idx: int) -> None:
        super().__init__()
        self.parallel, self.norm_per_branch = config.parallel_attn, config.norm_per_branch
        self.self_attention = ExtFalconAttention(config, layer_idx)
        self.mlp = ExtFalconMLP(config)
        names = ["ln_attn", "ln_mlp"] if self.norm_per_branch else ["input_layernorm"]
        for name in names if self.parallel else ["input_layernorm", "post_attention_layernorm"]:
            self.add_module(name, nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon))
        # One after the other, the first branch is dropped like attention weights, as in the official class.
        self.attention_dropout = nn.Dropout(config.attention_dropout or 0.0)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout or 0.0)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        if not self.parallel:
            x = self.attention_dropout(self.self_attention(self.input_layernorm(x), **kwargs)[0]) + x
            return self.hidden_dropout(self.mlp(self.post_attention_layernorm(x))) + x
        if self.norm_per_branch:
            to_attention, to_mlp = self.ln_attn(x), self.ln_mlp(x)
        else:
            to_attention = to_mlp = self.input_layernorm(x)
        return self.hidden_dropout(self.mlp(to_mlp) + self.self_attention(to_attention, **kwargs)[0]) + x


class ExtFalconPreTrainedModel(ExtPreTrainedModel):
    """Base of all Falcon classes."""

    config: ExtFalconConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["ExtFalconDecoderLayer"]
    # Frequencies that older files carry.
    _keys_to_ignore_on_load_unexpected = [r"rotary(_emb)?\.inv_freq"]
    _can_record_outputs = {"hidden_states": ExtFalconDecoderLayer, "attentions": ExtFalconAttention}


@positional(*PLACED, "use_cache", *SWITCHES)
class ExtFalconModel(AlibiDecoderModel, ExtFalconPreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtFalconConfig) -> None:
        super().__init__(config)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(ExtFalconDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        if config.alibi:
            heads = config.num_attention_heads
            self.alibi = RoundedAlibi(
                num_heads=heads, scaling=config.head_dim**-0.5, group=heads // config.num_key_value_heads
            )
        else:
            self.rotary_emb = RotaryEmbedding(config=config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.word_embeddings = value

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, **positions: object) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.word_embeddings, input_ids, name="input_ids", limit_name="vocab_size")
        return inputs_embeds

    def blocks(self) -> nn.ModuleList:
        return self.h

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.ln_f(hidden_states)

    def rotation(self, hidden_states: Tensor, position_ids: Tensor) -> Rotation | None:
        return None if self.alibi else self.rotary_emb(position_ids, hidden_states.dtype)


@positional(*PLACED, "labels", "use_cache", *SWITCHES, "logits_to_keep")
class ExtFalconForCausalLM(CausalLMModel, ExtFalconPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "transformer.word_embeddings.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtFalconConfig) -> None:
        super().__init__(config)
        self.transformer = ExtFalconModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


@positional(*INPUTS, "labels", "use_cache", *SWITCHES)
class ExtFalconForSequenceClassification(LastTokenClassificationModel, ExtFalconPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtFalconConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtFalconModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


@positional(*INPUTS, "labels", "use_cache", *SWITCHES)
class ExtFalconForTokenClassification(DecoderTokenClassificationModel, ExtFalconPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtFalconConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtFalconModel(config)
        self.dropout = classifier_dropout(config, 0.1 if config.hidden_dropout is None else config.hidden_dropout)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional("input_ids", "attention_mask", "inputs_embeds", "start_positions", "end_positions", *SWITCHES)
class ExtFalconForQuestionAnswering(DecoderQuestionAnsweringModel, ExtFalconPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtFalconConfig) -> None:
        super().__init__(config)
        self.transformer = ExtFalconModel(config)
        self.qa_outputs = TaskLinear(config.hidden_size, 2)
        self.post_init()
