"""Encoder-decoders: the skeleton, and the task heads over it (Vaswani et al., 2017, https://arxiv.org/abs/1706.03762).

The encoder and the decoder are models of their own, `SequenceEncoder` and `SequenceDecoder`, under the names `encoder`
and `decoder`; `EncoderDecoderModel` runs one after the other. On a batch with padding the encoder computes real tokens
only, and outside generation so does the cross-attention (`CrossPacking`). In generation the keys and values of the
encoder's output are projected once, for all beams of a text, and kept in an `EncoderDecoderCache`.

Shapes: B batch, S encoder tokens, T decoder tokens, N real encoder tokens, C model width, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutput,
    ModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
)
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing

from hf_ext.configuration import ExtConfig
from hf_ext.heads import CrossAttendingLMModel, RowClassifier, SpanHead, TaskHead, VocabularyHead, check_labels
from hf_ext.layers.packing import CrossPacking
from hf_ext.losses import IGNORE_INDEX
from hf_ext.modeling import DecoderModel, EncoderModel

SHARED = ("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions")
# Attention in which several rows of the decoder can be more queries of one row. Others make of the mask, which has a
# place for each key, what is padding among the queries too.
TOGETHER = ("sdpa", "eager")
RECORDED = ("past_key_values", "decoder_hidden_states", "decoder_attentions", "cross_attentions", *SHARED)


def shift_right(ids: Tensor, *, start: int | None, pad: int | None) -> Tensor:
    """Teacher forcing: the decoder reads, in front of each token, the one before it.

    Args:
        ids: (B, T) token ids or labels; -100 becomes padding.
        start: `decoder_start_token_id`; pad: `pad_token_id`.

    Returns:
        (B, T)

    Raises:
        ValueError: one of the two ids is not set.
    """
    for name, value in (("decoder_start_token_id", start), ("pad_token_id", pad)):
        if value is None:
            raise ValueError(f"the decoder's input is made from the labels, which needs {name}: set config.{name}.")
    first = torch.full_like(ids[:, :1], start)
    return torch.cat([first, ids[:, :-1].masked_fill(ids[:, :-1] == IGNORE_INDEX, pad)], dim=1)


class LayerDrop:
    """Whole blocks are left out at random in training (Fan et al., 2019, https://arxiv.org/abs/1909.11556), and all
    blocks run otherwise. A mixin before a block stack."""

    layer_drop: float | int = 0.0
    """Probability of leaving a block out."""

    def blocks_to_run(self) -> Iterable[nn.Module]:
        if not self.training or not self.layer_drop:
            return self.blocks()
        return (block for block in self.blocks() if torch.rand([]) >= self.layer_drop)


class SequenceEncoder(LayerDrop, EncoderModel):
    """Encoder of an encoder-decoder: bidirectional whatever `config.is_decoder` says of the whole model."""

    def is_causal(self) -> bool:
        return False


class SequenceDecoder(LayerDrop, DecoderModel):
    """Decoder of an encoder-decoder: every block has cross-attention, which is left out where no encoder's output is
    given. Blocks take `encoder_packing`, a plan for the encoder's output if that is packed, else None."""

    def attends_to_encoder(self) -> bool:
        return True


class EncoderUser:
    """A model that runs its `encoder`, unless it is given what the encoder returned before."""

    encoder: nn.Module

    def encode(self, encoder_outputs: ModelOutput | tuple | list | None, **inputs: object) -> ModelOutput:
        """The encoder's output: the caller's, as an output or as a tuple, else that of `inputs`."""
        if encoder_outputs is None:
            return self.encoder(return_dict=True, **inputs)
        if isinstance(encoder_outputs, ModelOutput):
            return encoder_outputs
        names = ("last_hidden_state", "hidden_states", "attentions")
        return BaseModelOutput(**dict(zip(names, encoder_outputs, strict=False)))


class EncoderDecoderModel(EncoderUser):
    """A base model of `encoder` and `decoder`. A mixin before `Ext<Arch>PreTrainedModel`."""

    encoder: SequenceEncoder
    decoder: SequenceDecoder

    def blocks(self) -> list[nn.Module]:
        """The blocks of both halves."""
        return [*self.encoder.blocks(), *self.decoder.blocks()]

    def decoder_inputs_from(self, ids: Tensor) -> Tensor:
        """What the decoder reads while it is to predict `ids` (B, T), which may be labels -> (B, T)."""
        return shift_right(ids, start=self.config.decoder_start_token_id, pad=self.config.pad_token_id)

    def default_decoder_ids(self, input_ids: Tensor | None) -> Tensor:
        """The decoder's input where the caller gives none: an error, unless the architecture has a default."""
        raise ValueError(
            "the decoder has no input: give decoder_input_ids or decoder_inputs_embeds, or labels to a head that "
            "predicts them."
        )

    def pack_encoder(
        self, states: Tensor, attention_mask: Tensor | None, *, cached: bool, **kwargs: object
    ) -> tuple[Tensor, Tensor | None, CrossPacking | None]:
        """The encoder's output as the decoder's blocks are to have it: (B, S, C) -> (1, N, C) and the plan, where
        padding can be left out, else (B, S, C) and the mask. A cache keeps keys and values in rows."""
        if attention_mask is None:
            return states, None, None
        if not is_tracing(states) and tuple(attention_mask.shape[-1:]) != tuple(states.shape[1:2]):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, but the encoder's output has "
                f"{states.shape[1]} tokens; it needs one entry for every token of the encoder."
            )
        plan = None if cached else self.encoder.padding_plan(attention_mask, **kwargs)
        if plan is None:
            return states, attention_mask, None
        return plan.pack(states), None, CrossPacking(plan)

    def for_rows(self, rows: int, states: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The encoder's output (B, S, C) and its mask for B * n rows of the decoder: as they are, where the attention
        in use reads them together, else n of each.

        Raises:
            ValueError: the rows are no multiple of B.
        """
        if not is_tracing(states) and rows % states.shape[0]:
            raise ValueError(
                f"the decoder has {rows} rows and the encoder's output {states.shape[0]}: give as many, or a multiple, "
                "where several rows of the decoder, one after the other, read one of the encoder."
            )
        if self.config._attn_implementation in TOGETHER:
            return states, attention_mask
        copies = rows // states.shape[0]
        mask = None if attention_mask is None else attention_mask.repeat_interleave(copies, 0)
        return states.repeat_interleave(copies, 0), mask

    def decode(
        self,
        encoder_outputs: ModelOutput,
        *,
        attention_mask: Tensor | None,
        decoder_input_ids: Tensor | None,
        decoder_inputs_embeds: Tensor | None,
        decoder_attention_mask: Tensor | None,
        past_key_values: Cache | None,
        use_cache: bool | None,
        **kwargs: object,
    ) -> Seq2SeqModelOutput:
        """The decoder over the encoder's output: arguments and result as those of `forward`."""
        if decoder_input_ids is not None and decoder_inputs_embeds is not None:
            raise ValueError("both decoder_input_ids and decoder_inputs_embeds were given; the decoder takes one.")
        states = encoder_outputs[0]
        if use_cache is None:
            use_cache = self.config.use_cache
        cached = past_key_values is not None or bool(use_cache and not self.training)
        given = decoder_input_ids if decoder_input_ids is not None else decoder_inputs_embeds
        together = given.shape[0] != states.shape[0]
        if together:
            states, attention_mask = self.for_rows(given.shape[0], states, attention_mask)
        packed, encoder_mask, packing = self.pack_encoder(states, attention_mask, cached=cached or together, **kwargs)
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=packed,
            encoder_attention_mask=encoder_mask,
            encoder_packing=packing,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs[0],
            encoder_hidden_states=encoder_outputs.get("hidden_states"),
            encoder_attentions=encoder_outputs.get("attentions"),
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqModelOutput:
        """Hidden states of the decoder.

        Args:
            input_ids: (B, S) of the encoder; or inputs_embeds: (B, S, C).
            attention_mask: (B, S), 1 at the encoder's real tokens.
            decoder_input_ids: (B, T), those that no cache holds; or decoder_inputs_embeds: (B, T, C). A multiple n of B
                rows: each row of the encoder is read by n of them, one after the other.
            decoder_attention_mask: (B, P + T), 1 at real tokens, cached ones included; default all.
            encoder_outputs: what the encoder returned before, then it does not run; an output or a tuple.
            past_key_values: an `EncoderDecoderCache`; one is made when `use_cache` and the model is in eval mode.

        Returns:
            `last_hidden_state` (B, T, C), `past_key_values`, `encoder_last_hidden_state` (B, S, C), and on request
            `decoder_hidden_states`, `decoder_attentions`, `cross_attentions`, `encoder_hidden_states`,
            `encoder_attentions`.

        Raises:
            ValueError: contradictory inputs, a decoder without input, ids or positions outside their table, rows of the
                decoder that are no multiple of the encoder's.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.default_decoder_ids(input_ids)
        encoder_outputs = self.encode(
            encoder_outputs, input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
        )
        return self.decode(
            encoder_outputs,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_attention_mask=decoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


# --- heads --------------------------------------------------------------------------------------------------------


class Seq2SeqHead(TaskHead):
    """A head over an `EncoderDecoderModel`: what both halves recorded is handed on."""

    def head_output(self, kind: type[ModelOutput], outputs: ModelOutput, **fields: Tensor | None) -> ModelOutput:
        return kind(**fields, **{name: outputs.get(name) for name in RECORDED})


class Seq2SeqLMModel(Seq2SeqHead, VocabularyHead):
    """Generation of one text from another: the decoder predicts the labels, reading those before."""

    def __init__(self, config: ExtConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # tells Trainer that labels are not shifted when it counts them

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(B, T) -> (B, T). `DataCollatorForSeq2Seq` calls it, for a `Trainer` that smooths labels."""
        return self.base_model.decoder_inputs_from(labels)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: object,
    ) -> tuple[Tensor | None, dict[str, object]]:
        """Rows for beams and for several samples, as `generate` calls it. The encoder's output and its mask stay one
        row for each text (`CrossAttentionCore.attend_together`): the library repeats them, and with them the
        projected keys and values of every layer."""
        if (
            is_encoder_decoder
            and model_kwargs.get("encoder_outputs") is not None
            and self.config._attn_implementation in TOGETHER
        ):
            shared = {name: model_kwargs.pop(name, None) for name in ("encoder_outputs", "attention_mask")}
            input_ids, expanded = super()._expand_inputs_for_generation(expand_size, False, input_ids, **model_kwargs)
            return input_ids, {**expanded, **shared}
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    def _reorder_cache(self, past_key_values: Cache, beam_idx: Tensor) -> Cache:
        """The beams that go on, beam_idx (B * beams,); beam search calls it after each step. The encoder's half stays
        as it is: all beams of a text read the same."""
        getattr(past_key_values, "self_attention_cache", past_key_values).reorder_cache(beam_idx)
        return past_key_values

    def predict(
        self,
        *,
        decoder_input_ids: Tensor | None,
        decoder_inputs_embeds: Tensor | None,
        labels: Tensor | None,
        use_cache: bool | None,
        logits_to_keep: int | Tensor,
        output_logits: bool | None,
        **inputs: object,
    ) -> Seq2SeqLMOutput:
        """Loss and logits, whatever the encoder reads: `inputs` are the base model's, the others as in `forward`."""
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        outputs = self.run_base(
            decoder_input_ids=decoder_input_ids,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **inputs,
        )
        hidden_states = outputs.last_hidden_state
        loss = None
        if labels is not None:
            check_labels(labels, tuple(hidden_states.shape[:2]), meaning="one token id or -100 per decoder token")
            loss = self.loss_over_vocabulary(hidden_states, labels, **inputs)
        logits = None
        if self.wants_logits(labels, output_logits):
            logits = self.project(slice_logits_to_keep(hidden_states, logits_to_keep))
        return self.head_output(Seq2SeqLMOutput, outputs, loss=loss, logits=logits)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqLMOutput:
        """Loss and logits.

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict. The decoder's input is made from them,
                shifted right by one; a decoder's input that is given as well is used as it is, and the labels are
                aligned with it. No cache is made.
            logits_to_keep: how many of the last positions get logits, 0 for all, or a tensor of positions.
            output_logits: whether to return logits in a training step with labels.
            Others: as `EncoderDecoderModel.forward`.

        Returns:
            `loss`, `logits` (B, T or fewer, V) or None, and what the base model returned.
        """
        return self.predict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            **kwargs,
        )


