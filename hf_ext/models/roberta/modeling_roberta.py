"""RoBERTa: A Robustly Optimized BERT Pretraining Approach (Liu et al., 2019, https://arxiv.org/abs/1907.11692).

Official checkpoints: FacebookAI/roberta-base, FacebookAI/roberta-large, and every `model_type: roberta` file. BERT's
blocks, trained without next-sentence prediction. Two things differ in the checkpoints, which come from fairseq: the
first token of a row has position `pad_token_id + 1`, with padding left out of the count, and heads have other names.

Shapes: B batch, T tokens, P cached tokens, C model width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput

from hf_ext.heads import (
    CrossAttendingLMModel,
    DenseLMHead,
    DenseVocabularyHead,
    MaskedLMModel,
    MultipleChoiceModel,
    QuestionAnsweringModel,
    SequenceClassificationModel,
    TaskLinear,
    TokenClassificationModel,
    classifier_dropout,
)
from hf_ext.layers.embeddings import positions_after_padding
from hf_ext.modeling import ExtPreTrainedModel, positional
from hf_ext.models.bert.modeling_bert import (
    ExtBertCrossAttention,
    ExtBertEmbeddings,
    ExtBertLayer,
    ExtBertModel,
    ExtBertSelfAttention,
)
from hf_ext.models.roberta.configuration_roberta import ExtRobertaConfig


class ExtRobertaEmbeddings(ExtBertEmbeddings):
    """BERT's embeddings with positions that begin after the padding id."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, config.hidden_size, padding_idx=self.padding_idx
        )

    def forward(
        self,
        input_ids: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        past_length: int | Tensor,
    ) -> Tensor:
        """(B, T) ids or (B, T, C) embeddings -> (B, T, C)"""
        if position_ids is None:
            position_ids = positions_after_padding(
                self.position_embeddings,
                input_ids,
                inputs_embeds,
                padding_idx=self.padding_idx,
                past_length=past_length,
            )
        return super().forward(input_ids, token_type_ids, position_ids, inputs_embeds, past_length)


class ExtRobertaPreTrainedModel(ExtPreTrainedModel):
    """Base of all RoBERTa classes."""

    config: ExtRobertaConfig
    base_model_prefix = "roberta"
    _no_split_modules = ["ExtRobertaEmbeddings", "ExtBertLayer"]
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids"]  # older official files carry this buffer
    _can_record_outputs = {
        "hidden_states": ExtBertLayer,
        "attentions": ExtBertSelfAttention,
        "cross_attentions": ExtBertCrossAttention,
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DenseLMHead):
            init.zeros_(module.bias)


class ExtRobertaModel(ExtRobertaPreTrainedModel, ExtBertModel):
    """The bare encoder; a decoder with `is_decoder=True`.

    Positions follow from the ids (`ExtRobertaEmbeddings.positions`). `position_ids` are rows of the table and used as
    they are, as the official class does: the first token's is `pad_token_id + 1`. Packed sequences are told apart
    wherever positions return to the row's first one, whichever it is; `DataCollatorWithFlattening` counts from 0, so
    add `pad_token_id + 1`, or give `cu_seq_lens_q` and no positions.

    Args:
        config: the configuration.
        add_pooling_layer: whether to build the pooler.
    """

    embeddings_class = ExtRobertaEmbeddings

    @property
    def first_position(self) -> int:
        return self.config.pad_token_id + 1


class ExtRobertaVocabularyHead(DenseVocabularyHead):
    """What RoBERTa's language-modelling classes tie."""

    _tied_weights_keys = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }


class ExtRobertaForMaskedLM(ExtRobertaVocabularyHead, MaskedLMModel, ExtRobertaPreTrainedModel):
    """Masked language modelling."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = ExtRobertaModel(config, add_pooling_layer=False)
        self.lm_head = DenseLMHead(config)
        self.post_init()


class ExtRobertaForCausalLM(
    ExtRobertaVocabularyHead, CrossAttendingLMModel, ExtRobertaPreTrainedModel, GenerationMixin
):
    """Next-token prediction by RoBERTa blocks used as a decoder (`is_decoder=True`)."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = ExtRobertaModel(config, add_pooling_layer=False)
        self.lm_head = DenseLMHead(config)
        self.post_init()

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, object]) -> Tensor:
        # The library counts from 0, which in the official class is another place than in the same class's training.
        counted = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return counted + self.roberta.first_position

    def run_base(self, position_ids: Tensor | None = None, **inputs: object) -> ModelOutput:
        if "write_index" in inputs:  # `generate_batch`, with keys and values in pages: it counts from 0 as well
            position_ids = position_ids + self.roberta.first_position
        return super().run_base(position_ids=position_ids, **inputs)


class ExtRobertaClassificationHead(nn.Module):
    """A classifier with a hidden layer over the first token: the pooler of a head of its own."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__()
        self.dense = TaskLinear(config.hidden_size, config.hidden_size)
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.out_proj = TaskLinear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, num_labels)"""
        x = torch.tanh(self.dense(self.dropout(hidden_states[:, 0])))
        return self.out_proj(self.dropout(x))


class ExtRobertaForSequenceClassification(SequenceClassificationModel, ExtRobertaPreTrainedModel):
    """Single label, several labels, or regression, on the first token."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roberta = ExtRobertaModel(config, add_pooling_layer=False)
        self.roberta.reads_first_token = True
        self.classifier = ExtRobertaClassificationHead(config)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(outputs.last_hidden_state)


@positional("input_ids", "token_type_ids", "attention_mask", "labels", "position_ids", "inputs_embeds")
class ExtRobertaForMultipleChoice(MultipleChoiceModel, ExtRobertaPreTrainedModel):
    """The best of several rows."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.roberta = ExtRobertaModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, 1)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class ExtRobertaForTokenClassification(TokenClassificationModel, ExtRobertaPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roberta = ExtRobertaModel(config, add_pooling_layer=False)
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


class ExtRobertaForQuestionAnswering(QuestionAnsweringModel, ExtRobertaPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtRobertaConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.roberta = ExtRobertaModel(config, add_pooling_layer=False)
        self.qa_outputs = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()
