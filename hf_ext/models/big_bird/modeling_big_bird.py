"""Big Bird: Transformers for Longer Sequences (Zaheer et al., 2020, https://arxiv.org/abs/2007.14062).

Official checkpoints: google/bigbird-roberta-base, google/bigbird-roberta-large, google/bigbird-base-trivia-itc and
every `model_type: big_bird` file. BERT whose tokens, in inputs that are long enough, see a window of blocks, the first
and the last block, and some random ones (section 2); `hf_ext/layers/patterns/block_sparse.py` has the pattern. Whether
an input is long enough is decided in each call, and nothing remembers it.

Shapes: B batch, T tokens, C model width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, ModelOutput
from transformers.utils.import_utils import is_tracing

from hf_ext.heads import (
    CrossAttendingLMModel,
    MaskedLMModel,
    MultipleChoiceModel,
    PreTrainingModel,
    QuestionAnsweringModel,
    SequenceClassificationModel,
    TaskLinear,
    TokenClassificationModel,
    classifier_dropout,
)
from hf_ext.layers.embeddings import look_up
from hf_ext.layers.feedforward import activation
from hf_ext.layers.packing import Packing
from hf_ext.layers.patterns.block_sparse import BlockSparse, BlockSparseAttentionCore, DenseBlockSparse, Pattern
from hf_ext.modeling import positional
from hf_ext.models.bert.modeling_bert import (
    ExtBertAddNorm,
    ExtBertCrossAttention,
    ExtBertEmbeddings,
    ExtBertEncoder,
    ExtBertHeads,
    ExtBertIntermediate,
    ExtBertLayer,
    ExtBertModel,
    ExtBertPreTrainedModel,
    ExtBertSelfAttention,
    ExtBertVocabularyHead,
)
from hf_ext.models.big_bird.configuration_big_bird import ExtBigBirdConfig


class ExtBigBirdEmbeddings(ExtBertEmbeddings):
    """BERT's, with dropout before LayerNorm, and word embeddings that may be multiplied by C ** 0.5."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.scale = config.hidden_size**0.5 if config.rescale_embeddings else None

    def forward(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, **inputs: object) -> Tensor:
        """(B, T) ids or (B, T, C) embeddings -> (B, T, C)"""
        if self.scale is not None:
            if inputs_embeds is None:
                inputs_embeds = look_up(self.word_embeddings, input_ids, name="input_ids", limit_name="vocab_size")
            inputs_embeds = inputs_embeds * self.scale
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **inputs)

    def finish(self, x: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(x))


