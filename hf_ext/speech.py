"""Models of speech: the skeletons and heads over spectrograms.

The encoder reads a log-mel spectrogram of one length, so there is no padding to leave out; short clips are padded with
silence, which is heard.

Shapes: B batch, M mel bins, L frames of the spectrogram, S encoder tokens, T decoder tokens, C model width,
V vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import (
    BaseModelOutput,
    ModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing

from hf_ext.heads import RowClassifier
from hf_ext.layers.spec_augment import random_spans
from hf_ext.modeling import BlockStack
from hf_ext.seq2seq import EncoderDecoderModel, EncoderUser, LayerDrop, Seq2SeqLMModel


class SpeechEncoder(LayerDrop, BlockStack):
    """Bidirectional encoder of spectrograms."""

    stride = 2
    """Frames of the spectrogram for one token."""

    def check_features(self, input_features: Tensor | None) -> None:
        """Raise ValueError for a spectrogram of another shape."""
        expected = (self.config.num_mel_bins, self.stride * self.config.max_source_positions)
        if input_features is None:
            raise ValueError("input_features are needed: a log-mel spectrogram, as the feature extractor makes it.")
        if input_features.dim() != 3 or tuple(input_features.shape[1:]) != expected:
            raise ValueError(
                f"input_features must have shape (batch, {expected[0]}, {expected[1]}): num_mel_bins="
                f"{expected[0]} and {self.stride} * max_source_positions = {expected[1]} frames, got "
                f"{tuple(input_features.shape)}. Pad or cut the spectrogram to {expected[1]} frames; the feature "
                "extractor of this checkpoint does by default."
            )
        if input_features.shape[0] == 0 and not is_tracing(input_features):
            raise ValueError(f"input_features have shape {tuple(input_features.shape)}: there is no row in them.")

    @merge_with_config_defaults
    @can_return_tuple
    def forward(
        self, input_features: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: object
    ) -> BaseModelOutput:
        """Hidden states after the final norm.

        Args:
            input_features: (B, M, L) log-mel spectrogram with L = `stride` * `config.max_source_positions`.
            attention_mask: passed over: all frames are heard.

        Returns:
            `last_hidden_state` (B, S, C), and on request `hidden_states` and `attentions`.

        Raises:
            ValueError: a spectrogram of another shape.
        """
        self.check_features(input_features)
        hidden_states = self.embed(input_features=input_features)
        self.drop_unused(kwargs, None)
        outputs = self.run_blocks(hidden_states, attention_mask=None, return_dict=True, **kwargs)
        return BaseModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class SpeechEncoderDecoderModel(EncoderDecoderModel):
    """A base model of an encoder that reads spectrograms and a decoder that writes text."""

    def augment(self, input_features: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, M, L) and which frames are real (B, L) -> the same, in training with spans set to zero if the
        configuration says so (SpecAugment)."""
        config = self.config
        if not (config.apply_spec_augment and self.training):
            return input_features
        rows, bins, frames = input_features.shape
        if config.mask_time_prob > 0:
            blank = random_spans(
                rows,
                frames,
                share=config.mask_time_prob,
                span=config.mask_time_length,
                least=config.mask_time_min_masks,
                lengths=None if attention_mask is None else attention_mask.sum(-1).tolist(),
            )
            input_features = input_features.masked_fill(blank.to(input_features.device)[:, None], 0)
        if config.mask_feature_prob > 0:
            blank = random_spans(
                rows,
                bins,
                share=config.mask_feature_prob,
                span=config.mask_feature_length,
                least=config.mask_feature_min_masks,
            )
            input_features = input_features.masked_fill(blank.to(input_features.device)[:, :, None], 0)
        return input_features

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        past_key_values: Cache | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqModelOutput:
        """Hidden states of the decoder.

        Args:
            input_features: (B, M, L) log-mel spectrogram.
            attention_mask: (B, L) real frames, which SpecAugment looks at and nothing else.
            decoder_position_ids: (B or 1, T), default those that follow the cached tokens.
            Others, and what is returned: as `EncoderDecoderModel.forward`.

        Raises:
            ValueError: a spectrogram of another shape, contradictory inputs, a decoder without input, ids or positions
                outside their table.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.default_decoder_ids(None)
        if encoder_outputs is None and input_features is not None:
            input_features = self.augment(input_features, attention_mask)
        return self.decode(
            self.encode(encoder_outputs, input_features=input_features, **kwargs),
            attention_mask=None,
            decoder_input_ids=decoder_input_ids,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_attention_mask=decoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_ids=decoder_position_ids,
            **kwargs,
        )


# --- heads --------------------------------------------------------------------------------------------------------


class SpeechLMModel(Seq2SeqLMModel):
    """Transcription: the decoder predicts the labels, reading those before."""

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        past_key_values: Cache | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqLMOutput:
        """Loss and logits, as `Seq2SeqLMModel.forward` on the inputs of `SpeechEncoderDecoderModel.forward`.

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict, at most `config.max_target_positions`.
        """
        limit = self.config.max_target_positions
        if labels is not None and labels.shape[-1] > limit:
            raise ValueError(
                f"labels have {labels.shape[-1]} tokens, but the decoder has positions for {limit} "
                f"(max_target_positions={limit}); truncate the transcripts, or leave out clips with longer ones."
            )
        return self.predict(
            input_features=input_features,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            decoder_inputs_embeds=decoder_inputs_embeds,
            decoder_position_ids=decoder_position_ids,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            **kwargs,
        )


class AudioClassificationModel(EncoderUser, RowClassifier):
    """Classification of whole clips by the encoder alone."""

    encoder: SpeechEncoder

    def classify(self, outputs: ModelOutput) -> Tensor:
        """Outputs of the encoder -> (B, num_labels)."""
        raise NotImplementedError

    def blocks(self) -> Sequence[nn.Module]:
        """The encoder's blocks."""
        return self.encoder.blocks()

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | list | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> SequenceClassifierOutput:
        """Returns `loss`, `logits` (B, num_labels), and on request `hidden_states`, `attentions`.

        Args:
            input_features: (B, M, L) log-mel spectrogram.
            encoder_outputs: what the encoder returned before, with all hidden states if they are summed; then it does
                not run.
            labels: as `classification_loss`.
        """
        if self.config.use_weighted_layer_sum:
            kwargs["output_hidden_states"] = True
        outputs = self.encode(encoder_outputs, input_features=input_features, **kwargs)
        if self.config.use_weighted_layer_sum and outputs.hidden_states is None:
            raise ValueError("use_weighted_layer_sum=True needs encoder_outputs with all hidden_states.")
        logits = self.classify(outputs)
        loss = self.classification_loss(logits, labels) if labels is not None else None
        return self.head_output(SequenceClassifierOutput, outputs, loss=loss, logits=logits)
