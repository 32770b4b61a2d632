"""MPT: MosaicML Pretrained Transformer (MosaicML, 2023, https://www.databricks.com/blog/mpt-7b).

Official checkpoints: mosaicml/mpt-7b, mpt-7b-instruct, mpt-30b, and every `model_type: mpt` file. Pre-LN blocks,
linear biases instead of positions, no additive biases anywhere (norms included), one fused projection whose outputs may
be clipped.

Shapes: B batch, T tokens, K keys, C model width, H heads.
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
from hf_ext.layers.feedforward import GELU
from hf_ext.layers.positions import Alibi
from hf_ext.modeling import AlibiDecoderModel, ExtPreTrainedModel, positional
from hf_ext.models.mpt.configuration_mpt import ExtMptConfig

INPUTS = ("input_ids", "past_key_values", "attention_mask", "inputs_embeds")
SWITCHES = ("output_attentions", "output_hidden_states", "return_dict")


def norm(config: ExtMptConfig) -> nn.LayerNorm:
    """LayerNorm over C with a weight only."""
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon, bias=False)


def scaling(config: ExtMptConfig) -> float:
    """The factor on the scores."""
    scale = config.attn_config.softmax_scale
    return (config.d_model // config.n_heads) ** -0.5 if scale is None else scale


class ExtMptAttention(AlibiAttentionCore):
    """Causal multi-head attention; the fused projection holds all queries, all keys, all values."""

    def __init__(self, config: ExtMptConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.n_heads,
            head_dim=config.d_model // config.n_heads,
            is_causal=True,
            dropout=config.attn_config.attn_pdrop,
            scaling=scaling(config),
        )
        self.clip_qkv = config.attn_config.clip_qkv
        self.Wqkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out_proj = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        fused = self.Wqkv(x)
        if self.clip_qkv is not None:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        mixed, weights = self.attend(*fused.chunk(3, dim=-1), **kwargs)
        return self.out_proj(mixed), weights


class ExtMptMLP(nn.Module):
    """C -> 4 C -> C."""

    def __init__(self, config: ExtMptConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.d_model, 4 * config.d_model, bias=False)
        self.act = GELU()
        self.down_proj = nn.Linear(4 * config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.down_proj(self.act(self.up_proj(x)))


class ExtMptBlock(GradientCheckpointingLayer):
    """Pre-LN block."""

    def __init__(self, config: ExtMptConfig, layer_idx: int) -> None:
        super().__init__()
        self.norm_1 = norm(config)
        self.attn = ExtMptAttention(config, layer_idx)
        self.norm_2 = norm(config)
        self.ffn = ExtMptMLP(config)
        self.dropout = nn.Dropout(config.attn_config.attn_pdrop)

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.dropout(self.attn(self.norm_1(x), **kwargs)[0]) + x
        return self.dropout(self.ffn(self.norm_2(x))) + x


class ExtMptBlocks(nn.ModuleList):
    """The checkpoint's name of the list, `blocks`, is the name of the skeleton's method that returns it: it is both."""

    def __call__(self) -> "ExtMptBlocks":
        return self


class ExtMptPreTrainedModel(ExtPreTrainedModel):
    """Base of all MPT classes."""

    config: ExtMptConfig
    base_model_prefix = "transformer"
    _no_split_modules = ["ExtMptBlock"]
    _can_record_outputs = {"hidden_states": ExtMptBlock, "attentions": ExtMptAttention}


@positional(*INPUTS, "use_cache", *SWITCHES)
class ExtMptModel(AlibiDecoderModel, ExtMptPreTrainedModel):
    """The bare decoder."""

    def __init__(self, config: ExtMptConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = ExtMptBlocks(ExtMptBlock(config, i) for i in range(config.n_layers))
        self.norm_f = norm(config)
        self.alibi = Alibi(
            num_heads=config.n_heads, scaling=scaling(config), bias_max=config.attn_config.alibi_bias_max
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.wte = value

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, **positions: object) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.wte, input_ids, name="input_ids", limit_name="vocab_size")
        return inputs_embeds

    @property
    def blocks(self) -> ExtMptBlocks:
        return self._modules["blocks"]

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.norm_f(hidden_states)

    def key_index(
        self, attention_mask: Tensor | None, keys: int, past_length: int | Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor | int]:
        """Places, whatever the mask says: holes count for the distance here, as in the official class."""
        return super().key_index(None, keys, past_length, device)


@positional(*INPUTS, "labels", "use_cache", *SWITCHES, "logits_to_keep")
class ExtMptForCausalLM(CausalLMModel, ExtMptPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtMptConfig) -> None:
        super().__init__(config)
        self.transformer = ExtMptModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()


@positional(*INPUTS, "labels", "use_cache", *SWITCHES)
class ExtMptForSequenceClassification(LastTokenClassificationModel, ExtMptPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtMptConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtMptModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels, bias=False)
        self.post_init()


@positional(*INPUTS, "labels", "use_cache", *SWITCHES)
class ExtMptForTokenClassification(DecoderTokenClassificationModel, ExtMptPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtMptConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtMptModel(config)
        self.dropout = classifier_dropout(config, fallback=0.1)
        self.classifier = TaskLinear(config.d_model, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional("input_ids", "attention_mask", "inputs_embeds", "start_positions", "end_positions", *SWITCHES)
class ExtMptForQuestionAnswering(DecoderQuestionAnsweringModel, ExtMptPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtMptConfig) -> None:
        super().__init__(config)
        self.transformer = ExtMptModel(config)
        self.qa_outputs = TaskLinear(config.d_model, 2)
        self.post_init()