class ExtBigBirdSelfAttention(ExtBertSelfAttention, BlockSparseAttentionCore):
    """BERT's attention where its mask is one, block-sparse where it is a plan; biases are optional."""

    def __init__(self, config: ExtBigBirdConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        drop_biases(self, config)


class ExtBigBirdCrossAttention(ExtBertCrossAttention):
    """Attention of a decoder over an encoder's output; biases are optional."""

    def __init__(self, config: ExtBigBirdConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        drop_biases(self, config)


def drop_biases(attention: nn.Module, config: ExtBigBirdConfig) -> None:
    """Take the biases of queries, keys and values away unless `use_bias`."""
    if not config.use_bias:
        for projection in (attention.query, attention.key, attention.value):
            projection.register_parameter("bias", None)


class ExtBigBirdLayer(ExtBertLayer):
    """One block, as BERT's."""

    self_attention_class = ExtBigBirdSelfAttention
    cross_attention_class = ExtBigBirdCrossAttention


class ExtBigBirdEncoder(ExtBertEncoder):
    """Holds the blocks under the checkpoint's name; `EncoderModel` runs them."""

    layer_class = ExtBigBirdLayer


class ExtBigBirdPreTrainedModel(ExtBertPreTrainedModel):
    """Base of all BigBird classes."""

    config: ExtBigBirdConfig
    _no_split_modules = ["ExtBigBirdEmbeddings", "ExtBigBirdLayer"]
    _can_record_outputs = {
        "hidden_states": ExtBigBirdLayer,
        "attentions": ExtBigBirdSelfAttention,
        "cross_attentions": ExtBigBirdCrossAttention,
    }


class ExtBigBirdModel(ExtBigBirdPreTrainedModel, ExtBertModel):
    """The bare encoder; a decoder with `is_decoder=True`, which attends fully to all earlier tokens.

    Inside the attention T is filled up to whole blocks, with places that nobody sees. With
    `attention_type="block_sparse"` every row of a batch has the blocks of its longest one, as in the official class:
    the last block, which is global, is that of the padded row. Sequences that come packed have blocks of their own.

    Args:
        config: the configuration.
        add_pooling_layer: whether to build the pooler.
    """

    embeddings_class = ExtBigBirdEmbeddings
    encoder_class = ExtBigBirdEncoder

    def __init__(self, config: ExtBigBirdConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config, add_pooling_layer=add_pooling_layer)
        self.pattern = Pattern(config.block_size, config.num_random_blocks, config.max_position_embeddings)

    @staticmethod
    def pooler_class(config: ExtBigBirdConfig) -> nn.Linear:
        return nn.Linear(config.hidden_size, config.hidden_size)

    def pool(self, hidden_states: Tensor) -> Tensor | None:
        return torch.tanh(self.pooler(hidden_states[:, 0])) if self.pooler is not None else None

    def is_sparse(self, hidden_states: Tensor, packing: Packing | None) -> bool:
        """Whether some row of this call is long enough to be attended sparsely; while a graph is traced in evaluation,
        whether rows may be: the graph finds out."""
        if self.config.attention_type != "block_sparse" or self.config.is_decoder:
            return False
        if is_tracing(hidden_states) and not self.training:
            return True
        tokens = hidden_states.shape[1]
        if packing is not None:
            tokens = max(packing.lengths) if packing.shape is None else packing.shape[1]
        return tokens > self.pattern.longest_dense

    def plan(
        self, hidden_states: Tensor, *, real: Tensor | None = None, packing: Packing | None = None
    ) -> BlockSparse | DenseBlockSparse:
        """The plan of a sparse call, arguments as `BlockSparse`."""
        if is_tracing(hidden_states):
            return DenseBlockSparse(self.pattern, hidden_states.shape[1], device=hidden_states.device, real=real)
        return BlockSparse(
            self.pattern,
            hidden_states.shape[:2],
            device=hidden_states.device,
            real=real,
            packing=packing,
            explicit=self.config._attn_implementation == "eager",
        )

    def attention_masks(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *others: object
    ) -> tuple[Tensor | BlockSparse | DenseBlockSparse | None, Tensor | None]:
        """As `EncoderModel.attention_masks`; a plan where attention is sparse."""
        rows = others[-1]
        if not self.is_sparse(hidden_states, rows):
            return super().attention_masks(hidden_states, attention_mask, *others)
        if rows is not None:
            raise ValueError(
                "packed sequences have no common layout of attention weights: pass them as rows of a batch, or "
                "without output_attentions."
            )
        if attention_mask is None:
            return self.plan(hidden_states), None
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must have shape {tuple(hidden_states.shape[:2])} for attention_type='block_sparse', "
                f"got {tuple(attention_mask.shape)}; other masks need attention_type='original_full'."
            )
        return self.plan(hidden_states, real=attention_mask.to(hidden_states.device) != 0), None

    def run_blocks(
        self,
        hidden_states: Tensor,
        *args: Tensor,
        attention_mask: Tensor | BlockSparse | DenseBlockSparse | None = None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """hidden_states (B, T, C) or packed (1, N, C) -> the same shape."""
        if packing is not None and self.is_sparse(hidden_states, packing):
            attention_mask, packing = self.plan(hidden_states, packing=packing), None
        elif isinstance(attention_mask, BlockSparse) and kwargs.get("output_attentions", self.config.output_attentions):
            attention_mask.show_weights()
        return super().run_blocks(hidden_states, *args, attention_mask=attention_mask, packing=packing, **kwargs)


class ExtBigBirdForPreTraining(ExtBertVocabularyHead, PreTrainingModel, ExtBigBirdPreTrainedModel):
    """Both pre-training objectives at once: masked LM and next-sentence prediction."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.bert = ExtBigBirdModel(config)
        self.cls = ExtBertHeads(config, predictions=True, next_sentence=True)
        self.loss_type = "ForMaskedLM"  # tells Trainer that labels are not shifted when it counts them
        self.post_init()

    def classify_pair(self, outputs: ModelOutput) -> Tensor:
        return self.cls.seq_relationship(outputs.pooler_output)


class ExtBigBirdForMaskedLM(ExtBertVocabularyHead, MaskedLMModel, ExtBigBirdPreTrainedModel):
    """Masked language modelling. The pooler, which nothing reads here, is in official files of all classes but one."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.bert = ExtBigBirdModel(config)
        self.bert.reads_first_token = False
        self.cls = ExtBertHeads(config, predictions=True, next_sentence=False)
        self.post_init()


@positional(
    *("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "encoder_hidden_states"),
    *("encoder_attention_mask", "past_key_values", "labels", "use_cache", "logits_to_keep"),
)
class ExtBigBirdForCausalLM(ExtBertVocabularyHead, CrossAttendingLMModel, ExtBigBirdPreTrainedModel, GenerationMixin):
    """Next-token prediction by BigBird blocks used as a decoder (`is_decoder=True`)."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.bert = ExtBigBirdModel(config)
        self.bert.reads_first_token = False
        self.cls = ExtBertHeads(config, predictions=True, next_sentence=False)
        self.post_init()


class ExtBigBirdClassificationHead(nn.Module):
    """dropout, dense, activation, dropout, projection of the first token."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__()
        self.dense = TaskLinear(config.hidden_size, config.hidden_size)
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.act_fn = activation(config.hidden_act)
        self.out_proj = TaskLinear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, num_labels)"""
        hidden_states = self.dense(self.dropout(hidden_states[:, 0]))
        return self.out_proj(self.dropout(self.act_fn(hidden_states)))


class ExtBigBirdForSequenceClassification(SequenceClassificationModel, ExtBigBirdPreTrainedModel):
    """Single label, several labels, or regression, on the first token."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = ExtBigBirdModel(config)
        self.classifier = ExtBigBirdClassificationHead(config)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(outputs.last_hidden_state)


class ExtBigBirdForMultipleChoice(MultipleChoiceModel, ExtBigBirdPreTrainedModel):
    """The best of several rows."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.bert = ExtBigBirdModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, 1)
        self.post_init()

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))


class ExtBigBirdForTokenClassification(TokenClassificationModel, ExtBigBirdPreTrainedModel):
    """A label per token."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = ExtBigBirdModel(config)
        self.bert.reads_first_token = False
        self.dropout = classifier_dropout(config, config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


class ExtBigBirdQuestionAnsweringHead(nn.Module):
    """A feed-forward of its own around the hidden states, then the projection to start and end."""

    def __init__(self, config: ExtBigBirdConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.intermediate = ExtBertIntermediate(config)
        self.intermediate.dense = TaskLinear(config.hidden_size, config.intermediate_size)
        self.output = ExtBertAddNorm(config, config.intermediate_size)
        self.output.dense = TaskLinear(config.intermediate_size, config.hidden_size)
        self.qa_outputs = TaskLinear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, 2)"""
        return self.qa_outputs(self.output(self.intermediate(self.dropout(hidden_states)), hidden_states))


@positional("input_ids", "attention_mask", "question_lengths", "token_type_ids", "position_ids", "inputs_embeds")
class ExtBigBirdForQuestionAnswering(QuestionAnsweringModel, ExtBigBirdPreTrainedModel):
    """Start and end of an answer behind the question, which stands first: its tokens, but for the first one, which says
    that there is no answer, are no candidates.

    `question_lengths` (B, 1) counts the tokens of the question with its separator; without, it ends with the first
    `sep_token_id` of `input_ids`. Where `token_type_ids` are not given, the question is segment 0 and the text 1.

    Args:
        config: the configuration; `num_labels` becomes 2.
        add_pooling_layer: whether to build the pooler.
    """

    def __init__(self, config: ExtBigBirdConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        config.num_labels = 2
        self.num_labels = config.num_labels
        self.bert = ExtBigBirdModel(config, add_pooling_layer=add_pooling_layer)
        self.qa_classifier = ExtBigBirdQuestionAnsweringHead(config)
        self.post_init()

    @property
    def qa_outputs(self) -> nn.Linear:
        return self.qa_classifier.qa_outputs

    def run_base(self, question_lengths: Tensor | None = None, **inputs: object) -> ModelOutput:
        """As `TaskHead.run_base`; `question` (B, T, 1) among the outputs is True where no answer can be, None if not
        known."""
        question, input_ids = None, inputs["input_ids"]
        given = input_ids if input_ids is not None else inputs["inputs_embeds"]
        if question_lengths is None and input_ids is not None:
            question_lengths = (input_ids == self.config.sep_token_id).int().argmax(-1, keepdim=True) + 1
        if question_lengths is not None and given is not None:
            places = torch.arange(given.shape[1], device=given.device)
            question = places < question_lengths.reshape(-1, 1).to(given.device)  # (B, T)
            if inputs["token_type_ids"] is None:
                inputs["token_type_ids"] = (~question).long()
            question = (question & (places > 0))[..., None]
        outputs = super().run_base(**inputs)
        outputs["question"] = question
        return outputs

    def span_logits(self, outputs: ModelOutput) -> Tensor:
        logits = self.qa_classifier(outputs.last_hidden_state)
        return logits if outputs["question"] is None else logits - 1e6 * outputs["question"]

    def head_output(self, kind: type[ModelOutput], outputs: ModelOutput, **fields: Tensor | None) -> ModelOutput:
        output = super().head_output(kind, outputs, **fields)
        if outputs.pooler_output is not None:
            output["pooler_output"] = outputs.pooler_output
        return output
