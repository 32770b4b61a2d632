"""T5: Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer (Raffel et al., 2019,
https://arxiv.org/abs/1910.10683).

Official checkpoints: google-t5/t5-small, google/t5-v1_1-base, google/flan-t5-xl, and every `model_type: t5` file. An
encoder-decoder, pre-LN, without any bias of a linear layer: RMS norm, scores that are not scaled, and learned biases of
the scores for the distance of two tokens, one table for all layers of a half. T5 1.1 has a gated feed-forward (Shazeer,
2020, https://arxiv.org/abs/2002.05202) and a head of its own.

Shapes: B batch, S encoder tokens, T tokens, K keys, H heads, D head width, C model width, F inner width, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import TaskLinear, TokenClassificationModel
from hf_ext.layers.attention import CrossAttentionCore
from hf_ext.layers.embeddings import look_up
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.norms import RMSNorm
from hf_ext.layers.packing import CrossPacking
from hf_ext.layers.positions import RelativeBias, RelativeBuckets
from hf_ext.layers.relative import BiasedAttentionCore
from hf_ext.layers.residual import cut_infinite
from hf_ext.modeling import BiasedDecoderModel, BiasedEncoderModel, ExtPreTrainedModel, positional
from hf_ext.models.t5.configuration_t5 import ExtT5Config
from hf_ext.seq2seq import (
    EncoderDecoderModel,
    EndTokenClassificationModel,
    Seq2SeqLMModel,
    Seq2SeqQuestionAnsweringModel,
    SequenceDecoder,
    SequenceEncoder,
)


def with_std(layer: nn.Module, std: float) -> nn.Module:
    """The layer, with the standard deviation of its initial weights."""
    layer.init_std = std
    return layer


def projection(config: ExtT5Config, rows: int, columns: int, *, fan: int | None = None) -> nn.Linear:
    """rows -> columns, without bias; initial weights of `fan` ** -0.5, by default the rows."""
    layer = nn.Linear(rows, columns, bias=False)
    return with_std(layer, config.initializer_factor * (fan or rows) ** -0.5)


class ExtT5LayerNorm(RMSNorm):
    """RMS norm. The output has the type of the weight: in fp16 the residual stream is fp32 (`ExtT5DenseActDense`)."""

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config.d_model, eps=config.layer_norm_epsilon)
        self.initial = config.initializer_factor

    def reset_buffers(self) -> None:
        """The initial weight, where no file has filled it."""
        init.constant_(self.weight, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        if self.weight.dtype == torch.float32:
            return super().forward(x)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(self.weight.dtype)


class ExtT5Attention:
    """What both kinds of attention share: scores that are not scaled, projections without biases. A mixin before an
    attention core."""

    def __init__(self, config: ExtT5Config, layer_idx: int, *, is_causal: bool) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_heads,
            head_dim=config.d_kv,
            is_causal=is_causal,
            dropout=config.dropout_rate,
            scaling=1.0,
        )
        width, inner = config.d_model, config.num_heads * config.d_kv
        self.q = projection(config, width, inner, fan=width * config.d_kv)  # the scaling is in the initial weights
        self.k = projection(config, width, inner)
        self.v = projection(config, width, inner)
        self.o = projection(config, inner, width)


class ExtT5SelfAttention(ExtT5Attention, BiasedAttentionCore):
    """Self-attention, causal in the decoder. The first layer holds the biases of all."""

    def __init__(self, config: ExtT5Config, layer_idx: int, *, is_causal: bool) -> None:
        super().__init__(config, layer_idx, is_causal=is_causal)
        if layer_idx == 0:
            table = RelativeBias(config.relative_attention_num_buckets, config.num_heads)
            self.relative_attention_bias = with_std(table, config.initializer_factor * config.d_model**-0.5)

    def forward(self, x: Tensor, position_bias: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), what `BiasedAttentionCore` adds to the scores -> (B, T, C), weights (B, H, T, K) or None"""
        mixed, weights = self.attend(self.q(x), self.k(x), self.v(x), position_bias=position_bias, **kwargs)
        return self.o(mixed), weights


