"""mT5: A Massively Multilingual Pre-trained Text-to-Text Transformer (Xue et al., 2020,
https://arxiv.org/abs/2010.11934).

Official checkpoints: google/mt5-small, google/mt5-xxl, and every `model_type: mt5` file. T5 1.1 with another
vocabulary.
"""

from transformers import GenerationMixin

from hf_ext.models.mt5.configuration_mt5 import ExtMT5Config
from hf_ext.models.t5.modeling_t5 import (
    ExtT5EncoderModel,
    ExtT5ForConditionalGeneration,
    ExtT5ForQuestionAnswering,
    ExtT5ForSequenceClassification,
    ExtT5ForTokenClassification,
    ExtT5Model,
    ExtT5PreTrainedModel,
)


class ExtMT5PreTrainedModel(ExtT5PreTrainedModel):
    """Base of all mT5 classes."""

    config: ExtMT5Config


class ExtMT5Model(ExtMT5PreTrainedModel, ExtT5Model):
    """The bare encoder-decoder."""


class ExtMT5ForConditionalGeneration(ExtMT5PreTrainedModel, ExtT5ForConditionalGeneration, GenerationMixin):
    """Generation of one text from another."""

    def hidden_transform(self) -> None:
        return None


class ExtMT5EncoderModel(ExtMT5PreTrainedModel, ExtT5EncoderModel):
    """The encoder on its own."""


class ExtMT5ForSequenceClassification(ExtMT5PreTrainedModel, ExtT5ForSequenceClassification):
    """Single label, several labels, or regression, on the decoder's last end token."""


class ExtMT5ForTokenClassification(ExtMT5PreTrainedModel, ExtT5ForTokenClassification):
    """A label per token of the encoder."""


class ExtMT5ForQuestionAnswering(ExtMT5PreTrainedModel, ExtT5ForQuestionAnswering):
    """Start and end of an answer."""
