"""Mistral 7B (Jiang et al., 2023, https://arxiv.org/abs/2310.06825).

Official checkpoints: mistralai/Mistral-7B-v0.1 to v0.3, mistralai/Mistral-Nemo-Base-2407, HuggingFaceH4/zephyr-7b-beta,
and every `model_type: mistral` file. LLaMA with grouped-query attention throughout, no biases, and a sliding window
(section 2): a token sees the last W tokens, and through k layers the last k * W.

Shapes: B batch, T tokens, C model width, W window.
"""

from torch import Tensor, nn
from transformers import GenerationMixin

from hf_ext.heads import (
    CausalLMModel,
    DecoderQuestionAnsweringModel,
    DecoderTokenClassificationModel,
    LastTokenClassificationModel,
    TaskLinear,
    classifier_dropout,
)
from hf_ext.layers.patterns.sliding_window import WindowAttentionCore
from hf_ext.modeling import ExtPreTrainedModel
from hf_ext.models.llama.modeling_llama import ExtLlamaAttention, ExtLlamaDecoderLayer, ExtLlamaModel
from hf_ext.models.mistral.configuration_mistral import ExtMistralConfig


class ExtMistralAttention(WindowAttentionCore, ExtLlamaAttention):
    """Grouped-query attention with rotary positions, over the last W tokens."""

    def __init__(self, config: ExtMistralConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = config.sliding_window


class ExtMistralDecoderLayer(ExtLlamaDecoderLayer):
    """LLaMA's block with Mistral's attention."""

    attention_class = ExtMistralAttention


class ExtMistralPreTrainedModel(ExtPreTrainedModel):
    """Base of all Mistral classes."""

    config: ExtMistralConfig
    base_model_prefix = "model"
    _no_split_modules = ["ExtMistralDecoderLayer"]
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]  # files of the first release carry this buffer
    _can_record_outputs = {"hidden_states": ExtMistralDecoderLayer, "attentions": ExtMistralAttention}


class ExtMistralModel(ExtMistralPreTrainedModel, ExtLlamaModel):
    """The bare decoder."""

    block_class = ExtMistralDecoderLayer

    def masks(self, hidden_states: Tensor, **inputs: object) -> dict[str, object]:
        if self.config.sliding_window is None:
            return super().masks(hidden_states, **inputs)
        return {"attention_mask": self.sliding_mask(hidden_states, **inputs)}


class ExtMistralForCausalLM(CausalLMModel, ExtMistralPreTrainedModel, GenerationMixin):
    """Next-token prediction."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: ExtMistralConfig) -> None:
        super().__init__(config)
        self.model = ExtMistralModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class ExtMistralForSequenceClassification(LastTokenClassificationModel, ExtMistralPreTrainedModel):
    """A label per row, read from its last token."""

    def __init__(self, config: ExtMistralConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ExtMistralModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class ExtMistralForTokenClassification(DecoderTokenClassificationModel, ExtMistralPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtMistralConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = ExtMistralModel(config)
        self.dropout = classifier_dropout(config, fallback=0.1)
        self.score = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.score(self.dropout(hidden_states))


class ExtMistralForQuestionAnswering(DecoderQuestionAnsweringModel, ExtMistralPreTrainedModel):
    """Start and end of an answer."""

    def __init__(self, config: ExtMistralConfig) -> None:
        super().__init__(config)
        self.model = ExtMistralModel(config)
        self.qa_outputs = TaskLinear(config.hidden_size, 2)
        self.post_init()