class ExtT5CrossAttention(ExtT5Attention, CrossAttentionCore):
    """Attention of the decoder over the encoder's output, without positions."""

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(encoder_hidden_states), self.v(encoder_hidden_states)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), (B, S, C) -> (B, T, C), weights (B, H, T, S) or None"""
        mixed, weights = self.attend_encoder(self.q(x), encoder_hidden_states, **kwargs)
        return self.o(mixed), weights


class ExtT5DenseActDense(nn.Module):
    """wo(act(wi(x))), the feed-forward of T5 1.0. The library keeps `wo` of a model in fp16 in fp32: large numbers
    overflow there."""

    inner_names = ("wi",)

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__()
        for name in self.inner_names:
            self.add_module(name, projection(config, config.d_model, config.d_ff))
        self.wo = projection(config, config.d_ff, config.d_model)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.act = make_activation(config.dense_act_fn)

    def inner(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, F)"""
        return self.act(self.wi(x))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(B, T, C) -> (B, T, C), None"""
        x = self.widen(self.inner(x))
        return self.wo(self.dropout(x) if self.training else x), None

    def widen(self, x: Tensor) -> Tensor:
        """As it is, in the type of `wo`, unless that is quantised: its weights are integers then."""
        kept = self.wo.weight.dtype
        return x.to(kept) if kept.is_floating_point else x


class ExtT5DenseGatedActDense(ExtT5DenseActDense):
    """wo(act(wi_0(x)) * wi_1(x)), the feed-forward of T5 1.1. In fp16 the product would overflow before `wo` does."""

    inner_names = ("wi_0", "wi_1")

    def inner(self, x: Tensor) -> Tensor:
        return cut_infinite(self.widen(self.act(self.wi_0(x))) * self.wi_1(x))


class ExtT5Layer(nn.Module):
    """x + dropout(inner(norm(x))).

    Args:
        inner: one module, under the name that it has in the checkpoint.
    """

    def __init__(self, config: ExtT5Config, **inner: nn.Module) -> None:
        super().__init__()
        (self.inner_name,) = inner
        self.add_module(self.inner_name, inner[self.inner_name])
        self.layer_norm = ExtT5LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)

    def forward(self, x: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C); `args` and `kwargs` are for the inner module."""
        update, _ = getattr(self, self.inner_name)(self.layer_norm(x), *args, **kwargs)
        return cut_infinite(x + (self.dropout(update) if self.training else update))  # a call less in decoding


