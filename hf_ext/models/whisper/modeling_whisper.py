"""Whisper: Robust Speech Recognition via Large-Scale Weak Supervision (Radford et al., 2022,
https://arxiv.org/abs/2212.04356).

Official checkpoints: openai/whisper-tiny, openai/whisper-large-v3, distil-whisper/distil-large-v3, and every
`model_type: whisper` file. An encoder-decoder of pre-LN blocks. The encoder reads thirty seconds of a log-mel
spectrogram through two convolutions, of which the second halves the frames, and has sinusoidal positions; the decoder
has learned ones, and its table of words is also the head. Keys have no bias.

Shapes: B batch, M mel bins, L frames of the spectrogram, S = L / 2 encoder tokens, T decoder tokens, C model width,
V vocabulary.
"""

import copy
import math

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import TaskLinear
from hf_ext.layers.attention import AttentionCore, CrossAttentionCore
from hf_ext.layers.embeddings import look_up, look_up_positions
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.norms import keep_finite
from hf_ext.modeling import ExtPreTrainedModel, positional
from hf_ext.models.whisper.configuration_whisper import ExtWhisperConfig
from hf_ext.models.whisper.generation_whisper import WhisperGeneration
from hf_ext.seq2seq import SequenceDecoder, SequenceDecoderLMModel
from hf_ext.speech import AudioClassificationModel, SpeechEncoder, SpeechEncoderDecoderModel, SpeechLMModel


class ExtWhisperAttention(AttentionCore):
    """Multi-head self-attention, causal in the decoder."""

    def __init__(self, config: ExtWhisperConfig, layer_idx: int, *, num_heads: int, is_causal: bool) -> None:
        width = config.d_model
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=num_heads,
            head_dim=width // num_heads,
            is_causal=is_causal,
            dropout=config.attention_dropout,
        )
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), **kwargs)
        return self.out_proj(mixed), weights


class ExtWhisperCrossAttention(CrossAttentionCore):
    """Attention of the decoder over the encoder's output."""

    def __init__(self, config: ExtWhisperConfig, layer_idx: int) -> None:
        width, heads = config.d_model, config.decoder_attention_heads
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=heads,
            head_dim=width // heads,
            is_causal=False,
            dropout=config.attention_dropout,
        )
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj, self.q_proj, self.out_proj = (nn.Linear(width, width) for _ in range(3))

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.k_proj(encoder_hidden_states), self.v_proj(encoder_hidden_states)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), (B, S, C) -> (B, T, C), weights (B, H, T, S) or None"""
        mixed, weights = self.attend_encoder(self.q_proj(x), encoder_hidden_states, **kwargs)
        return self.out_proj(mixed), weights


class ExtWhisperLayer(GradientCheckpointingLayer):
    """What the blocks of both halves share: self-attention and a feed-forward layer, each after its norm."""

    def __init__(
        self, config: ExtWhisperConfig, layer_idx: int, *, num_heads: int, inner_width: int, is_causal: bool
    ) -> None:
        super().__init__()
        self.self_attn = ExtWhisperAttention(config, layer_idx, num_heads=num_heads, is_causal=is_causal)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.activation_fn = make_activation(config.activation_function)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.fc1 = nn.Linear(config.d_model, inner_width)
        self.fc2 = nn.Linear(inner_width, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.activation_dropout(self.activation_fn(self.fc1(self.final_layer_norm(x))))
        return self.dropout(self.fc2(x))


class ExtWhisperEncoderLayer(ExtWhisperLayer):
    """Self-attention, feed-forward."""

    def __init__(self, config: ExtWhisperConfig, layer_idx: int) -> None:
        super().__init__(
            config,
            layer_idx,
            num_heads=config.encoder_attention_heads,
            inner_width=config.encoder_ffn_dim,
            is_causal=False,
        )

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        """(B, S, C) -> (B, S, C)"""
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), **kwargs)[0])
        return keep_finite(x + self.feed_forward(x))


class ExtWhisperDecoderLayer(ExtWhisperLayer):
    """Causal self-attention, cross-attention where there is an encoder, feed-forward."""

    def __init__(self, config: ExtWhisperConfig, layer_idx: int) -> None:
        super().__init__(
            config,
            layer_idx,
            num_heads=config.decoder_attention_heads,
            inner_width=config.decoder_ffn_dim,
            is_causal=True,
        )
        self.encoder_attn = ExtWhisperCrossAttention(config, layer_idx)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        x: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        encoder_attention_mask: Tensor | None = None,
        encoder_packing: None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """(B, T, C), encoder's output (B, S, C) -> (B, T, C)"""
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), past_key_values=past_key_values, **kwargs)[0])
        if encoder_hidden_states is not None:
            attended, _ = self.encoder_attn(
                self.encoder_attn_layer_norm(x),
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
            )
            x = x + self.dropout(attended)
        return x + self.feed_forward(x)


