"""Task heads over any base model.

A head class of an architecture inherits one of these and its own `Ext<Arch>PreTrainedModel`, builds its modules under
the checkpoint's names, and nothing else. What differs between architectures is a small method: `classify`, `project`.

`accepts_loss_kwargs` says to `Trainer` whether the head's loss divides by the number of labels of the whole step
(`num_items_in_batch`): heads with a label per token do, heads with a label per row cannot and leave it to `Trainer`.

Shapes: B batch, T tokens, C model width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers import Cache
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing

from hf_ext.configuration import ExtConfig
from hf_ext.layers.feedforward import make_activation
from hf_ext.layers.linear import project
from hf_ext.losses import IGNORE_INDEX, add_bias, check_classes, mean_or_share, shift_labels_left, vocabulary_loss


def check_labels(labels: Tensor, expected: tuple[int, ...], *, name: str = "labels", meaning: str) -> None:
    """Raise ValueError unless the labels have the expected shape."""
    if tuple(labels.shape) != expected and not is_tracing(labels):
        raise ValueError(f"{name} must have shape {expected} ({meaning}), got {tuple(labels.shape)}.")


class TaskHead:
    """What all heads share: the base model is the attribute named by `base_model_prefix`."""

    def run_base(self, **inputs: object) -> ModelOutput:
        """Call the base model, whatever the architecture names it."""
        return getattr(self, self.base_model_prefix)(return_dict=True, **inputs)

    def head_output(self, kind: type[ModelOutput], outputs: ModelOutput, **fields: Tensor | None) -> ModelOutput:
        """An encoder head's output: its own fields, and what the base model's `outputs` recorded on the way."""
        return kind(**fields, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class TokenLabels:
    """For encoder heads with one label per token: padding may be left out only if no label stands on it."""

    def skip_padding_with(self, labels: Tensor | None, attention_mask: Tensor | None) -> bool | None:
        """False when a label that counts stands on padding, else None (the configuration decides)."""
        if labels is None or attention_mask is None or attention_mask.dim() != 2 or is_tracing(labels):
            return None
        if labels.shape == attention_mask.shape and ((labels != IGNORE_INDEX) & (attention_mask == 0)).any():
            return False
        return None


class VocabularyHead(TaskHead):
    """Logits over the vocabulary, and a loss that does not need them all.

    `hidden_transform` is what stands between the base model and the output embedding.
    """

    accepts_loss_kwargs = True

    def hidden_transform(self) -> Callable[[Tensor], Tensor] | None:
        """(..., C) -> (..., C), or None."""
        return None

    def logits_bias(self) -> Tensor | None:
        """(V,) numbers added to the logits that are not trained, or None."""
        return None

    def project(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., V)"""
        transform = self.hidden_transform()
        hidden_states = hidden_states if transform is None else transform(hidden_states)
        logits = project(self.get_output_embeddings(), hidden_states)
        return add_bias(logits, self.logits_bias())

    def project_real(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: object) -> Tensor:
        """`project` for an encoder's output: where the base model left padding out, so does the head, and the logits
        of padding are zero. (B, T, C) -> (B, T, V); `kwargs` are those that the base model was called with."""
        plan = getattr(self, self.base_model_prefix).padding_plan(attention_mask, **kwargs)
        if plan is None:
            return self.project(hidden_states)
        real = plan.pack(hidden_states)
        # Written piece by piece, so that the logits do not exist twice; autograd would copy them all for each piece.
        size = real.shape[1] if torch.is_grad_enabled() else self.config.loss_chunk_size
        return plan.unpack(self.project(piece) for piece in real.split(size, dim=1))

    def wants_logits(self, labels: Tensor | None, output_logits: bool | None) -> bool:
        """Logits are left out only while training with labels, unless asked for."""
        if output_logits is None:
            output_logits = self.config.output_logits
        return labels is None or not self.training or bool(output_logits)

    def loss_over_vocabulary(self, hidden_states: Tensor, labels: Tensor, **kwargs: object) -> Tensor:
        """hidden_states (B, T, C) against aligned labels (B, T) -> scalar."""
        return vocabulary_loss(
            hidden_states,
            labels,
            self.get_output_embeddings(),
            transform=self.hidden_transform(),
            logits_bias=self.logits_bias(),
            num_items_in_batch=kwargs.get("num_items_in_batch"),
            label_smoothing=kwargs.get("label_smoothing", 0.0),
            chunk_size=self.config.loss_chunk_size,
        )


