"""XLM-RoBERTa: Unsupervised Cross-lingual Representation Learning at Scale (Conneau et al., 2019,
https://arxiv.org/abs/1911.02116).

Official checkpoints: FacebookAI/xlm-roberta-base, FacebookAI/xlm-roberta-large, and every `model_type: xlm-roberta`
file. RoBERTa, trained on a hundred languages with a SentencePiece vocabulary: no tensor has another name or meaning.
"""

from transformers import GenerationMixin

from hf_ext.models.roberta.modeling_roberta import (
    ExtRobertaForCausalLM,
    ExtRobertaForMaskedLM,
    ExtRobertaForMultipleChoice,
    ExtRobertaForQuestionAnswering,
    ExtRobertaForSequenceClassification,
    ExtRobertaForTokenClassification,
    ExtRobertaModel,
    ExtRobertaPreTrainedModel,
)
from hf_ext.models.xlm_roberta.configuration_xlm_roberta import ExtXLMRobertaConfig


class ExtXLMRobertaPreTrainedModel(ExtRobertaPreTrainedModel):
    """Base of all XLM-RoBERTa classes. The base model inside a head is an `ExtRobertaModel`."""

    config: ExtXLMRobertaConfig


class ExtXLMRobertaModel(ExtXLMRobertaPreTrainedModel, ExtRobertaModel):
    """The bare encoder; a decoder with `is_decoder=True`."""


class ExtXLMRobertaVocabularyHead:
    """The official classes register the head before the base model, and so give the tied matrix the head's name and
    the first place among the parameters: optimizer states are stored by place."""

    def __init__(self, config: ExtXLMRobertaConfig) -> None:
        super().__init__(config)
        self._modules["roberta"] = self._modules.pop("roberta")


class ExtXLMRobertaForMaskedLM(ExtXLMRobertaVocabularyHead, ExtXLMRobertaPreTrainedModel, ExtRobertaForMaskedLM):
    """Masked language modelling."""


class ExtXLMRobertaForCausalLM(
    ExtXLMRobertaVocabularyHead, ExtXLMRobertaPreTrainedModel, ExtRobertaForCausalLM, GenerationMixin
):
    """Next-token prediction by blocks used as a decoder (`is_decoder=True`)."""


class ExtXLMRobertaForSequenceClassification(ExtXLMRobertaPreTrainedModel, ExtRobertaForSequenceClassification):
    """Single label, several labels, or regression, on the first token."""


class ExtXLMRobertaForMultipleChoice(ExtXLMRobertaPreTrainedModel, ExtRobertaForMultipleChoice):
    """The best of several rows."""


class ExtXLMRobertaForTokenClassification(ExtXLMRobertaPreTrainedModel, ExtRobertaForTokenClassification):
    """A label per token."""


class ExtXLMRobertaForQuestionAnswering(ExtXLMRobertaPreTrainedModel, ExtRobertaForQuestionAnswering):
    """Start and end of an answer."""
