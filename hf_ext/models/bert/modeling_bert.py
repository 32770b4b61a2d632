"""BERT: Pre-training of Deep Bidirectional Transformers (Devlin et al., 2018, https://arxiv.org/abs/1810.04805).

Official checkpoints: google-bert/bert-base-uncased and every `model_type: bert` file. Post-LN blocks, learned
positions, segment embeddings, and a pooler over the first token that was trained by next-sentence prediction.

Shapes: B batch, T tokens, C model width, F feed-forward width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import (
    CrossAttendingLMModel,
    MaskedLMModel,
    MultipleChoiceModel,
    NextSentencePredictionModel,
    PreTrainingModel,
    QuestionAnsweringModel,
    SequenceClassificationModel,
    TaskLinear,
    TokenClassificationModel,
    VocabularyHead,
    classifier_dropout,
)
from hf_ext.layers.attention import AttentionCore, CrossAttentionCore
from hf_ext.layers.embeddings import look_up, look_up_positions
from hf_ext.layers.feedforward import activation
from hf_ext.modeling import EncoderModel, ExtPreTrainedModel
from hf_ext.models.bert.configuration_bert import ExtBertConfig


class ExtBertEmbeddings(nn.Module):
    """Word + segment + learned position, then LayerNorm and dropout (figure 2 of the paper)."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        past_length: int,
    ) -> Tensor:
        """(B, T) ids or (B, T, C) embeddings -> (B, T, C)"""
        if inputs_embeds is None:
            inputs_embeds = look_up(self.word_embeddings, input_ids, name="input_ids", limit_name="vocab_size")
        positions = look_up_positions(
            self.position_embeddings,
            position_ids,
            tokens=inputs_embeds.shape[1],
            past_length=past_length,
            device=inputs_embeds.device,
            limit_name="max_position_embeddings",
        )
        if token_type_ids is None:
            segments = self.token_type_embeddings.weight[0]
        else:
            segments = look_up(
                self.token_type_embeddings, token_type_ids, name="token_type_ids", limit_name="type_vocab_size"
            )
        return self.finish(inputs_embeds + segments + positions)

    def finish(self, x: Tensor) -> Tensor:
        """What follows the sum, (B, T, C) -> (B, T, C)."""
        return self.dropout(self.LayerNorm(x))


class ExtBertSelfAttention(AttentionCore):
    """Multi-head self-attention; causal when the model is a decoder."""

    def __init__(self, config: ExtBertConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            is_causal=config.is_decoder,
            dropout=config.attention_probs_dropout_prob,
        )
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        return self.attend(self.query(x), self.key(x), self.value(x), **kwargs)


class ExtBertCrossAttention(CrossAttentionCore):
    """Attention of a decoder over an encoder's output."""

    def __init__(self, config: ExtBertConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            is_causal=False,
            dropout=config.attention_probs_dropout_prob,
        )
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def project_encoder(self, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return self.key(encoder_hidden_states), self.value(encoder_hidden_states)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        return self.attend_encoder(self.query(x), encoder_hidden_states, **kwargs)


class ExtBertAddNorm(nn.Module):
    """LayerNorm(residual + Dropout(dense(x))): how every sub-layer of a post-LN block ends."""

    def __init__(self, config: ExtBertConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """(B, T, width), (B, T, C) -> (B, T, C)"""
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class ExtBertAttention(nn.Module):
    """Attention and the residual line around it."""

    def __init__(self, config: ExtBertConfig, attention: AttentionCore) -> None:
        super().__init__()
        self.self = attention
        self.output = ExtBertAddNorm(config, config.hidden_size)

    def forward(self, x: Tensor, *args: Tensor, **kwargs: object) -> Tensor:
        return self.output(self.self(x, *args, **kwargs)[0], x)


class ExtBertIntermediate(nn.Module):
    """First half of the feed-forward, C -> F."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class ExtBertLayer(GradientCheckpointingLayer):
    """One block: self-attention, cross-attention in a decoder that has it, feed-forward; each adds and normalises."""

    self_attention_class = ExtBertSelfAttention
    cross_attention_class = ExtBertCrossAttention

    def __init__(self, config: ExtBertConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = ExtBertAttention(config, self.self_attention_class(config, layer_idx))
        if config.add_cross_attention:
            self.crossattention = ExtBertAttention(config, self.cross_attention_class(config, layer_idx))
        self.intermediate = ExtBertIntermediate(config)
        self.output = ExtBertAddNorm(config, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        encoder_hidden_states: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        packing: object = None,
        **kwargs: object,
    ) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.attention(x, attention_mask=attention_mask, past_key_values=past_key_values, packing=packing, **kwargs)
        if encoder_hidden_states is not None:
            x = self.crossattention(
                x,
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return self.output(self.intermediate(x), x)


class ExtBertEncoder(nn.Module):
    """Holds the blocks under the checkpoint's name; `EncoderModel` runs them."""

    layer_class = ExtBertLayer

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))


class ExtBertPooler(nn.Module):
    """tanh(dense(first token)), trained by next-sentence prediction."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, C)"""
        return self.activation(self.dense(hidden_states[:, 0]))


