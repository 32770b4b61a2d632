"""mBART: Multilingual Denoising Pre-training (Liu et al., 2020, https://arxiv.org/abs/2001.08210).

Official checkpoints: facebook/mbart-large-cc25, facebook/mbart-large-50-many-to-many-mmt, and every
`model_type: mbart` file. BART with its norms before the sub-layers and one more after the last block of each half. The
decoder starts from the token of the language that it is to write, which in the labels comes last.

Shapes: B batch, S encoder tokens, T tokens of either half, N packed tokens, C model width.
"""

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin

from hf_ext.layers.packing import CrossPacking
from hf_ext.losses import IGNORE_INDEX
from hf_ext.modeling import ExtPreTrainedModel, positional
from hf_ext.models.bart.modeling_bart import (
    ExtBartAttention,
    ExtBartCrossAttention,
    ExtBartDecoder,
    ExtBartDecoderLayer,
    ExtBartDecoderWrapper,
    ExtBartEncoder,
    ExtBartEncoderLayer,
    ExtBartForCausalLM,
    ExtBartForConditionalGeneration,
    ExtBartForQuestionAnswering,
    ExtBartForSequenceClassification,
    ExtBartModel,
    keep_finite,
)
from hf_ext.models.mbart.configuration_mbart import ExtMBartConfig


class ExtMBartEncoderLayer(ExtBartEncoderLayer):
    """Self-attention, then feed-forward; each reads the normalised sum so far and adds to the sum."""

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), **kwargs)[0])
        return keep_finite(x + self.dropout(self.feed_forward(self.final_layer_norm(x))))


class ExtMBartDecoderLayer(ExtBartDecoderLayer):
    """Causal self-attention, cross-attention where there is an encoder, feed-forward; pre-LN as in the encoder."""

    def forward(
        self,
        x: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        encoder_attention_mask: Tensor | None = None,
        encoder_packing: CrossPacking | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """(B, T, C), encoder's output (B, S, C), or (1, N, C) with `encoder_packing` -> (B, T, C)"""
        attended, _ = self.self_attn(self.self_attn_layer_norm(x), past_key_values=past_key_values, **kwargs)
        x = x + self.dropout(attended)
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                self.encoder_attn_layer_norm(x),
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                packing=encoder_packing,
                past_key_values=past_key_values,
            )
            x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.final_layer_norm(x)))


class ExtMBartPreTrainedModel(ExtPreTrainedModel):
    """Base of all mBART classes."""

    config: ExtMBartConfig
    base_model_prefix = "model"
    _no_split_modules = ["ExtMBartEncoderLayer", "ExtMBartDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = ["encoder.version", "decoder.version"]  # marks that fairseq left in old files


class ExtMBartHalf:
    """The norm after the last block. A mixin before BART's halves."""

    def __init__(self, config: ExtMBartConfig) -> None:
        super().__init__(config)
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.post_init()

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.layer_norm(hidden_states)


class ExtMBartEncoder(ExtMBartPreTrainedModel, ExtMBartHalf, ExtBartEncoder):
    """The encoder."""

    block_class = ExtMBartEncoderLayer
    _can_record_outputs = {"hidden_states": ExtMBartEncoderLayer, "attentions": ExtBartAttention}


class ExtMBartDecoder(ExtMBartPreTrainedModel, ExtMBartHalf, ExtBartDecoder):
    """The decoder."""

    block_class = ExtMBartDecoderLayer
    _can_record_outputs = {
        "hidden_states": ExtMBartDecoderLayer,
        "attentions": ExtBartAttention,
        "cross_attentions": ExtBartCrossAttention,
    }


INPUTS = (
    *("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "encoder_outputs"),
    *("past_key_values", "inputs_embeds", "decoder_inputs_embeds"),
)


@positional(*INPUTS, "use_cache", "return_dict")
class ExtMBartModel(ExtMBartPreTrainedModel, ExtBartModel):
    """The bare encoder-decoder."""

    encoder_class = ExtMBartEncoder
    decoder_class = ExtMBartDecoder

    def decoder_inputs_from(self, ids: Tensor) -> Tensor:
        """(B, T) -> (B, T): shifted right by one, and the last token of each row, the language's, goes in front."""
        pad = self.config.pad_token_id
        if pad is None:
            raise ValueError("the decoder's input is made from the labels, which needs pad_token_id: set it.")
        ids = ids.masked_fill(ids == IGNORE_INDEX, pad)
        last = (ids != pad).sum(1, keepdim=True) - 1
        return torch.cat([ids.gather(1, last.clamp(min=0)), ids[:, :-1]], dim=1)


@positional(*INPUTS, "labels", "use_cache", "return_dict")
class ExtMBartForConditionalGeneration(ExtMBartPreTrainedModel, ExtBartForConditionalGeneration, GenerationMixin):
    """Generation of one text from another: translation above all."""

    model_class = ExtMBartModel


class ExtMBartForSequenceClassification(ExtMBartPreTrainedModel, ExtBartForSequenceClassification):
    """Single label, several labels, or regression, on the decoder's last end token."""

    model_class = ExtMBartModel


class ExtMBartForQuestionAnswering(ExtMBartPreTrainedModel, ExtBartForQuestionAnswering):
    """Start and end of an answer."""

    model_class = ExtMBartModel


class ExtMBartDecoderWrapper(ExtMBartPreTrainedModel, ExtBartDecoderWrapper):
    """Gives the decoder on its own the name that it has in the files of the whole model."""

    decoder_class = ExtMBartDecoder


class ExtMBartForCausalLM(ExtMBartPreTrainedModel, ExtBartForCausalLM, GenerationMixin):
    """The decoder on its own, with a vocabulary head."""

    model_class = ExtMBartDecoderWrapper
