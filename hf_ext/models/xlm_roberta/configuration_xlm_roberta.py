"""Configuration of XLM-RoBERTa (Conneau et al., 2019, https://arxiv.org/abs/1911.02116).

Official checkpoints: FacebookAI/xlm-roberta-base, FacebookAI/xlm-roberta-large, and every `model_type: xlm-roberta`
file.
"""

from huggingface_hub.dataclasses import strict

from hf_ext.models.roberta.configuration_roberta import ExtRobertaConfig


@strict
class ExtXLMRobertaConfig(ExtRobertaConfig):
    """Fields and defaults of the official `xlm-roberta` configuration: RoBERTa's, with another default vocabulary.

    The official checkpoints have a vocabulary of 250,002 tokens; the default size is BERT's, as in the official class.
    """

    model_type = "ext_xlm_roberta"
    official_model_type = "xlm-roberta"

    vocab_size: int = 30522