class FinalLogitsBias:
    """The buffer `final_logits_bias` (1, V) of official files, added to the logits. A mixin before `Seq2SeqLMModel`."""

    _keys_to_ignore_on_load_missing = ["final_logits_bias"]  # some official files do not hold it

    def logits_bias(self) -> Tensor:
        return self.final_logits_bias[0]

    def reset_buffers(self) -> None:
        """Zeros, where no file has filled it."""
        init.zeros_(self.final_logits_bias)

    def resize_logits_bias(self, size: int) -> None:
        """Cut it, or append zeros."""
        grown = nn.functional.pad(self.final_logits_bias, (0, size - self.final_logits_bias.shape[-1]))
        self.final_logits_bias = nn.Buffer(grown)

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> nn.Module:
        """As the library's, and the bias with it."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.resize_logits_bias(self.get_output_embeddings().weight.shape[0])
        return embeddings


class EndTokenClassificationModel(Seq2SeqHead, RowClassifier):
    """Classification of whole rows: the text is read by both halves, and the decoder's last end token decides."""

    def classify(self, hidden_states: Tensor) -> Tensor:
        """(B, C) -> (B, num_labels)"""
        raise NotImplementedError

    def last_end(self, input_ids: Tensor) -> Tensor:
        """(B, S) -> (B,) place of the last `eos_token_id`.

        Raises:
            ValueError: a row has none.
        """
        ends = torch.as_tensor(self.config.eos_token_id, device=input_ids.device)
        found = torch.isin(input_ids, ends)
        if not is_tracing(input_ids) and not found.any(-1).all():
            raise ValueError(
                f"each row of input_ids needs an end token (eos_token_id={self.config.eos_token_id}), from which the "
                "label is read; the tokenizer of this checkpoint appends it."
            )
        places = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.int32)
        return (places * found).argmax(-1)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqSequenceClassifierOutput:
        """Returns `loss`, `logits` (B, num_labels) and what the base model returned; labels as `classification_loss`.

        Raises:
            ValueError: no `input_ids`, in which the end token is looked for, or a row without one.
        """
        if input_ids is None:
            raise ValueError("classification needs input_ids: the end token is looked for in them.")
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache if labels is None else False,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        rows = torch.arange(hidden_states.shape[0], device=hidden_states.device)
        logits = self.classify(hidden_states[rows, self.last_end(input_ids).to(rows.device)])
        loss = self.classification_loss(logits, labels) if labels is not None else None
        return self.head_output(Seq2SeqSequenceClassifierOutput, outputs, loss=loss, logits=logits)


