"""BART: Denoising Sequence-to-Sequence Pre-training (Lewis et al., 2019, https://arxiv.org/abs/1910.13461).

Official checkpoints: facebook/bart-base, facebook/bart-large-cnn, and every `model_type: bart` file. The
encoder-decoder of the 2017 paper, post-LN, with GELU, learned positions and a LayerNorm after the embedding; one table
of words for the encoder, the decoder and the head.

Shapes: B batch, S encoder tokens, T tokens of either half, C model width, F feed-forward width, V vocabulary.
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ext.heads import TaskLinear
from hf_ext.layers.attention import AttentionCore, CrossAttentionCore
from hf_ext.layers.embeddings import ScaledEmbedding, look_up, look_up_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.norms import keep_finite
from hf_ext.layers.packing import CrossPacking
from hf_ext.modeling import ExtPreTrainedModel
from hf_ext.models.bart.configuration_bart import ExtBartConfig
from hf_ext.seq2seq import (
    EncoderDecoderModel,
    EndTokenClassificationModel,
    FinalLogitsBias,
    Seq2SeqLMModel,
    Seq2SeqQuestionAnsweringModel,
    SequenceDecoder,
    SequenceDecoderLMModel,
    SequenceEncoder,
)

FIRST_POSITION = 2  # the rows before are a trace of the padding id, as in fairseq


class ExtBartAttention(AttentionCore):
    """Multi-head self-attention, causal in the decoder."""

    def __init__(self, config: ExtBartConfig, layer_idx: int, *, num_heads: int, is_causal: bool) -> None:
        width = config.d_model
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=num_heads,
            head_dim=width // num_heads,
            is_causal=is_causal,
            dropout=config.attention_dropout,
        )
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        return self.out_proj(mixed), weights


class ExtBartCrossAttention(CrossAttentionCore):
    """Attention of the decoder over the encoder's output."""

    def __init__(self, config: ExtBartConfig, layer_idx: int, *, num_heads: int) -> None:
        width = config.d_model
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=num_heads,
            head_dim=width // num_heads,
            is_causal=False,
            dropout=config.attention_dropout,
        )
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_proj(encoder_hidden_states), self.v_proj(encoder_hidden_states)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), (B, S, C) -> (B, T, C), weights (B, H, T, S) or None"""
        mixed, weights = self.attend_encoder(self.q_proj(x), encoder_hidden_states, **kwargs)
        return self.out_proj(mixed), weights


class ExtBartEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then feed-forward; each adds and normalises."""

    def __init__(self, config: ExtBartConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = ExtBartAttention(config, layer_idx, num_heads=config.encoder_attention_heads, is_causal=False)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_fn = make_activation(config.activation_function)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.fc1 = nn.Linear(config.d_model, config.encoder_ffn_dim)
        self.fc2 = nn.Linear(config.encoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.fc2(self.activation_dropout(self.activation_fn(self.fc1(x))))

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, **kwargs)[0]))
        return keep_finite(self.final_layer_norm(x + self.dropout(self.feed_forward(x))))