class ExtWhisperPreTrainedModel(ExtPreTrainedModel):
    """Base of all Whisper classes."""

    config: ExtWhisperConfig
    base_model_prefix = "model"
    main_input_name = "input_features"
    input_modalities = ("audio", "text")
    _no_split_modules = ["ExtWhisperEncoderLayer", "ExtWhisperDecoderLayer"]

    def freeze_encoder(self) -> None:
        """Leave the encoder as it is in training."""
        self.get_encoder().requires_grad_(False)


class ExtWhisperSinusoids(nn.Embedding):
    """The encoder's positions: fixed, and in the files nevertheless."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__(positions, width)
        self.requires_grad_(False)

    def reset_buffers(self) -> None:
        """Sines in the first half of the columns and cosines in the second, with wavelengths from 2 pi to 20000 pi."""
        positions, width = self.weight.shape
        columns = torch.arange(width // 2, dtype=torch.float64, device=self.weight.device)
        frequencies = torch.exp(-math.log(10000) / (width // 2 - 1) * columns)
        angles = torch.arange(positions, dtype=torch.float64, device=self.weight.device)[:, None] * frequencies
        init.copy_(self.weight, torch.cat([angles.sin(), angles.cos()], dim=1).to(self.weight.dtype))


class ExtWhisperEncoder(SpeechEncoder, ExtWhisperPreTrainedModel):
    """The encoder: spectrograms of the one length that there are positions for."""

    _can_record_outputs = {"hidden_states": ExtWhisperEncoderLayer, "attentions": ExtWhisperAttention}
    input_modalities = ("audio",)
    _input_embed_layer = "conv1"

    def __init__(self, config: ExtWhisperConfig) -> None:
        super().__init__(config)
        self.layer_drop = config.encoder_layerdrop
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.d_model, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.d_model, config.d_model, kernel_size=3, stride=self.stride, padding=1)
        self.embed_positions = ExtWhisperSinusoids(config.max_source_positions, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(ExtWhisperEncoderLayer(config, i) for i in range(config.encoder_layers))
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.post_init()

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.layer_norm(hidden_states)

    def embed(self, *, input_features: Tensor) -> Tensor:
        """(B, M, L) -> (B, S, C)"""
        x = nn.functional.gelu(self.conv1(input_features))
        x = nn.functional.gelu(self.conv2(x)).transpose(1, 2)
        return self.dropout(x + self.embed_positions.weight)


class ExtWhisperDecoder(SequenceDecoder, ExtWhisperPreTrainedModel):
    """The decoder."""

    _can_record_outputs = {
        "hidden_states": ExtWhisperDecoderLayer,
        "attentions": ExtWhisperAttention,
        "cross_attentions": ExtWhisperCrossAttention,
    }
    main_input_name = "input_ids"
    input_modalities = ("text",)

    def __init__(self, config: ExtWhisperConfig) -> None:
        super().__init__(config)
        self.layer_drop = config.decoder_layerdrop
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model, config.pad_token_id)
        self.embed_positions = nn.Embedding(config.max_target_positions, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(ExtWhisperDecoderLayer(config, i) for i in range(config.decoder_layers))
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.post_init()

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
            inputs_embeds = look_up(self.embed_tokens, input_ids, name="decoder_input_ids", limit_name="vocab_size")
        positions = look_up_positions(
            self.embed_positions,
            position_ids,
            tokens=inputs_embeds.shape[1],
            past_length=past_length,
            device=inputs_embeds.device,
            limit_name="max_target_positions",
        )
        return self.dropout(inputs_embeds + positions)

    def blocks(self) -> nn.ModuleList:
        return self.layers

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.layer_norm(hidden_states)


class ExtWhisperModel(SpeechEncoderDecoderModel, ExtWhisperPreTrainedModel):
    """The bare encoder-decoder."""

    def __init__(self, config: ExtWhisperConfig) -> None:
        super().__init__(config)
        self.encoder = ExtWhisperEncoder(config)
        self.decoder = ExtWhisperDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value


class ProjectedOut:
    """A vocabulary head named `proj_out`, with the decoder's table of words. A mixin before the head."""

    _tied_weights_keys = {"proj_out.weight": "model.decoder.embed_tokens.weight"}
    _tp_plan = {"proj_out": "colwise_gather_output"}
    _fsdp_plan = {"proj_out": "keep_full_weight"}

    def get_output_embeddings(self) -> nn.Module:
        return self.proj_out

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.proj_out = value