class ExtBertPreTrainedModel(ExtPreTrainedModel):
    """Base of all BERT classes."""

    config: ExtBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ["ExtBertEmbeddings", "ExtBertLayer"]
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids"]  # older official files carry this buffer
    _can_record_outputs = {
        "hidden_states": ExtBertLayer,
        "attentions": ExtBertSelfAttention,
        "cross_attentions": ExtBertCrossAttention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ExtBertLMPredictionHead):
            torch.nn.init.zeros_(module.bias)  # guarded by the library while it initialises


class ExtBertModel(EncoderModel, ExtBertPreTrainedModel):
    """The bare encoder; a decoder with `is_decoder=True`.

    Args:
        config: the configuration.
        add_pooling_layer: whether to build the pooler.
    """

    embeddings_class = ExtBertEmbeddings
    encoder_class = ExtBertEncoder
    pooler_class = ExtBertPooler

    def __init__(self, config: ExtBertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = self.embeddings_class(config)
        self.encoder = self.encoder_class(config)
        self.pooler = self.pooler_class(config) if add_pooling_layer else None
        self.reads_first_token = add_pooling_layer
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    def embed(self, **inputs: Tensor | int | None) -> Tensor:
        return self.embeddings(**inputs)

    def blocks(self) -> nn.ModuleList:
        return self.encoder.layer

    def pool(self, hidden_states: Tensor) -> Tensor | None:
        return self.pooler(hidden_states) if self.pooler is not None else None


class ExtBertPredictionHeadTransform(nn.Module):
    """dense, activation, LayerNorm: what precedes the output embedding."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class ExtBertLMPredictionHead(nn.Module):
    """Transform, then the word embeddings used backwards, with a bias of their own."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__()
        self.transform = ExtBertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the same tensor as decoder.bias when tied

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., V)"""
        return self.decoder(self.transform(hidden_states))


class ExtBertHeads(nn.Module):
    """The pre-training heads under their official names: masked LM, next sentence, or both."""

    def __init__(self, config: ExtBertConfig, *, predictions: bool, next_sentence: bool) -> None:
        super().__init__()
        if predictions:
            self.predictions = ExtBertLMPredictionHead(config)
        if next_sentence:
            self.seq_relationship = TaskLinear(config.hidden_size, 2)


class ExtBertVocabularyHead(VocabularyHead):
    """Where BERT's language-modelling classes keep their output embedding."""

    _tied_weights_keys = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def hidden_transform(self) -> nn.Module:
        return self.cls.predictions.transform

    def get_output_embeddings(self) -> nn.Module:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.cls.predictions.decoder = new_embeddings
        bias = new_embeddings.bias
        # Untied, the file holds the bias twice; one tensor under both names would be saved under one of them.
        self.cls.predictions.bias = bias if self.config.tie_word_embeddings else nn.Parameter(bias.detach().clone())


class ExtBertForPreTraining(ExtBertVocabularyHead, PreTrainingModel, ExtBertPreTrainedModel):
    """Both pre-training objectives at once: masked LM and next-sentence prediction."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.bert = ExtBertModel(config)
        self.cls = ExtBertHeads(config, predictions=True, next_sentence=True)
        self.loss_type = "ForMaskedLM"  # tells Trainer that labels are not shifted when it counts them
        self.post_init()

    def classify_pair(self, outputs: ModelOutput) -> Tensor:
        return self.cls.seq_relationship(outputs.pooler_output)


class ExtBertForMaskedLM(ExtBertVocabularyHead, MaskedLMModel, ExtBertPreTrainedModel):
    """Masked language modelling."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.bert = ExtBertModel(config, add_pooling_layer=False)
        self.cls = ExtBertHeads(config, predictions=True, next_sentence=False)
        self.post_init()


class ExtBertLMHeadModel(ExtBertVocabularyHead, CrossAttendingLMModel, ExtBertPreTrainedModel, GenerationMixin):
    """Next-token prediction by BERT blocks used as a decoder (`is_decoder=True`)."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.bert = ExtBertModel(config, add_pooling_layer=False)
        self.cls = ExtBertHeads(config, predictions=True, next_sentence=False)
        self.loss_type = "ForCausalLM"
        self.post_init()


class ExtBertForNextSentencePrediction(NextSentencePredictionModel, ExtBertPreTrainedModel):
    """Whether the second segment follows the first."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.bert = ExtBertModel(config)
        self.cls = ExtBertHeads(config, predictions=False, next_sentence=True)
        self.post_init()

    def classify_pair(self, outputs: ModelOutput) -> Tensor:
        return self.cls.seq_relationship(outputs.pooler_output)


class ExtBertForSequenceClassification(SequenceClassificationModel, ExtBertPreTrainedModel):
    """Single label, several labels, or regression, on the pooled first token."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = ExtBertModel(config)
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class ExtBertForMultipleChoice(MultipleChoiceModel, ExtBertPreTrainedModel):
    """The best of several rows."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.bert = ExtBertModel(config)
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, 1)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class ExtBertForTokenClassification(TokenClassificationModel, ExtBertPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = ExtBertModel(config, add_pooling_layer=False)
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


class ExtBertForQuestionAnswering(QuestionAnsweringModel, ExtBertPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = ExtBertModel(config, add_pooling_layer=False)
        self.qa_outputs = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()
