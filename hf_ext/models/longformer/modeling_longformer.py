"""Longformer: The Long-Document Transformer (Beltagy et al., 2020, https://arxiv.org/abs/2004.05150).

Official checkpoints: allenai/longformer-base-4096, allenai/longformer-large-4096 and every `model_type: longformer`
file. RoBERTa whose tokens see a window around them (section 3.1), and a few global tokens that see, and are seen by,
the whole text through projections of their own. Task heads choose the global tokens (section 6) unless the caller does.

Shapes: B batch, T tokens, M global tokens of the batch, C model width, W window, V vocabulary.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
    ModelOutput,
)
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import OutputRecorder

from hf_ext.heads import (
    DenseLMHead,
    DenseVocabularyHead,
    MaskedLMModel,
    MultipleChoiceModel,
    QuestionAnsweringModel,
    SequenceClassificationModel,
    TaskHead,
    TaskLinear,
    TokenClassificationModel,
)
from hf_ext.layers.embeddings import positions_after_padding
from hf_ext.layers.packing import Packing
from hf_ext.layers.patterns.window_global import WindowGlobal, WindowGlobalAttentionCore
from hf_ext.modeling import EncoderModel, ExtPreTrainedModel, positional
from hf_ext.models.bert.modeling_bert import (
    ExtBertAddNorm,
    ExtBertAttention,
    ExtBertEmbeddings,
    ExtBertIntermediate,
    ExtBertPooler,
)
from hf_ext.models.longformer.configuration_longformer import ExtLongformerConfig

logger = logging.get_logger(__name__)

MASKS = ("input_ids", "attention_mask", "global_attention_mask")
INPUTS = (*MASKS, "token_type_ids", "position_ids", "inputs_embeds")
SWITCHES = ("output_attentions", "output_hidden_states", "return_dict")


class ExtLongformerEmbeddings(ExtBertEmbeddings):
    """BERT's, with RoBERTa's positions: they begin at `pad_token_id` + 1, and padding has that of `pad_token_id`."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.position_embeddings = nn.Embedding(
            config.max_position_embeddings, config.hidden_size, padding_idx=config.pad_token_id
        )

    def forward(
        self, input_ids: Tensor | None, position_ids: Tensor | None, inputs_embeds: Tensor | None, **inputs: object
    ) -> Tensor:
        """(B, T) ids or (B, T, C) embeddings, whose padding cannot be told -> (B, T, C)"""
        if position_ids is None:
            position_ids = positions_after_padding(
                self.position_embeddings, input_ids, inputs_embeds, padding_idx=self.padding_idx
            )
        return super().forward(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, **inputs)


class ExtLongformerSelfAttention(WindowGlobalAttentionCore):
    """Attention within the window and to global tokens, and attention of these to the whole text."""

    def __init__(self, config: ExtLongformerConfig, layer_idx: int) -> None:
        super().__init__(
            config=config,
            layer_idx=layer_idx,
            num_heads=config.num_attention_heads,
            head_dim=config.hidden_size // config.num_attention_heads,
            window=config.windows()[layer_idx],
            dropout=config.attention_probs_dropout_prob,
        )
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.query_global = nn.Linear(config.hidden_size, config.hidden_size)
        self.key_global = nn.Linear(config.hidden_size, config.hidden_size)
        self.value_global = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, *, windows: WindowGlobal) -> tuple[Tensor, Tensor | None, Tensor | None]:
        near = self.query, self.key, self.value
        far = self.query_global, self.key_global, self.value_global
        return self.attend_window(x, near, far, windows)