class ExtWhisperForConditionalGeneration(
    ProjectedOut, WhisperGeneration, SpeechLMModel, ExtWhisperPreTrainedModel, GenerationMixin
):
    """Transcription and translation of speech."""

    def __init__(self, config: ExtWhisperConfig) -> None:
        super().__init__(config)
        self.model = ExtWhisperModel(config)
        self.proj_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()


class ExtWhisperDecoderWrapper(ExtWhisperPreTrainedModel):
    """Gives the decoder on its own the name that it has in the files of the whole model."""

    def __init__(self, config: ExtWhisperConfig) -> None:
        super().__init__(config)
        self.decoder = ExtWhisperDecoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.embed_tokens = value

    def forward(self, *args: object, encoder_outputs: object = None, **kwargs: object) -> object:
        """As the decoder's; encoder_outputs: what an encoder returned, or its hidden states (B, S, C)."""
        if encoder_outputs is not None:
            given = isinstance(encoder_outputs, Tensor)
            kwargs["encoder_hidden_states"] = encoder_outputs if given else encoder_outputs[0]
        return self.decoder(*args, **kwargs)

    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks."""
        return self.decoder.blocks()


@positional("input_ids", "attention_mask", "encoder_outputs", "past_key_values", "inputs_embeds", "labels", "use_cache")
class ExtWhisperForCausalLM(ProjectedOut, SequenceDecoderLMModel, ExtWhisperPreTrainedModel, GenerationMixin):
    """The decoder on its own, with a vocabulary head: it proposes tokens to a larger model that has the same encoder
    (assisted generation)."""

    main_input_name = "input_ids"

    def __init__(self, config: ExtWhisperConfig) -> None:
        config = copy.deepcopy(config)  # the caller's may be shared with a model that has both halves
        config.is_encoder_decoder = False
        super().__init__(config)
        self.model = ExtWhisperDecoderWrapper(config)
        self.proj_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)


class ExtWhisperForAudioClassification(AudioClassificationModel, ExtWhisperPreTrainedModel):
    """Classification of whole clips: the encoder's output, or a weighted sum of all its layers, projected, averaged
    and classified."""

    def __init__(self, config: ExtWhisperConfig) -> None:
        super().__init__(config)
        self.encoder = ExtWhisperEncoder(config)
        if config.use_weighted_layer_sum:  # a weight for each layer, and one for the embeddings
            self.layer_weights = nn.Parameter(torch.empty(config.encoder_layers + 1))
        self.projector = TaskLinear(config.d_model, config.classifier_proj_size)
        self.classifier = TaskLinear(config.classifier_proj_size, config.num_labels)
        self.post_init()

    def reset_buffers(self) -> None:
        """The layers start with equal weights."""
        if self.config.use_weighted_layer_sum:
            init.constant_(self.layer_weights, 1 / len(self.layer_weights))

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)

    def classify(self, outputs: ModelOutput) -> Tensor:
        hidden_states = outputs.last_hidden_state
        if self.config.use_weighted_layer_sum:
            hidden_states = torch.stack(outputs.hidden_states, dim=-1) @ self.layer_weights.softmax(-1)
        return self.classifier(self.projector(hidden_states).mean(dim=1))