class ExtT5Block(GradientCheckpointingLayer):
    """Self-attention, in the decoder cross-attention, feed-forward."""

    def __init__(self, config: ExtT5Config, layer_idx: int, *, is_decoder: bool) -> None:
        super().__init__()
        attention = ExtT5SelfAttention(config, layer_idx, is_causal=is_decoder)
        self.layer = nn.ModuleList([ExtT5Layer(config, SelfAttention=attention)])
        if is_decoder:
            attention = ExtT5CrossAttention(config, layer_idx, is_causal=False)
            self.layer.append(ExtT5Layer(config, EncDecAttention=attention))
        feed_forward = (ExtT5DenseGatedActDense if config.is_gated_act else ExtT5DenseActDense)(config)
        self.layer.append(ExtT5Layer(config, DenseReluDense=feed_forward))

    def forward(
        self,
        x: Tensor,
        position_bias: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        encoder_attention_mask: Tensor | None = None,
        encoder_packing: CrossPacking | None = None,
        past_key_values: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        """(B, T, C), biases, encoder's output (B, S, C), or (1, N, C) with `encoder_packing` -> (B, T, C)"""
        x = self.layer[0](x, position_bias, past_key_values=past_key_values, **kwargs)
        if encoder_hidden_states is not None:
            read = {"attention_mask": encoder_attention_mask, "packing": encoder_packing}
            x = self.layer[1](x, encoder_hidden_states, past_key_values=past_key_values, **read)
        return self.layer[-1](x)


class ExtT5PreTrainedModel(ExtPreTrainedModel):
    """Base of all T5 classes."""

    config: ExtT5Config
    base_model_prefix = "transformer"
    _supports_flash_attn = False  # its kernels add nothing to the scores
    _no_split_modules = ["RelativeBias", "ExtT5Block"]
    _keep_in_fp32_modules = ["wo"]
    # Of T5 1.0 on the Hub: a table that was never used.
    _keys_to_ignore_on_load_unexpected = ["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"]

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """As the library's; `tie_word_embeddings` is about the head only, the halves share one table of words."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        tied = dict(self._tied_weights_keys or {})
        if not self.config.tie_word_embeddings:
            tied.pop("lm_head.weight", None)
        return tied


def word_embeddings(config: ExtT5Config) -> nn.Embedding:
    """The table (V, C) of the words."""
    return with_std(nn.Embedding(config.vocab_size, config.d_model), config.initializer_factor)


class ExtT5Half:
    """What both halves share: words, blocks, norm, dropout at both ends. A mixin before the block stack."""

    is_decoder: bool

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.embed_tokens = word_embeddings(config)
        layers = config.num_decoder_layers if self.is_decoder else config.num_layers
        self.block = nn.ModuleList(ExtT5Block(config, i, is_decoder=self.is_decoder) for i in range(layers))
        self.final_layer_norm = ExtT5LayerNorm(config)
        self.dropout = nn.Dropout(config.dropout_rate)
        self.relative = RelativeBuckets(
            num_buckets=config.relative_attention_num_buckets,
            max_distance=config.relative_attention_max_distance,
            is_causal=self.is_decoder,
        )
        self.post_init()

    def embed(self, *, input_ids: Tensor | None, inputs_embeds: Tensor | None, **unused: object) -> Tensor:
        if inputs_embeds is None:
            inputs_embeds = look_up(self.embed_tokens, input_ids, name="input_ids", limit_name="vocab_size")
        return self.dropout(inputs_embeds)

    def blocks(self) -> nn.ModuleList:
        return self.block

    def final_norm(self, hidden_states: Tensor) -> Tensor:
        return self.dropout(self.final_layer_norm(hidden_states))

    def adds_bias(self) -> bool:
        return len(self.block) > 0

    def position_bias(self, **place: object) -> Tensor:
        return self.relative.bias(self.block[0].layer[0].SelfAttention.relative_attention_bias, **place)


class ExtT5Encoder(ExtT5Half, BiasedEncoderModel, SequenceEncoder, ExtT5PreTrainedModel):
    """The encoder."""

    is_decoder = False
    _can_record_outputs = {"hidden_states": ExtT5Block, "attentions": ExtT5SelfAttention}


class ExtT5Decoder(ExtT5Half, BiasedDecoderModel, SequenceDecoder, ExtT5PreTrainedModel):
    """The decoder."""

    is_decoder = True
    _can_record_outputs = {
        "hidden_states": ExtT5Block,
        "attentions": ExtT5SelfAttention,
        "cross_attentions": ExtT5CrossAttention,
    }


class ExtT5Halves:
    """The table of words, the encoder and the decoder, which official files hold side by side with a head. A mixin
    before the head, `EncoderDecoderModel` and `ExtT5PreTrainedModel`."""

    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.shared = word_embeddings(config)
        self.encoder = ExtT5Encoder(config)
        self.decoder = ExtT5Decoder(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.shared = self.encoder.embed_tokens = self.decoder.embed_tokens = value

    def default_decoder_ids(self, input_ids: Tensor | None) -> Tensor:
        """A text that is to be classified is read by both halves: (B, S) -> (B, S), shifted right."""
        return super().default_decoder_ids(None) if input_ids is None else self.decoder_inputs_from(input_ids)

    def run_base(self, **inputs: object) -> ModelOutput:
        """For heads: the base model is not a module of its own."""
        return EncoderDecoderModel.forward(self, return_dict=True, **inputs)


class ExtT5Model(ExtT5Halves, EncoderDecoderModel, ExtT5PreTrainedModel):
    """The bare encoder-decoder."""

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.post_init()


class ExtT5ForConditionalGeneration(
    ExtT5Halves, Seq2SeqLMModel, EncoderDecoderModel, ExtT5PreTrainedModel, GenerationMixin
):
    """Generation of one text from another."""

    _tied_weights_keys = {**ExtT5Halves._tied_weights_keys, "lm_head.weight": "shared.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.lm_head = with_std(nn.Linear(config.d_model, config.vocab_size, bias=False), config.initializer_factor)
        self.post_init()

    def tie_weights(self, missing_keys: set[str] | None = None, **kwargs: object) -> None:
        """As the library's, and a file with a head of its own keeps it: the stock configuration says
        `tie_word_embeddings` of T5 1.1 too."""
        both = (self.lm_head.weight, self.shared.weight)
        loaded = missing_keys is not None and not missing_keys & {"lm_head.weight", "shared.weight"}
        if loaded and self.config.tie_word_embeddings and both[0].device.type != "meta" and not torch.equal(*both):
            self.config.tie_word_embeddings = False
            self.all_tied_weights_keys.pop("lm_head.weight", None)
        super().tie_weights(missing_keys=missing_keys, **kwargs)

    def default_decoder_ids(self, input_ids: Tensor | None) -> Tensor:
        """None: an answer is not the question."""
        return EncoderDecoderModel.default_decoder_ids(self, input_ids)

    def hidden_transform(self) -> Callable[[Tensor], Tensor] | None:
        return self.scale if self.config.scale_decoder_outputs else None

    def scale(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C): the table of words has entries of about 1, a head has to have smaller ones."""
        return hidden_states * self.config.d_model**-0.5


class ExtT5ForQuestionAnswering(ExtT5Halves, Seq2SeqQuestionAnsweringModel, EncoderDecoderModel, ExtT5PreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        head = TaskLinear(config.d_model, config.num_labels)
        self.qa_outputs = with_std(head, config.initializer_factor * config.d_model**-0.5)
        self.post_init()


@positional("input_ids", "attention_mask", "inputs_embeds")
class ExtT5EncoderModel(ExtT5PreTrainedModel):
    """The encoder on its own."""

    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = ["decoder"]

    def __init__(self, config: ExtT5Config) -> None:
        config.use_cache = config.is_encoder_decoder = False
        super().__init__(config)
        self.shared = word_embeddings(config)
        self.encoder = ExtT5Encoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.shared

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.shared = self.encoder.embed_tokens = value

    def blocks(self) -> nn.ModuleList:
        """The encoder's blocks."""
        return self.encoder.blocks()

    def forward(self, input_ids: Tensor | None = None, **kwargs: object) -> ModelOutput:
        """As the encoder's."""
        return self.encoder(input_ids, **kwargs)


class ExtT5ClassificationHead(nn.Module):
    """dropout, dense, tanh, dropout, projection."""

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__()
        std = config.initializer_factor * config.d_model**-0.5
        self.dense = with_std(TaskLinear(config.d_model, config.d_model), std)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = with_std(TaskLinear(config.d_model, config.num_labels), std)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C) -> (B, num_labels)"""
        return self.out_proj(self.dropout(self.dense(self.dropout(x)).tanh()))


class ExtT5ForSequenceClassification(EndTokenClassificationModel, ExtT5PreTrainedModel):
    """Single label, several labels, or regression, on the decoder's last end token."""

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtT5Model(config)
        self.classification_head = ExtT5ClassificationHead(config)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classification_head(hidden_states)


@positional("input_ids", "attention_mask", "inputs_embeds", "labels")
class ExtT5ForTokenClassification(TokenClassificationModel, ExtT5PreTrainedModel):
    """A label per token of the encoder."""

    def __init__(self, config: ExtT5Config) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.transformer = ExtT5EncoderModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = with_std(TaskLinear(config.d_model, config.num_labels), config.initializer_factor)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))