class ExtLongformerLayer(GradientCheckpointingLayer):
    """One block: attention, feed-forward; each adds and normalises."""

    def __init__(self, config: ExtLongformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = ExtBertAttention(config, ExtLongformerSelfAttention(config, layer_idx))
        self.intermediate = ExtBertIntermediate(config)
        self.output = ExtBertAddNorm(config, config.intermediate_size)

    def forward(self, x: Tensor, *, windows: WindowGlobal, **kwargs: object) -> Tensor:
        """(B, T, C) -> (B, T, C)"""
        x = self.attention(x, windows=windows)
        return self.output(self.intermediate(x), x)


class ExtLongformerEncoder(nn.Module):
    """Holds the blocks under the checkpoint's name; `EncoderModel` runs them."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(ExtLongformerLayer(config, i) for i in range(config.num_hidden_layers))


class ExtLongformerPreTrainedModel(ExtPreTrainedModel):
    """Base of all Longformer classes."""

    config: ExtLongformerConfig
    base_model_prefix = "longformer"
    _supports_flash_attn = False  # no kernel of theirs has the global tokens
    _supports_flex_attn = False
    _no_split_modules = ["ExtLongformerEmbeddings", "ExtLongformerLayer"]
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_ids"]  # older official files carry this buffer
    _can_record_outputs = {
        "hidden_states": ExtLongformerLayer,
        "attentions": ExtLongformerSelfAttention,
        "global_attentions": OutputRecorder(ExtLongformerSelfAttention, index=2),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DenseLMHead):
            init.zeros_(module.bias)


@positional(*INPUTS, *SWITCHES)
class ExtLongformerModel(EncoderModel, ExtLongformerPreTrainedModel):
    """The bare encoder.

    Args:
        config: the configuration.
        add_pooling_layer: whether to build the pooler.
    """

    def __init__(self, config: ExtLongformerConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = ExtLongformerEmbeddings(config)
        self.encoder = ExtLongformerEncoder(config)
        self.pooler = ExtBertPooler(config) if add_pooling_layer else None
        self.reads_first_token = add_pooling_layer
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.word_embeddings = value

    def embed(self, **inputs: Tensor | int | None) -> Tensor:
        return self.embeddings(**inputs)

    @property
    def first_position(self) -> int:
        return self.embeddings.padding_idx + 1

    def blocks(self) -> nn.ModuleList:
        return self.encoder.layer

    def pool(self, hidden_states: Tensor) -> Tensor | None:
        return self.pooler(hidden_states) if self.pooler is not None else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        **inputs: object,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """As `EncoderModel.forward`.

        Args:
            attention_mask: (B, T), 0 at padding, 1 at other tokens; 2 at global tokens means the same as 1 here and 1
                in the other mask.
            global_attention_mask: (B, T), 1 at tokens with global attention; padding never has any.

        Returns:
            With `output_attentions`: `attentions`, (B, H, T, G + W + 1) for each layer, first the weights of the G
            global keys, then those of the window; and `global_attentions`, (B, H, T, G), the weights that the global
            queries give to all tokens.

        Raises:
            ValueError: a mask of another shape.
        """
        given = input_ids if input_ids is not None else inputs.get("inputs_embeds")
        for name, mask in (("attention_mask", attention_mask), ("global_attention_mask", global_attention_mask)):
            if mask is not None and given is not None and mask.shape != given.shape[:2] and not is_tracing(mask):
                raise ValueError(
                    f"{name} must have shape {tuple(given.shape[:2])}, one entry for every token, got "
                    f"{tuple(mask.shape)}."
                )
        is_global = None if global_attention_mask is None else global_attention_mask > 0
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            marked = attention_mask == 2
            # A graph that is traced has one way for all masks, and this one would make every row dense in G too.
            if not is_tracing(marked) and marked.any():
                is_global = marked if is_global is None else is_global | marked
        if is_global is not None and attention_mask is not None:
            is_global = is_global & (attention_mask != 0)
        if inputs.get("output_attentions", self.config.output_attentions):
            inputs["output_global_attentions"] = True
        return super().forward(input_ids, attention_mask, global_attention_mask=is_global, **inputs)

    def padding_plan(self, attention_mask: Tensor | None, *args: object, **kwargs: object) -> Packing | None:
        """As `EncoderModel.padding_plan`; but where padding stands inside a row and the window does not hold the whole
        row, it is computed: with it left out, the tokens around it would be nearer to each other."""
        plan = super().padding_plan(attention_mask, *args, **kwargs)
        if plan is not None and attention_mask.shape[1] > min(self.config.windows(), default=0) // 2 + 1:
            real = nn.functional.pad((attention_mask != 0).int(), (1, 0))
            if ((real.diff(dim=1) == 1).sum(1) > 1).any():  # real tokens begin more than once
                return None
        return plan

    def attention_masks(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *others: object
    ) -> tuple[Tensor | None, None]:
        """The mask as it is: `run_blocks` makes the plan from it."""
        if others[-1] is not None:
            raise ValueError(
                "packed sequences have no common layout of attention weights: pass them as rows of a batch, or "
                "without output_attentions."
            )
        return attention_mask, None

    def run_blocks(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        packing: Packing | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """hidden_states (B, T, C) or packed (1, N, C) -> the same shape; the masks are (B, T)."""
        if packing is not None and packing.indices is not None and global_attention_mask is not None:
            global_attention_mask = packing.pack(global_attention_mask)
        kind, dtype = hidden_states.device.type, hidden_states.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)  # what the projections return
        windows = WindowGlobal(
            hidden_states.shape[:2],
            dtype=dtype,
            device=hidden_states.device,
            real=None if attention_mask is None else attention_mask.to(hidden_states.device) != 0,
            is_global=None if global_attention_mask is None else global_attention_mask.to(hidden_states.device),
            packing=packing,
            explicit=self.config._attn_implementation == "eager"
            or bool(kwargs.get("output_attentions", self.config.output_attentions)),
            traced=is_tracing(hidden_states),
        )
        return super().run_blocks(hidden_states, windows=windows, **kwargs)


class ExtLongformerHead(TaskHead):
    """What the task heads share: global tokens that fit the task, and the weights of these among the outputs."""

    def default_globals(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
        """(B, T) ids or (B, T, C) embeddings -> (B, T) mask of the tokens with global attention, None for none."""
        return None

    def run_base(self, global_attention_mask: Tensor | None = None, **inputs: object) -> ModelOutput:
        if global_attention_mask is None:
            global_attention_mask = self.default_globals(inputs["input_ids"], inputs["inputs_embeds"])
        elif global_attention_mask.dim() == 3:  # of several choices
            global_attention_mask = global_attention_mask.flatten(0, 1)
        return super().run_base(global_attention_mask=global_attention_mask, **inputs)

    def head_output(self, kind: type[ModelOutput], outputs: ModelOutput, **fields: Tensor | None) -> ModelOutput:
        output = super().head_output(kind, outputs, **fields)
        if "global_attentions" in outputs:
            output["global_attentions"] = outputs["global_attentions"]
        return output

    def first_separator(self, input_ids: Tensor | None) -> Tensor | None:
        """(B, T) ids -> (B, 1) place of the first separator, which ends the question; None without ids. The official
        class demands three separators in a row; more of them do no harm. A row without any is a ValueError."""
        if input_ids is None:
            logger.warning_once("Without input_ids no token is global unless global_attention_mask says so.")
            return None
        separator = self.config.sep_token_id
        found = input_ids == separator if separator is not None else torch.zeros_like(input_ids, dtype=torch.bool)
        if not is_tracing(found) and not found.any(1).all():
            raise ValueError(
                f"row {int((~found.any(1)).nonzero()[0])} has no separator (sep_token_id={separator}), so that its "
                "question cannot be told from its text: encode both as a pair, or pass global_attention_mask."
            )
        return found.int().argmax(1, keepdim=True)


@positional(*INPUTS, "labels", *SWITCHES)
class ExtLongformerForMaskedLM(ExtLongformerHead, DenseVocabularyHead, MaskedLMModel, ExtLongformerPreTrainedModel):
    """Masked language modelling; no token is global unless the caller says so."""

    _tied_weights_keys = {
        "lm_head.decoder.weight": "longformer.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__(config)
        self.longformer = ExtLongformerModel(config, add_pooling_layer=False)
        self.lm_head = DenseLMHead(config)
        self.post_init()


class ExtLongformerClassificationHead(nn.Module):
    """dropout, dense, tanh, dropout, projection of the first token."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__()
        self.dense = TaskLinear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.out_proj = TaskLinear(config.hidden_size, config.num_labels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, num_labels)"""
        hidden_states = self.dense(self.dropout(hidden_states[:, 0]))
        return self.out_proj(self.dropout(torch.tanh(hidden_states)))


@positional(*INPUTS, "labels", *SWITCHES)
class ExtLongformerForSequenceClassification(
    ExtLongformerHead, SequenceClassificationModel, ExtLongformerPreTrainedModel
):
    """Single label, several labels, or regression, on the first token, which is global."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.longformer = ExtLongformerModel(config, add_pooling_layer=False)
        self.longformer.reads_first_token = True
        self.classifier = ExtLongformerClassificationHead(config)
        self.post_init()

    def default_globals(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.dim() < 2:
            return None  # the base model says what is wrong
        first = torch.zeros(given.shape[:2], dtype=torch.bool, device=given.device)
        first[:, 0] = True
        return first

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(outputs.last_hidden_state)


@positional(*INPUTS, "start_positions", "end_positions", *SWITCHES)
class ExtLongformerForQuestionAnswering(ExtLongformerHead, QuestionAnsweringModel, ExtLongformerPreTrainedModel):
    """Start and end of an answer; the tokens of the question, which stands first, are global."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.longformer = ExtLongformerModel(config, add_pooling_layer=False)
        self.qa_outputs = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def default_globals(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
        end = self.first_separator(input_ids)
        return None if end is None else torch.arange(input_ids.shape[1], device=input_ids.device) < end


@positional(*INPUTS, "labels", *SWITCHES)
class ExtLongformerForTokenClassification(ExtLongformerHead, TokenClassificationModel, ExtLongformerPreTrainedModel):
    """A label per token; no token is global unless the caller says so."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.longformer = ExtLongformerModel(config, add_pooling_layer=False)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, hidden_states: Tensor) -> Tensor:
        return self.classifier(self.dropout(hidden_states))


@positional("input_ids", "token_type_ids", *MASKS[1:], "labels", "position_ids", "inputs_embeds", *SWITCHES)
class ExtLongformerForMultipleChoice(ExtLongformerHead, MultipleChoiceModel, ExtLongformerPreTrainedModel):
    """The best of several rows; the tokens of the choice, which stands behind the two separators, are global."""

    def __init__(self, config: ExtLongformerConfig) -> None:
        super().__init__(config)
        self.longformer = ExtLongformerModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = TaskLinear(config.hidden_size, 1)
        self.post_init()

    def default_globals(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor | None:
        end = self.first_separator(input_ids)
        return None if end is None else torch.arange(input_ids.shape[1], device=input_ids.device) > end + 1

    def classify(self, outputs: ModelOutput) -> Tensor:
        return self.classifier(self.dropout(outputs.pooler_output))