class Seq2SeqQuestionAnsweringModel(Seq2SeqHead, SpanHead):
    """Extractive question answering: the text is read by both halves, and the decoder points at the answer."""

    output_class = Seq2SeqQuestionAnsweringModelOutput

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqQuestionAnsweringModelOutput:
        """Returns `loss`, `start_logits` and `end_logits` (B, T), and what the base model returned."""
        labelled = start_positions is not None and end_positions is not None
        outputs = self.run_base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=False if labelled else use_cache,
            **kwargs,
        )
        return self.span_output(outputs, start_positions, end_positions)


class SequenceDecoderLMModel(CrossAttendingLMModel):
    """A decoder on its own, with a vocabulary head. As in the official classes, labels are aligned with the logits:
    the shift is the caller's; and positions count from the start of a row, padding included."""

    def __init__(self, config: ExtConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForMaskedLM"  # tells Trainer that labels are not shifted when it counts them

    def wants_cache(self, use_cache: bool | None, labels: Tensor | None) -> bool | None:
        return use_cache

    def next_token_loss(self, hidden_states: Tensor, labels: Tensor, **kwargs: object) -> Tensor:
        """hidden_states (B, T, C), labels (B, T), aligned -> scalar."""
        return super().next_token_loss(hidden_states, labels, **{"shift_labels": labels, **kwargs})

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> ModelOutput:
        """As `CrossAttendingLMModel.forward`; labels: (B, T) the token that each position is to predict, or -100."""
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            **kwargs,
        )