class DenseLMHead(nn.Module):
    """dense, GELU, LayerNorm, then the word embeddings used backwards, with a bias of their own: the head of fairseq's
    RoBERTa, which Longformer took over.

    Args:
        config: `hidden_size`, `layer_norm_eps`, `vocab_size`.
    """

    def __init__(self, config: ExtConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the same tensor as decoder.bias when tied

    def transform(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., C), what precedes the output embedding; GELU whatever `hidden_act` says."""
        return self.layer_norm(nn.functional.gelu(self.dense(hidden_states)))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., V)"""
        return self.decoder(self.transform(hidden_states))


class DenseVocabularyHead(VocabularyHead):
    """Language models with a `DenseLMHead` named `lm_head`."""

    def hidden_transform(self) -> Callable[[Tensor], Tensor]:
        return self.lm_head.transform

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head.decoder = new_embeddings
        bias = new_embeddings.bias
        # Untied, the file holds the bias twice; one tensor under both names would be saved under one of them.
        self.lm_head.bias = bias if self.config.tie_word_embeddings else nn.Parameter(bias.detach().clone())


class MaskedLMModel(VocabularyHead, TokenLabels):
    """Masked language modelling (Devlin et al., 2018, https://arxiv.org/abs/1810.04805): predict labelled tokens."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> MaskedLMOutput:
        """Loss and logits.

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict.
            output_logits: whether to return logits in a training step with labels.

        Returns:
            `loss`, `logits` (B, T, V) or None, `hidden_states`, `attentions`.
        """
        kwargs.setdefault("skip_padding", self.skip_padding_with(labels, attention_mask))
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = None
        if labels is not None:
            check_labels(labels, tuple(hidden_states.shape[:2]), meaning="one token id or -100 per token")
            loss = self.loss_over_vocabulary(hidden_states, labels, **kwargs)
        logits = None
        if self.wants_logits(labels, output_logits):
            logits = self.project_real(hidden_states, attention_mask, **kwargs)
        return self.head_output(MaskedLMOutput, outputs, loss=loss, logits=logits)


@dataclass
class PreTrainingOutput(ModelOutput):
    """`loss`, `prediction_logits` (B, T, V), `seq_relationship_logits` (B, 2), `hidden_states`, `attentions`."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class PairHead(TaskHead):
    """Next-sentence prediction: whether the second segment follows the first."""

    def classify_pair(self, outputs: ModelOutput) -> Tensor:
        """Outputs of the base model -> (B, 2)."""
        raise NotImplementedError

    def pair_loss(self, logits: Tensor, labels: Tensor, name: str) -> Tensor:
        """logits (B, 2), labels (B) or (B, 1): 0 if the second segment follows, 1 if it is a random one -> scalar."""
        labels = labels.reshape(-1).to(logits.device)
        check_labels(labels, (logits.shape[0],), name=name, meaning="0 or 1 per row")
        check_classes(labels, 2, name, "classes")
        return cross_entropy(logits, labels)


class PreTrainingModel(VocabularyHead, PairHead, TokenLabels):
    """Masked language modelling and next-sentence prediction at once, as BERT was trained."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        num_sequences_in_batch: Tensor | int | None = None,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> PreTrainingOutput:
        """Sum of the losses whose labels are given.

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict.
            next_sentence_label: (B), 0 if the second segment follows the first, 1 if it is a random one.
            num_sequences_in_batch: rows of all micro-batches of one step. `Trainer` counts tokens only
                (`num_items_in_batch`); without this number each micro-batch's next-sentence loss is weighted by its
                share of the tokens, so that the step still is a mean.
        """
        kwargs.setdefault("skip_padding", self.skip_padding_with(labels, attention_mask))
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        pair_logits = self.classify_pair(outputs)
        losses = []
        if labels is not None:
            check_labels(labels, tuple(hidden_states.shape[:2]), meaning="one token id or -100 per token")
            losses.append(self.loss_over_vocabulary(hidden_states, labels, **kwargs))
        if next_sentence_label is not None:
            loss = self.pair_loss(pair_logits, next_sentence_label, "next_sentence_label")
            num_items = kwargs.get("num_items_in_batch")
            if num_sequences_in_batch is not None:
                loss = loss * hidden_states.shape[0] / num_sequences_in_batch
            elif num_items is not None and labels is not None:
                loss = loss * (labels != IGNORE_INDEX).sum() / num_items
            losses.append(loss)
        logits = None
        if self.wants_logits(labels, output_logits):
            logits = self.project_real(hidden_states, attention_mask, **kwargs)
        return PreTrainingOutput(
            loss=sum(losses) if losses else None,
            prediction_logits=logits,
            seq_relationship_logits=pair_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NextSentencePredictionModel(PairHead):
    """Next-sentence prediction alone."""

    accepts_loss_kwargs = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> NextSentencePredictorOutput:
        """`labels` (B): 0 if the second segment follows the first, 1 if it is a random one. Logits (B, 2)."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classify_pair(outputs)
        return NextSentencePredictorOutput(
            loss=self.pair_loss(logits, labels, "labels") if labels is not None else None,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class NextTokenHead(VocabularyHead):
    """What next-token prediction needs beyond a vocabulary head."""

    def next_token_loss(
        self, hidden_states: Tensor, labels: Tensor, shift_labels: Tensor | None = None, **kwargs: object
    ) -> Tensor:
        """hidden_states (B, T, C), labels (B, T) not shifted; `shift_labels` (B, T) if already shifted -> scalar."""
        check_labels(labels, tuple(hidden_states.shape[:2]), meaning="one token id or -100 per token")
        if shift_labels is None:
            shift_labels = shift_labels_left(labels)
        return self.loss_over_vocabulary(hidden_states, shift_labels, **kwargs)


class CausalLMModel(NextTokenHead):
    """Next-token prediction over a causal decoder."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Loss and logits.

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict; the shift by one happens here.
            logits_to_keep: how many of the last positions get logits, 0 for all, or a tensor of positions.
            output_logits: whether to return logits in a training step with labels.

        Returns:
            `loss`, `logits` (B, T or fewer, V) or None, `past_key_values`, `hidden_states`, `attentions`.
        """
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = self.next_token_loss(hidden_states, labels, **kwargs) if labels is not None else None
        logits = None
        if self.wants_logits(labels, output_logits):
            logits = self.project(slice_logits_to_keep(hidden_states, logits_to_keep))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class CrossAttendingLMModel(NextTokenHead):
    """Next-token prediction over blocks that may attend to an encoder's output as well."""

    def wants_cache(self, use_cache: bool | None, labels: Tensor | None) -> bool | None:
        """Whether to make a cache: encoders used as decoders make none beside a loss."""
        return use_cache if labels is None else False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithCrossAttentions:
        """As `CausalLMModel.forward`; encoder_hidden_states: (B, S, C), encoder_attention_mask: (B, S)."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=self.wants_cache(use_cache, labels),
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = self.next_token_loss(hidden_states, labels, **kwargs) if labels is not None else None
        logits = None
        if self.wants_logits(labels, output_logits):
            logits = self.project(slice_logits_to_keep(hidden_states, logits_to_keep))
        return CausalLMOutputWithCrossAttentions(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


@dataclass
class DoubleHeadsOutput(ModelOutput):
    """`loss` of the tokens, `mc_loss` of the choices, `logits` (B, choices, T, V), `mc_logits` (B, choices),
    `past_key_values`, `hidden_states`, `attentions`."""

    loss: Tensor | None = None
    mc_loss: Tensor | None = None
    logits: Tensor | None = None
    mc_logits: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class SequenceSummary(nn.Module):
    """One vector per row: a token's hidden state or their mean, projected; dropout before.

    Args:
        config: `summary_type` (last, first, mean, or cls_index: the token that is pointed at), `summary_use_proj`,
            `summary_proj_to_labels`, `num_labels`, `summary_activation`, `summary_first_dropout`.
    """

    def __init__(self, config: ExtConfig) -> None:
        super().__init__()
        if config.summary_type not in SUMMARY_TYPES:
            raise ValueError(f"summary_type must be one of {', '.join(SUMMARY_TYPES)}, got {config.summary_type!r}.")
        self.summary_type = config.summary_type
        width = config.num_labels if config.summary_proj_to_labels and config.num_labels > 0 else config.hidden_size
        self.summary = nn.Linear(config.hidden_size, width) if config.summary_use_proj else nn.Identity()
        self.activation = make_activation(config.summary_activation) if config.summary_activation else nn.Identity()
        self.first_dropout = nn.Dropout(config.summary_first_dropout)

    def forward(self, hidden_states: Tensor, index: Tensor | None = None) -> Tensor:
        """(..., T, C) and the index (...) of the token for cls_index, default the last -> (..., width)"""
        if self.summary_type == "mean":
            row = hidden_states.mean(-2)
        elif self.summary_type == "first":
            row = hidden_states[..., 0, :]
        elif self.summary_type == "last" or index is None:
            row = hidden_states[..., -1, :]
        else:
            index = index[..., None, None].expand(*index.shape, 1, hidden_states.shape[-1])
            row = hidden_states.gather(-2, index).squeeze(-2)
        return self.activation(self.summary(self.first_dropout(row)))


SUMMARY_TYPES = ("last", "first", "mean", "cls_index")


class DoubleHeadsModel(NextTokenHead):
    """Next-token prediction, and which of several rows fits best: how GPT was fine-tuned (Radford et al., 2018)."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        mc_token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mc_labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> DoubleHeadsOutput:
        """The two losses are returned apart: add them up with the weight that the task wants.

        Args:
            input_ids: (B, choices, T), or (B, T) for generation; the other inputs alike.
            mc_token_ids: (B, choices) the token of each row that the choice is read from, default the last one.
            labels: (B, choices, T) token ids, -100 where there is nothing to predict; the shift by one happens here.
            mc_labels: (B) index of the right choice.
            logits_to_keep, output_logits: as `CausalLMModel.forward`.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        tokens_last = 1 if input_ids is not None else 2  # dimensions of one row
        leading = given.shape[:-tokens_last] if given is not None else ()

        def rows(x: Tensor | None) -> Tensor | None:
            # A mask of shape (rows, 1, T, K) and positions that all rows share are taken as they are.
            return x.flatten(0, 1) if x is not None and len(leading) > 1 and x.shape[:2] == leading else x

        outputs = self.run_base(
            input_ids=rows(input_ids),
            attention_mask=rows(attention_mask),
            token_type_ids=rows(token_type_ids),
            position_ids=rows(position_ids),
            inputs_embeds=rows(inputs_embeds),
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state  # (rows, T, C)
        mc_logits = self.multiple_choice_head(hidden_states.unflatten(0, leading), mc_token_ids).squeeze(-1)
        loss = mc_loss = logits = None
        if labels is not None:
            check_labels(labels, (*leading, hidden_states.shape[1]), meaning="one token id or -100 per token")
            kwargs["shift_labels"] = rows(kwargs.get("shift_labels"))
            loss = self.next_token_loss(hidden_states, rows(labels), **kwargs)
        if mc_labels is not None:
            if mc_logits.dim() != 2:
                raise ValueError(
                    f"mc_labels need inputs of shape (batch, choices, tokens) and one score per row, but the scores "
                    f"have shape {tuple(mc_logits.shape)}; summary_use_proj and summary_proj_to_labels must be True."
                )
            mc_labels = mc_labels.reshape(-1).to(mc_logits.device)
            check_labels(mc_labels, leading[:1], name="mc_labels", meaning="the index of the right choice")
            check_classes(mc_labels, mc_logits.shape[1], "mc_labels", "choices")
            mc_loss = cross_entropy(mc_logits, mc_labels)
        if self.wants_logits(labels, output_logits):
            logits = self.project(slice_logits_to_keep(hidden_states, logits_to_keep)).unflatten(0, leading)
        all_hidden_states = outputs.hidden_states
        if all_hidden_states is not None and all_hidden_states[-1] is not None:
            # The official class gives the last one the shape of the input, the others that of the rows.
            all_hidden_states = (*all_hidden_states[:-1], all_hidden_states[-1].unflatten(0, leading))
        return DoubleHeadsOutput(
            loss=loss,
            mc_loss=mc_loss,
            logits=logits,
            mc_logits=mc_logits,
            past_key_values=outputs.past_key_values,
            hidden_states=all_hidden_states,
            attentions=outputs.attentions,
        )


class RowClassifier(TaskHead):
    """One label, several labels, or a number per row."""

    accepts_loss_kwargs = False

    def classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss that fits `config.problem_type`, which is settled by the first labels when it is unset.

        Args:
            logits: (B, num_labels)
            labels: (B) class indices; (B, num_labels) 0/1 floats for several labels; (B) or (B, num_labels) floats
                for regression.
        """
        config, labels = self.config, labels.to(logits.device)
        rows, classes = logits.shape
        if config.problem_type is None:
            if classes == 1:
                config.problem_type = "regression"
            elif labels.dtype in (torch.long, torch.int):
                config.problem_type = "single_label_classification"
            else:
                config.problem_type = "multi_label_classification"
        if config.problem_type == "single_label_classification":
            labels = labels.reshape(-1).long()
            check_labels(labels, (rows,), meaning="one class index per row")
            check_classes(labels, classes, "labels", "num_labels")
            return cross_entropy(logits, labels)
        if config.problem_type == "regression" and classes == 1:
            check_labels(labels.reshape(-1), (rows,), meaning="one number per row")
            return mse_loss(logits.squeeze(-1), labels.reshape(-1).to(logits.dtype))
        check_labels(
            labels, (rows, classes), meaning=f"one value per row and label, problem_type={config.problem_type}"
        )
        if config.problem_type == "regression":
            return mse_loss(logits, labels.to(logits.dtype))
        return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


class SequenceClassificationModel(RowClassifier):
    """Classification of whole rows by an encoder."""

    def classify(self, outputs: ModelOutput) -> Tensor:
        """Outputs of the base model -> (B, num_labels)."""
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> SequenceClassifierOutput:
        """Returns `loss`, `logits` (B, num_labels), `hidden_states`, `attentions`; labels as `classification_loss`."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classify(outputs)
        loss = self.classification_loss(logits, labels) if labels is not None else None
        return self.head_output(SequenceClassifierOutput, outputs, loss=loss, logits=logits)


class LastTokenClassificationModel(RowClassifier):
    """Classification of whole rows by a decoder: the last token that is not padding has seen the whole row."""

    def last_token(self, input_ids: Tensor | None, batch: int) -> Tensor | int:
        """(B,) index of the rightmost token that is not `pad_token_id`; -1 where padding is not known."""
        pad = self.config.pad_token_id
        if pad is None:
            if batch != 1:
                raise ValueError(
                    f"a batch of {batch} rows needs config.pad_token_id, to find each row's last token: "
                    "set model.config.pad_token_id = tokenizer.pad_token_id."
                )
            return -1
        if input_ids is None:
            return -1
        places = torch.arange(input_ids.shape[-1], device=input_ids.device, dtype=torch.int32)
        return (places * (input_ids != pad)).argmax(-1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> SequenceClassifierOutputWithPast:
        """Returns `loss`, `logits` (B, num_labels), ...; with `inputs_embeds` padding cannot be told, and the last
        position is read."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        last = self.last_token(input_ids, hidden_states.shape[0])
        logits = self.score(hidden_states[rows, last.to(rows.device) if isinstance(last, Tensor) else last])
        return SequenceClassifierOutputWithPast(
            loss=self.classification_loss(logits, labels) if labels is not None else None,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ImageClassificationModel(RowClassifier):
    """Classification of whole images."""

    def classify(self, outputs: ModelOutput) -> Tensor:
        """Outputs of the base model -> (B, num_labels)."""
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> ImageClassifierOutput:
        """Returns `loss`, `logits` (B, num_labels), `hidden_states`, `attentions`; labels as `classification_loss`,
        images as the base model takes them."""
        outputs = self.run_base(
            pixel_values=pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            **kwargs,
        )
        logits = self.classify(outputs)
        loss = self.classification_loss(logits, labels) if labels is not None else None
        return self.head_output(ImageClassifierOutput, outputs, loss=loss, logits=logits)


class PixelDecoder(nn.Sequential):
    """One linear layer from a token to the pixels of its patch, as a convolution over the grid of tokens.

    Args:
        width: C.
        channels: I, of the images.
        stride: height and width of a patch in pixels.
    """

    def __init__(self, *, width: int, channels: int, stride: int) -> None:
        super().__init__(nn.Conv2d(width, stride**2 * channels, kernel_size=1), nn.PixelShuffle(stride))


class MaskedImageModel(TaskHead):
    """Masked image modelling (SimMIM, Xie et al., 2021, https://arxiv.org/abs/2111.09886): fill in masked patches.

    The module is `decoder`, (B, C, h, w) -> (B, I, height, width).
    """

    accepts_loss_kwargs = False

    def pixels_per_feature(self) -> tuple[int, int]:
        """Height and width in pixels that a token of the base model's output stands for."""
        return self.config.patch_shape

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> MaskedImageModelingOutput:
        """The images as the model fills them in, and the mean absolute error on masked patches.

        Args:
            bool_masked_pos: (B, N), True at patches that are hidden from the model; without it there is no loss.

        Returns:
            `loss`, `reconstruction` (B, I, height, width), `hidden_states`, `attentions`. The reconstruction is of
            whole tokens: it may be a little smaller than the image, or larger.

        Raises:
            ValueError: a mask where the decoder does not give back the size of the image, so that nothing can be
                compared.
        """
        stride, needed = (self.config.encoder_stride,) * 2, self.pixels_per_feature()
        if bool_masked_pos is not None and needed != stride:
            raise ValueError(
                f"with bool_masked_pos, encoder_stride ({self.config.encoder_stride}) must be {needed[0]} (and "
                f"{needed[1]}), the pixels that a token stands for: the reconstruction has the size of the image then."
            )
        outputs = self.run_base(
            pixel_values=pixel_values,
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            **kwargs,
        )
        base = getattr(self, self.base_model_prefix)
        reconstruction = self.decoder(base.feature_map(outputs.last_hidden_state, pixel_values))
        loss = None
        if bool_masked_pos is not None:
            masked = bool_masked_pos.view(-1, *base.patch_grid_of(pixel_values))
            loss = masked_patch_loss(reconstruction, pixel_values, masked, self.config.patch_shape)
        return self.head_output(MaskedImageModelingOutput, outputs, loss=loss, reconstruction=reconstruction)


def masked_patch_loss(
    reconstruction: Tensor, pixel_values: Tensor, masked: Tensor, patch_size: tuple[int, int]
) -> Tensor:
    """Mean absolute error over the pixels of masked patches, as far as image and reconstruction go.

    Args:
        reconstruction, pixel_values: (B, I, height, width), of whole tokens and of the image.
        masked: (B, h, w), True at masked patches.
        patch_size: height and width of a patch.

    Returns:
        Scalar; 0 where nothing is masked.
    """
    height, width = (min(sizes) for sizes in zip(reconstruction.shape[2:], pixel_values.shape[2:]))
    mask = masked.repeat_interleave(patch_size[0], 1).repeat_interleave(patch_size[1], 2)[:, :height, :width]
    error = (pixel_values[..., :height, :width] - reconstruction[..., :height, :width]).abs()
    # The small number is the official one: the loss of a batch without masks is 0 and not NaN.
    return (error * mask[:, None]).sum() / (mask.sum() + 1e-5) / reconstruction.shape[1]


class TokenLabelHead(TaskHead):
    """A label per token."""

    accepts_loss_kwargs = True

    def classify(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, num_labels)"""
        raise NotImplementedError

    def token_output(self, outputs: ModelOutput, labels: Tensor | None, **kwargs: object) -> TokenClassifierOutput:
        """Base model's outputs and labels (B, T), -100 where there is none -> loss and logits (B, T, num_labels)."""
        logits = self.classify(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            check_labels(labels, tuple(logits.shape[:2]), meaning="one class index or -100 per token")
            loss = mean_or_share(logits, labels, kwargs.get("num_items_in_batch"))
        return self.head_output(TokenClassifierOutput, outputs, loss=loss, logits=logits)


class TokenClassificationModel(TokenLabelHead, TokenLabels):
    """A label per token of an encoder."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> TokenClassifierOutput:
        """Returns `loss`, `logits` (B, T, num_labels), `hidden_states`, `attentions`."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            skip_padding=kwargs.pop("skip_padding", self.skip_padding_with(labels, attention_mask)),
            **kwargs,
        )
        return self.token_output(outputs, labels, **kwargs)


class DecoderTokenClassificationModel(TokenLabelHead):
    """A label per token of a decoder."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> TokenClassifierOutput:
        """Returns `loss`, `logits` (B, T, num_labels), `hidden_states`, `attentions`."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return self.token_output(outputs, labels, **kwargs)


class SpanHead(TaskHead):
    """Start and end of an answer inside the row; the module is `qa_outputs`, C -> 2."""

    accepts_loss_kwargs = False
    output_class: type[ModelOutput] = QuestionAnsweringModelOutput

    def project_span(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, 2)"""
        return self.qa_outputs(hidden_states)

    def span_logits(self, outputs: ModelOutput) -> Tensor:
        """Base model's outputs -> (B, T, 2)"""
        return self.project_span(outputs[0])

    def span_output(
        self, outputs: ModelOutput, start_positions: Tensor | None, end_positions: Tensor | None
    ) -> ModelOutput:
        """Base model's outputs and (B) positions -> loss and two (B, T) logits. Positions outside are ignored."""
        if self.qa_outputs.out_features != 2:
            raise ValueError(
                f"question answering needs num_labels=2 (start and end), the configuration says "
                f"{self.qa_outputs.out_features}."
            )
        start_logits, end_logits = (x.squeeze(-1).contiguous() for x in self.span_logits(outputs).split(1, dim=-1))
        loss = None
        if start_positions is not None and end_positions is not None:
            batch, tokens = start_logits.shape
            losses = []
            for name, logits, positions in (
                ("start_positions", start_logits, start_positions),
                ("end_positions", end_logits, end_positions),
            ):
                positions = positions.reshape(-1).to(logits.device)
                check_labels(positions, (batch,), name=name, meaning="one token index per row")
                losses.append(cross_entropy(logits, positions.clamp(0, tokens), ignore_index=tokens))
            loss = sum(losses) / 2
        return self.head_output(self.output_class, outputs, loss=loss, start_logits=start_logits, end_logits=end_logits)


class QuestionAnsweringModel(SpanHead):
    """Extractive question answering over an encoder."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: object,
    ) -> QuestionAnsweringModelOutput:
        """Returns `loss`, `start_logits` and `end_logits` (B, T), `hidden_states`, `attentions`.

        The official loss is a softmax over all positions of the padded row, so with labels padding is computed too.
        """
        if start_positions is not None and end_positions is not None:
            kwargs.setdefault("skip_padding", False)
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return self.span_output(outputs, start_positions, end_positions)


class DecoderQuestionAnsweringModel(SpanHead):
    """Extractive question answering over a decoder."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: object,
    ) -> QuestionAnsweringModelOutput:
        """Returns `loss`, `start_logits` and `end_logits` (B, T), `hidden_states`, `attentions`."""
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        return self.span_output(outputs, start_positions, end_positions)


class MultipleChoiceModel(TaskHead):
    """Which of several rows fits best; every choice is a row of its own in the base model."""

    accepts_loss_kwargs = False

    def classify(self, outputs: ModelOutput) -> Tensor:
        """Outputs of the base model -> (rows, 1)."""
        raise NotImplementedError

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> MultipleChoiceModelOutput:
        """Inputs have shape (B, choices, T), `inputs_embeds` (B, choices, T, C), `labels` (B).

        Returns `loss`, `logits` (B, choices), `hidden_states`, `attentions`.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.dim() < 3:
            found = None if given is None else tuple(given.shape)
            raise ValueError(f"multiple choice needs inputs of shape (batch, choices, tokens), got {found}.")
        batch, choices = given.shape[:2]

        def rows(x: Tensor | None) -> Tensor | None:
            return x.flatten(0, 1) if x is not None else None

        outputs = self.run_base(
            input_ids=rows(input_ids),
            attention_mask=rows(attention_mask),
            token_type_ids=rows(token_type_ids),
            position_ids=rows(position_ids),
            inputs_embeds=rows(inputs_embeds),
            **kwargs,
        )
        logits = self.classify(outputs).view(batch, choices)
        loss = None
        if labels is not None:
            check_labels(labels, (batch,), meaning="the index of the right choice per row")
            check_classes(labels, choices, "labels", "choices")
            loss = cross_entropy(logits, labels)
        return self.head_output(MultipleChoiceModelOutput, outputs, loss=loss, logits=logits)


def image_classifier(width: int, num_labels: int) -> nn.Module:
    """C -> num_labels; with no labels, nothing: the features are the output."""
    return TaskLinear(width, num_labels) if num_labels > 0 else nn.Identity()


def classifier_dropout(config: ExtConfig, fallback: float) -> nn.Dropout:
    """The dropout before a classifier: `classifier_dropout` where it is set."""
    probability = getattr(config, "classifier_dropout", None)
    return nn.Dropout(fallback if probability is None else probability)


class TaskLinear(nn.Linear):
    """A layer of a task head, with its weight registered after its bias: new, and so not to be quantised.

    The library keeps a model's output layer out of quantisation by the name of the last registered parameter; behind a
    bias it does not recognise the layer and quantises it. Layers before it are kept out by their class: bitsandbytes
    replaces plain linear layers only.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._parameters["weight"] = self._parameters.pop("weight")