class ExtBartDecoderLayer(GradientCheckpointingLayer):
    """Causal self-attention, cross-attention where there is an encoder, feed-forward; each adds and normalises."""

    def __init__(self, config: ExtBartConfig, layer_idx: int) -> None:
        super().__init__()
        heads = config.decoder_attention_heads
        self.self_attn = ExtBartAttention(config, layer_idx, num_heads=heads, is_causal=True)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_fn = make_activation(config.activation_function)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.encoder_attn = ExtBartCrossAttention(config, layer_idx, num_heads=heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1 = nn.Linear(config.d_model, config.decoder_ffn_dim)
        self.fc2 = nn.Linear(config.decoder_ffn_dim, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        return self.fc2(self.activation_dropout(self.activation_fn(self.fc1(x))))

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
        attended, _ = self.self_attn(x, past_key_values=past_key_values, **kwargs)
        x = self.self_attn_layer_norm(x + self.dropout(attended))
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                x,
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                packing=encoder_packing,
                past_key_values=past_key_values,
            )
            x = self.encoder_attn_layer_norm(x + self.dropout(attended))
        return self.final_layer_norm(x + self.dropout(self.feed_forward(x)))


class ExtBartPreTrainedModel(ExtPreTrainedModel):
    """Base of all BART classes."""

    config: ExtBartConfig
    base_model_prefix = "model"
    _no_split_modules = ["ExtBartEncoderLayer", "ExtBartDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = ["encoder.version", "decoder.version"]  # marks that fairseq left in old files


def word_embeddings(config: ExtBartConfig) -> ScaledEmbedding:
    """The table (V, C) of the words, scaled by the root of the width if the configuration says so."""
    scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
    return ScaledEmbedding(config.vocab_size, config.d_model, config.pad_token_id, scale=scale)


class ExtBartHalf:
    """What the encoder and the decoder share: words + positions, then LayerNorm and dropout; a list of blocks. A mixin
    before the block stack."""

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.embed_tokens = word_embeddings(config)
        self.embed_positions = nn.Embedding(config.max_position_embeddings + FIRST_POSITION, config.d_model)
        self.layernorm_embedding = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def embed(
        self,
        *,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        past_length: int | Tensor,
        **unused: object,
    ) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.embed_tokens, input_ids, name="input_ids", limit_name="vocab_size")
        positions = look_up_positions(
            self.embed_positions,
            position_ids,
            tokens=inputs_embeds.shape[1],
            past_length=past_length,
            device=inputs_embeds.device,
            limit_name="max_position_embeddings",
            offset=FIRST_POSITION,
        )
        return self.dropout(self.layernorm_embedding(inputs_embeds + positions))

    def blocks(self) -> nn.ModuleList:
        return self.layers


class ExtBartEncoder(ExtBartHalf, SequenceEncoder, ExtBartPreTrainedModel):
    """The encoder."""

    block_class = ExtBartEncoderLayer
    _can_record_outputs = {"hidden_states": ExtBartEncoderLayer, "attentions": ExtBartAttention}

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.layer_drop = config.encoder_layerdrop
        self.layers = nn.ModuleList(self.block_class(config, i) for i in range(config.encoder_layers))
        self.post_init()


class ExtBartDecoder(ExtBartHalf, SequenceDecoder, ExtBartPreTrainedModel):
    """The decoder."""

    block_class = ExtBartDecoderLayer
    _can_record_outputs = {
        "hidden_states": ExtBartDecoderLayer,
        "attentions": ExtBartAttention,
        "cross_attentions": ExtBartCrossAttention,
    }

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.layer_drop = config.decoder_layerdrop
        self.layers = nn.ModuleList(self.block_class(config, i) for i in range(config.decoder_layers))
        self.post_init()


class ExtBartModel(EncoderDecoderModel, ExtBartPreTrainedModel):
    """The bare encoder-decoder. Without an input of its own the decoder reads the encoder's, shifted right: the
    denoising task of the paper, and how the whole model reads a text that is to be classified."""

    encoder_class = ExtBartEncoder
    decoder_class = ExtBartDecoder
    _tied_weights_keys = {
        "decoder.embed_tokens.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.shared = word_embeddings(config)
        self.encoder = self.encoder_class(config)
        self.decoder = self.decoder_class(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.shared if self.config.tie_word_embeddings else self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.shared = self.decoder.embed_tokens = value
        else:  # three tables, of one size
            for table in (self.shared, self.decoder.embed_tokens):
                self._get_resized_embeddings(table, value.num_embeddings, mean_resizing=False)

    def default_decoder_ids(self, input_ids: Tensor | None) -> Tensor:
        return super().default_decoder_ids(None) if input_ids is None else self.decoder_inputs_from(input_ids)


class ExtBartForConditionalGeneration(FinalLogitsBias, Seq2SeqLMModel, ExtBartPreTrainedModel, GenerationMixin):
    """Generation of one text from another: summaries, translations, text with its gaps filled."""

    model_class = ExtBartModel
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.final_logits_bias = nn.Buffer(torch.zeros(1, config.vocab_size))
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()


class ExtBartClassificationHead(nn.Module):
    """dropout, dense, tanh, dropout, projection."""

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__()
        self.dense = TaskLinear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = TaskLinear(config.d_model, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) -> (B, num_labels)"""
        return self.out_proj(self.dropout(self.dense(self.dropout(x)).tanh()))


class ExtBartForSequenceClassification(EndTokenClassificationModel, ExtBartPreTrainedModel):
    """Single label, several labels, or regression, on the decoder's last end token."""

    model_class = ExtBartModel

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.classification_head = ExtBartClassificationHead(config)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classification_head(hidden_states)


class ExtBartForQuestionAnswering(Seq2SeqQuestionAnsweringModel, ExtBartPreTrainedModel):
    """Start and end of an answer."""

    model_class = ExtBartModel

    def __init__(self, config: ExtBartConfig) -> None:
        config.num_labels = 2
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = self.model_class(config)
        self.qa_outputs = TaskLinear(config.d_model, config.num_labels)
        self.post_init()


class ExtBartDecoderWrapper(ExtBartPreTrainedModel):
    """Gives the decoder on its own the name that it has in the files of the whole model."""

    decoder_class = ExtBartDecoder

    def __init__(self, config: ExtBartConfig) -> None:
        super().__init__(config)
        self.decoder = self.decoder_class(config)
        self.post_init()

    def forward(self, *args: object, **kwargs: object) -> object:
        """As the decoder's."""
        return self.decoder(*args, **kwargs)

    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return self.decoder.blocks()


class ExtBartForCausalLM(SequenceDecoderLMModel, ExtBartPreTrainedModel, GenerationMixin):
    """The decoder on its own, with a vocabulary head."""

    model_class = ExtBartDecoderWrapper
    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtBartConfig) -> None:
        config = copy.deepcopy(config)  # the caller's may be shared with a model that has both halves
        config.is_decoder, config.is_encoder_decoder = True, False
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.embed_tokens = value
