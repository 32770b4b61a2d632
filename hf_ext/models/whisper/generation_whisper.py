"""Generation of Whisper: prompts of special tokens, timestamps, and clips of any length (Radford et al., 2022,
https://arxiv.org/abs/2212.04356, section 3.8 and appendix).

The decoder is told language, task and whether to write timestamps by the tokens that it starts with. A clip longer than
the encoder's window is transcribed window by window: the timestamps that the model writes say where a segment ends, and
the next window starts at the last one that was finished. A window whose text repeats itself or is improbable is tried
again with a higher temperature.

Shapes: B batch, M mel bins, L frames of the spectrogram, P prompt tokens, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperNoSpeechDetection,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging

from hf_ext.models.whisper.languages import CODES
from hf_ext.models.whisper.rows import join_rows, split_rows
from hf_ext.models.whisper.token_times import token_times
from hf_ext.models.whisper.windows import (
    Clip,
    Clock,
    compression_ratio,
    mean_logprob,
    more_rows,
    pad_rows,
    previous_text,
    without_padding,
)

logger = logging.get_logger(__name__)

TASKS = ("translate", "transcribe")
# Kept in the generation configuration too, so that a checkpoint can have its own default.
THRESHOLDS = ("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold", "condition_on_prev_tokens")
CONDITION_TYPES = ("first-segment", "all-segments")


class WhisperGeneration:
    """`generate` for speech. A mixin before `GenerationMixin`."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: object) -> dict:
        """Rows that read earlier text are padded on the left: positions count from the first real token."""
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and kwargs.get("decoder_position_ids") is None:
            positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
            kwargs["decoder_position_ids"] = positions[:, -input_ids.shape[1] :]
        return super().prepare_inputs_for_generation(input_ids, **kwargs)

    def _prepare_decoder_input_ids_for_generation(
        self, batch_size: int, model_input_name: str, model_kwargs: dict, *args: object, **kwargs: object
    ) -> tuple[Tensor, dict]:
        # The library would put the start token in front of text from the window before.
        if "decoder_input_ids" in model_kwargs:
            return model_kwargs.pop("decoder_input_ids"), model_kwargs
        return super()._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )

    def generate(
        self,
        input_features: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: list | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        synced_gpus: bool = False,
        return_timestamps: bool | None = None,
        task: str | None = None,
        language: str | list[str] | None = None,
        is_multilingual: bool | None = None,
        prompt_ids: Tensor | None = None,
        prompt_condition_type: str | None = None,
        condition_on_prev_tokens: bool | None = None,
        temperature: float | tuple[float, ...] | None = None,
        compression_ratio_threshold: float | None = None,
        logprob_threshold: float | None = None,
        no_speech_threshold: float | None = None,
        num_segment_frames: int | None = None,
        attention_mask: Tensor | None = None,
        time_precision: float = 0.02,
        time_precision_features: float = 0.01,
        return_token_timestamps: bool | None = None,
        return_segments: bool = False,
        return_dict_in_generate: bool | None = None,
        force_unique_generate_call: bool | None = None,
        monitor_progress: Callable[[Tensor], None] | None = None,
        **kwargs: object,
    ) -> Tensor | dict | ModelOutput:
        """Transcribe or translate speech of any length; arguments and results are those of the official class.

        Args:
            input_features: (B, M, L) log-mel spectrogram; with L beyond the encoder's window it is transcribed window
                by window, which needs timestamps. Or `encoder_outputs`, for one window.
            return_timestamps: whether the model writes timestamps.
            task: "transcribe" or "translate".
            language: name, code or token, or one for each row; without it a multilingual model finds out.
            is_multilingual: overrides the generation configuration.
            prompt_ids: (P,) earlier text that the transcription is to go on from.
            prompt_condition_type: "first-segment", or "all-segments" together with `condition_on_prev_tokens`.
            condition_on_prev_tokens: whether a window reads the text of those before.
            temperature: of sampling; several are tried in turn while a threshold is not met.
            compression_ratio_threshold: text that zlib shortens more is tried again.
            logprob_threshold: text of a lower mean log-probability is tried again.
            no_speech_threshold: a window with a higher probability of silence, and of improbable text, is left out.
            num_segment_frames: of no effect; a window is what the encoder takes.
            attention_mask: (B, L) real frames; needed for several long clips.
            time_precision, time_precision_features: seconds of an encoder token and of a frame.
            return_token_timestamps: whether to return when each token was spoken.
            return_segments: whether to return the segments beside the tokens.
            force_unique_generate_call: one window only, with prompt and end token in the result.
            monitor_progress: called before each window with (B, 2) frames done and in all.
            Others: as `GenerationMixin.generate`.

        Returns:
            (B, T) tokens without prompt and end token; or a dictionary of `sequences`, `token_timestamps`, `segments`
            (for each row, with `start`, `end`, `tokens`, `idxs` and `result`); or, with `return_dict_in_generate` and
            without timestamps, the output of `GenerationMixin.generate`.

        Raises:
            ValueError: a language or task that the model does not know, forced ids of this call that contradict
                them, timestamps or token times that the generation configuration has no data for, a prompt that leaves
                no room, several long clips without `attention_mask`.
        """
        forced = kwargs.pop("forced_decoder_ids", None)
        if forced is None and generation_config is not None:
            forced = getattr(generation_config, "forced_decoder_ids", None)
        settings, kwargs = self._prepare_generation_config(generation_config, **kwargs)
        for name in ("output_attentions", "output_hidden_states"):  # each window's call finds them in the settings
            kwargs.pop(name, None)
        stride = self.get_encoder().stride
        window = stride * self.config.max_source_positions
        if input_features is not None:
            batch, length = input_features.shape[0], input_features.shape[-1]
        elif kwargs.get("encoder_outputs") is not None:
            batch, length = len(kwargs["encoder_outputs"][0]), stride * kwargs["encoder_outputs"][0].shape[1]
        else:
            raise ValueError("generate needs input_features (batch, mel bins, frames) or encoder_outputs.")

        asked_for_dict = self._set_outputs(
            settings, return_dict_in_generate, return_token_timestamps, logprob_threshold
        )
        first_time = self._set_timestamps(settings, return_timestamps, is_long=length > window)
        self._set_language_and_task(settings, language, task, is_multilingual)
        given = (logprob_threshold, compression_ratio_threshold, no_speech_threshold, condition_on_prev_tokens)
        for name, value in zip(THRESHOLDS, given, strict=True):
            setattr(settings, name, getattr(settings, name, None) if value is None else value)
        self._set_prompt_condition(settings, prompt_condition_type)
        if return_token_timestamps and not hasattr(settings, "alignment_heads"):
            raise ValueError(
                "return_token_timestamps needs alignment_heads in the generation configuration: layer and head of the "
                "cross-attention heads that follow the speech; official checkpoints have them."
            )
        if batch > 1 and length > window and attention_mask is None:
            raise ValueError(
                "several clips beyond the encoder's window need attention_mask (batch, frames), which says where each "
                "ends: processor(..., return_attention_mask=True)."
            )
        starts = self._start_tokens(settings, input_features, kwargs.get("encoder_outputs"), batch, forced, window)
        if kwargs.get("decoder_input_ids") is not None and "assistant_model" in kwargs:
            raise ValueError("decoder_input_ids cannot be given together with assistant_model; use prompt_ids.")
        if "assistant_model" in kwargs:  # it proposes end tokens at the beginning too
            settings.begin_suppress_tokens = None
        beams = kwargs.get("num_beams", settings.num_beams) or 1
        processors = self._logits_processors(settings, logits_processor, starts.shape[1], beams, starts.device)

        ends = [length] * batch
        if batch > 1 and length > window:
            ends = attention_mask.sum(-1).tolist()
        copies, settings.num_return_sequences = settings.num_return_sequences or 1, 1
        clips = [
            Clip(
                features=None if input_features is None else input_features[i],
                start=starts[i],
                frames=int(ends[i]),
                conditioned=bool(condition_on_prev_tokens),
            )
            for i in range(batch)
            for _ in range(copies)
        ]
        spoken = None
        if return_token_timestamps and attention_mask is not None:
            spoken = [int(n) for n in attention_mask.sum(-1).tolist() for _ in range(copies)]
        if prompt_ids is not None and settings.prompt_condition_type == "first-segment":
            marked = prompt_ids[0] == getattr(settings, "prev_sot_token_id", None)
            for clip in clips:
                clip.segments.append({"tokens": prompt_ids[1:] if marked else prompt_ids})
        once = force_unique_generate_call
        if once is None:
            once = getattr(settings, "force_unique_generate_call", False)
        clock = Clock(first_time, time_precision, time_precision_features, stride)
        common = {
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
        }

        with self._helpers_ready(kwargs.get("assistant_model"), eager=bool(return_token_timestamps)):
            while active := [i for i, clip in enumerate(clips) if clip.seek < clip.frames]:
                if monitor_progress is not None:
                    monitor_progress(torch.tensor([[clip.seek, clip.frames] for clip in clips]))
                rows = [clips[i] for i in active]
                features = None if input_features is None else torch.stack([clip.window(window) for clip in rows])
                ids, mask = self._decoder_prompt(settings, rows, clips, prompt_ids, first_time, processors, kwargs)
                kwargs.pop("decoder_input_ids", None)
                self._set_length(settings, ids.shape[1])
                for processor in processors:
                    if hasattr(processor, "set_begin_index"):
                        processor.set_begin_index(ids.shape[1])
                frames_left = None if spoken is None else [spoken[i] - clips[i].seek for i in active]
                texts, results, kind = self._attempt(
                    settings,
                    rows,
                    features,
                    ids,
                    mask,
                    processors,
                    temperature if isinstance(temperature, (list, tuple)) else [temperature],
                    frames=frames_left,
                    seconds=time_precision if return_token_timestamps else None,
                    keep_cache=length <= window,
                    batch_size=batch,
                    **common,
                    **kwargs,
                )
                for clip, text, result in zip(rows, texts, results, strict=True):
                    heard = min(clip.frames - clip.seek, window)
                    if text is None:  # silence
                        clip.seek += heard
                        continue
                    cuts, moved = clock.segments(text, clip.seek, heard)
                    clip.segments += [self._segment(text, result, cut, ids.shape[1], clip.seek, clock) for cut in cuts]
                    clip.seek += moved
                if once or features is None:
                    break

        found = [clip.segments for clip in clips]
        if prompt_ids is not None and settings.prompt_condition_type == "first-segment":
            found = [segments[1:] for segments in found]
        if asked_for_dict and settings.return_dict_in_generate and (once or not return_timestamps):
            return self._whole_output(results, kind, copies)
        return self._result(
            found,
            settings,
            once=once,
            with_times=bool(return_token_timestamps),
            with_segments=return_segments or bool(asked_for_dict and settings.return_dict_in_generate),
        )

    # --- settings ---

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: object
    ) -> tuple[GenerationConfig, dict]:
        """As the library's; what a window's settings have cleared is not read from the model again."""
        settings, kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        for name in getattr(generation_config, "cleared", ()):
            setattr(settings, name, None)
        return settings, kwargs

    @staticmethod
    def _set_outputs(
        settings: GenerationConfig, wanted: bool | None, token_times: bool | None, logprob_threshold: float | None
    ) -> bool:
        """What the calls of `GenerationMixin.generate` must return, and whether the caller asked for a dictionary."""
        if wanted is not None:
            settings.return_dict_in_generate = wanted
        asked = bool(settings.return_dict_in_generate)
        settings.return_token_timestamps = token_times
        if token_times:
            settings.output_attentions = True
        if token_times or logprob_threshold is not None:
            settings.return_dict_in_generate = settings.output_scores = True
        return asked

    def _set_timestamps(self, settings: GenerationConfig, wanted: bool | None, *, is_long: bool) -> int:
        """Whether the model writes timestamps -> id of the first one, beyond the vocabulary where there is none."""
        if wanted is None:
            wanted = getattr(settings, "return_timestamps", None)
        if is_long and wanted is False:
            raise ValueError(
                "return_timestamps=False, but the clip is longer than the encoder's window: where a window's text "
                "ends is known from timestamps. Leave it out, or cut the clip."
            )
        settings.return_timestamps = wanted = True if is_long else wanted
        known = hasattr(settings, "no_timestamps_token_id")
        if wanted and not known:
            raise ValueError(
                "timestamps need no_timestamps_token_id in the generation configuration: the id before that of the "
                "first timestamp; official checkpoints have it."
            )
        return settings.no_timestamps_token_id + 1 if known else self.config.vocab_size + 1

    @staticmethod
    def _set_language_and_task(
        settings: GenerationConfig, language: str | list[str] | None, task: str | None, is_multilingual: bool | None
    ) -> None:
        def require(name: str, argument: str) -> None:
            if not hasattr(settings, name):
                raise ValueError(
                    f"{argument} needs {name} in the generation configuration; that of this checkpoint is older. Take "
                    "generation_config.json from the official checkpoint."
                )

        if is_multilingual is not None:
            require("is_multilingual", "is_multilingual")
            settings.is_multilingual = is_multilingual
        if not getattr(settings, "is_multilingual", True) and (task is not None or language is not None):
            raise ValueError(
                f"language={language!r} and task={task!r} cannot be chosen for a model of English only; leave them "
                "out, or pass is_multilingual=True if it knows more."
            )
        if language is not None:
            require("lang_to_id", "language")
            settings.language = language
        if task is not None:
            require("task_to_id", "task")
            settings.task = task

    @staticmethod
    def _set_prompt_condition(settings: GenerationConfig, kind: str | None) -> None:
        kind = kind or CONDITION_TYPES[0]
        if kind not in CONDITION_TYPES:
            raise ValueError(f"prompt_condition_type must be one of {', '.join(CONDITION_TYPES)}, got {kind!r}.")
        if kind == "all-segments" and settings.condition_on_prev_tokens is not True:
            raise ValueError("prompt_condition_type='all-segments' needs condition_on_prev_tokens=True.")
        settings.prompt_condition_type = kind

    def _set_length(self, settings: GenerationConfig, prompt: int) -> None:
        """Room for the text of this window after `prompt` tokens; `max_length` does not count them."""
        limit, new = self.config.max_target_positions, settings.max_new_tokens
        if prompt + (new or 0) > limit:
            raise ValueError(
                f"the decoder starts with {prompt} tokens and max_new_tokens is {new or 0}: together "
                f"{prompt + (new or 0)}, but it has positions for {limit} (max_target_positions={limit}). Shorten the "
                "prompt, or ask for fewer tokens."
            )
        if new is None and settings.max_length is not None:
            settings.max_length = min(settings.max_length + min(limit // 2 - 1, prompt), limit)

    def _logits_processors(
        self, settings: GenerationConfig, given: list | None, begin: int, beams: int, device: torch.device
    ) -> list[LogitsProcessor]:
        """What Whisper does to the logits; the settings are cleared where the library would do it again."""
        processors = list(given or [])
        if settings.return_timestamps is True:
            processors.insert(0, WhisperTimeStampLogitsProcessor(settings, begin_index=begin))
        if settings.suppress_tokens is not None:
            processors.insert(0, SuppressTokensLogitsProcessor(settings.suppress_tokens, device=device))
            settings.suppress_tokens = None
        if settings.begin_suppress_tokens is not None:
            suppressed = settings.begin_suppress_tokens
            processors.insert(0, SuppressTokensAtBeginLogitsProcessor(suppressed, begin_index=begin, device=device))
            settings.begin_suppress_tokens = None
        settings.cleared = ("suppress_tokens", "begin_suppress_tokens")
        if settings.no_speech_threshold is not None:
            silence = settings.no_timestamps_token_id - 1
            detector = WhisperNoSpeechDetection(silence, begin_index=begin, scores_is_logprobs=beams > 1)
            detector.set_model(self)
            processors.insert(0, detector)
        return processors

    # --- prompts ---

    def _start_tokens(
        self,
        settings: GenerationConfig,
        input_features: Tensor | None,
        encoder_outputs: ModelOutput | None,
        batch: int,
        forced: list[list[int]] | None,
        window: int,
    ) -> Tensor:
        """(B, P) start token, language, task, and whether there are no timestamps, as far as the model has them.

        Args:
            forced: (place, token id) pairs of this call; those of a checkpoint's files, which many carry from before
                there were `language` and `task`, give way to these.
        """
        task, language = getattr(settings, "task", None), getattr(settings, "language", None)
        if task is not None and task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}.")
        tokens = [settings.decoder_start_token_id]
        chosen = task is not None or language is not None
        if forced is not None and chosen:
            self._check_forced(settings, forced, language, task)
        if not chosen:
            if forced is None:
                forced = getattr(settings, "forced_decoder_ids", None)
            if forced is None:
                forced = getattr(self.config, "forced_decoder_ids", None)
            tokens += forced_tokens(forced or [])

        if isinstance(language, (list, tuple)):
            if any(name is None for name in language):
                raise TypeError(f"language must be a name, or one for each row without None, got {language!r}.")
            if len(language) != batch:
                raise ValueError(f"language has {len(language)} entries for {batch} rows; give one for each row.")
            spoken = [language_id(name, settings.lang_to_id) for name in language]
        elif language is not None:
            spoken = [language_id(language, settings.lang_to_id)] * batch
        elif hasattr(settings, "lang_to_id") and (len(tokens) == 1 or tokens[1] is None):
            spoken = self.detect_language(
                input_features,
                encoder_outputs if input_features is None else None,
                generation_config=settings,
                num_segment_frames=window,
            ).tolist()
        else:
            spoken = [None] * batch

        tasks = getattr(settings, "task_to_id", {})
        rows = []
        for spoken_id in spoken:
            row = tokens if spoken_id is None else [tokens[0], spoken_id, *tokens[2:]]
            if task is not None:
                row = [*row, tasks[task]]
            elif language is not None and tasks and not set(row) & set(tasks.values()):
                row = [*row, tasks["transcribe"]]
            without = getattr(settings, "no_timestamps_token_id", None)
            if without is not None and not settings.return_timestamps and row[-1] != without:
                row = [*row, without]
            elif settings.return_timestamps and row[-1] == without:
                row = row[:-1]
            rows.append([token for token in row if token is not None])
        return torch.tensor(rows, device=self.device)

    @staticmethod
    def _check_forced(settings: GenerationConfig, forced: list, language: object, task: str | None) -> None:
        """Raise ValueError where ids that this call forces say another language or task than it asks for."""
        ids = {token for _, token in forced if token is not None}
        names = [language] if isinstance(language, str) else list(language or [])
        wanted = {language_id(name, settings.lang_to_id) for name in names}
        tables = (("language", language, wanted, getattr(settings, "lang_to_id", {})),)
        wanted_task = set() if task is None else {settings.task_to_id[task]}
        tables += (("task", task, wanted_task, getattr(settings, "task_to_id", {})),)
        for name, value, asked, table in tables:
            other = {key for key, token in table.items() if token in ids - asked}
            if asked and other:
                raise ValueError(
                    f"forced_decoder_ids force {', '.join(sorted(other))}, but {name}={value!r} was asked for; give "
                    "one of the two."
                )

    @torch.no_grad()
    def detect_language(
        self,
        input_features: Tensor | None = None,
        encoder_outputs: ModelOutput | tuple | None = None,
        generation_config: GenerationConfig | None = None,
        num_segment_frames: int = 3000,
    ) -> Tensor:
        """(B,) ids of the most probable languages.

        Args:
            input_features: (B, M, L), of which the first window is listened to; or encoder_outputs.
            generation_config: has `lang_to_id`; default the model's.
            num_segment_frames: frames of a window.

        Raises:
            ValueError: both inputs, or none, were given.
        """
        if (input_features is None) == (encoder_outputs is None):
            given = "none was given" if input_features is None else "both were given"
            raise ValueError(f"exactly one of input_features and encoder_outputs is needed, {given}.")
        settings = generation_config or self.generation_config
        if input_features is not None:
            first = input_features[:, :, :num_segment_frames]
            first = torch.nn.functional.pad(first, (0, num_segment_frames - first.shape[-1]))
            inputs, batch = {"input_features": first}, input_features.shape[0]
        else:
            inputs, batch = {"encoder_outputs": encoder_outputs}, encoder_outputs[0].shape[0]
        start = torch.full((batch, 1), settings.decoder_start_token_id, device=self.device)
        logits = self(**inputs, decoder_input_ids=start, use_cache=False).logits[:, -1]
        languages = torch.tensor(sorted(settings.lang_to_id.values()), device=logits.device)
        return languages[logits[:, languages].argmax(-1)]

    def _decoder_prompt(
        self,
        settings: GenerationConfig,
        rows: list[Clip],
        clips: list[Clip],
        prompt_ids: Tensor | None,
        first_time: int,
        processors: list[LogitsProcessor],
        kwargs: dict,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, P) what the decoder reads first in this window, and its mask where rows are padded on the left."""
        if kwargs.get("decoder_input_ids") is not None:
            return kwargs["decoder_input_ids"], kwargs.get("decoder_attention_mask")
        start = torch.stack([clip.start for clip in rows])
        if not any(clip.conditioned for clip in clips) or not clips[0].segments:
            if prompt_ids is None:
                return start, None
            return torch.cat([prompt_ids[None].to(start.device).expand(len(rows), -1), start], dim=-1), None
        most = self.config.max_target_positions // 2 - 1
        if prompt_ids is not None and settings.prompt_condition_type == "all-segments":
            marker = prompt_ids.to(start)
        else:
            marker = getattr(settings, "prev_sot_token_id", None)
            if marker is None:  # older files name it only among the tokens that are not to be written
                suppressed = [p.suppress_tokens for p in processors if isinstance(p, SuppressTokensLogitsProcessor)]
                marker = suppressed[0][-2] if suppressed and len(suppressed[0]) > 1 else None
            marker = start.new_tensor([] if marker is None else [int(marker)])
        before = []
        for clip in rows:
            pieces = previous_text(clip, first_time) if clip.conditioned else []
            text = torch.cat([piece.to(start) for piece in pieces])[-most:] if pieces else start[:0, 0]
            before.append(torch.cat([marker, text]))
        whole = most + 1 if settings.cache_implementation == "static" else None
        ids = torch.cat([pad_rows(before, settings.pad_token_id, side="left", length=whole), start], dim=-1)
        return ids, ids != settings.pad_token_id

    # --- one window ---

    @contextmanager
    def _helpers_ready(self, assistant: GenerationMixin | None, *, eager: bool) -> Iterator[None]:
        """An assistant answers with prompt and end token; where weights of the attention are wanted, they exist."""
        implementation = self.config._attn_implementation
        if eager and implementation != "eager":
            self.set_attn_implementation("eager")
        if assistant is not None:
            assistant.generation_config.force_unique_generate_call = True
        try:
            yield
        finally:
            if eager and implementation != "eager":
                self.set_attn_implementation(implementation)
            if assistant is not None:
                del assistant.generation_config.force_unique_generate_call

    def _attempt(
        self,
        settings: GenerationConfig,
        rows: list[Clip],
        features: Tensor | None,
        ids: Tensor,
        mask: Tensor | None,
        processors: list[LogitsProcessor],
        temperatures: Sequence[float | None],
        *,
        frames: list[int] | None,
        seconds: float | None,
        keep_cache: bool,
        batch_size: int,
        **kwargs: object,
    ) -> tuple[list[Tensor | None], list, type]:
        """The text of one window, with one temperature after the other until the thresholds are met.

        Args:
            features: (B, M, L) of the window; ids: (B, P) and mask: what the decoder reads first.
            frames: real frames of each row's window; seconds: of an encoder token, where token times are wanted.
            batch_size: rows of the whole call, to which a cache of fixed length is kept.

        Returns:
            For each row the tokens (T,) without prompt and end token, or None for silence; for each row what
            `GenerationMixin.generate` returned; and the type of that.
        """
        texts: list[Tensor | None] = [None] * len(rows)
        results: list = [None] * len(rows)
        kind = Tensor
        waiting = list(range(len(rows)))
        for name in ("do_sample", "temperature", "num_beams", "decoder_attention_mask"):
            kwargs.pop(name, None)
        for attempt, temperature in enumerate(temperatures):
            settings.do_sample = temperature is not None and temperature > 0
            settings.temperature = temperature if settings.do_sample else 1.0
            if settings.do_sample:
                settings.num_beams = 1
            inputs = {"decoder_input_ids": ids[waiting]}
            if mask is not None:
                inputs["decoder_attention_mask"] = mask[waiting]
            if features is not None:
                inputs["input_features"] = features[waiting]
                inputs["attention_mask"] = features.new_ones(len(waiting), 1, dtype=torch.long)  # all is heard
            for processor in processors:
                if isinstance(processor, WhisperNoSpeechDetection):
                    renamed = {"inputs": inputs.get("input_features"), "input_ids": ids[waiting]}
                    others = {"decoder_attention_mask": mask[waiting]} if mask is not None else {}
                    processor.set_inputs({**renamed, **others})
            if settings.cache_implementation == "static" and len(waiting) < batch_size:
                filling = {"decoder_input_ids": settings.pad_token_id, "decoder_attention_mask": True}
                inputs = {name: more_rows(x, batch_size, filling.get(name, 0)) for name, x in inputs.items()}
            outputs = super().generate(generation_config=settings, logits_processor=processors, **inputs, **kwargs)
            kind = type(outputs)
            prompt = ids.shape[1]
            if isinstance(outputs, Tensor):
                sequences, found = outputs[:, prompt:], outputs
            else:
                if seconds is not None:
                    outputs["token_timestamps"] = token_times(
                        outputs,
                        heads=settings.alignment_heads,
                        frames=None if frames is None else [frames[i] for i in waiting],
                        prompt_length=prompt,
                        filter_width=self.config.median_filter_width,
                        seconds=seconds,
                    )
                sequences = outputs["sequences"][:, prompt:]
                found = split_rows(outputs, keep_cache=keep_cache)
            again = []
            for place, row in enumerate(waiting):
                text = without_padding(sequences[place], settings.pad_token_id, settings.eos_token_id)
                retry, silent = self._judge(settings, text, found, place, processors, temperature)
                if isinstance(settings.eos_token_id, int) and text[-1] == settings.eos_token_id:
                    text = text[:-1]  # where there are several end tokens they stay, as in the official class
                texts[row], results[row] = None if silent else text, found[place]
                low = temperature is None or temperature < 0.5
                rows[row].conditioned = bool(settings.condition_on_prev_tokens) and low
                if retry:
                    again.append(row)
            if not again or attempt == len(temperatures) - 1:
                break
            waiting = again
        return texts, results, kind

    def _judge(
        self,
        settings: GenerationConfig,
        text: Tensor,
        results: list,
        place: int,
        processors: list[LogitsProcessor],
        temperature: float | None,
    ) -> tuple[bool, bool]:
        """Whether the text (T,) of a window is to be tried again, and whether the window is silent."""
        retry = False
        if settings.compression_ratio_threshold is not None:
            retry = compression_ratio(text, self.config.vocab_size) > settings.compression_ratio_threshold
        improbable = True
        if settings.logprob_threshold is not None:
            improbable = bool(mean_logprob(results[place]["scores"], text, temperature) < settings.logprob_threshold)
            retry = retry or improbable
        for processor in processors:
            listens = improbable and isinstance(processor, WhisperNoSpeechDetection)
            if listens and processor.no_speech_prob[place] > settings.no_speech_threshold:
                return False, True
        return retry, False

    # --- results ---

    @staticmethod
    def _segment(text: Tensor, result: object, cut: tuple, prompt: int, seek: int, clock: Clock) -> dict:
        first, last, start, end = cut
        places = (prompt + first, prompt + last)
        segment = {"start": start, "end": end, "tokens": text[first:last], "idxs": places, "result": result}
        if isinstance(result, dict) and "token_timestamps" in result:
            offset = torch.tensor(seek, dtype=torch.float64) * clock.seconds / clock.stride
            segment["token_timestamps"] = result["token_timestamps"][places[0] : places[1]] + offset
        return segment

    def _whole_output(self, results: list[dict], kind: type, copies: int) -> ModelOutput | dict:
        """The output of the one call, from its rows; the encoder's part once for each clip."""
        joined = {name: join_rows([result[name] for result in results], self.device) for name in results[0]}
        for name in ("encoder_attentions", "encoder_hidden_states"):
            if joined.get(name) is not None:
                joined[name] = tuple(layer[::copies] for layer in joined[name])
        return dict(joined) if "token_timestamps" in joined else kind(**joined)

    def _result(
        self, found: list[list[dict]], settings: GenerationConfig, *, once: bool, with_times: bool, with_segments: bool
    ) -> Tensor | dict:
        """Tokens of all segments in rows, and on request token times and the segments themselves."""
        if once:
            whole = [segments[0]["result"] for segments in found]
            sequences = torch.stack([x if isinstance(x, Tensor) else x["sequences"] for x in whole])
            times = torch.stack([x["token_timestamps"] for x in whole]) if with_times else None
        else:
            nothing = torch.zeros(0, dtype=torch.long, device=self.device)
            texts = [torch.cat([nothing, *(s["tokens"].to(self.device) for s in segments)]) for segments in found]
            sequences = pad_rows(texts, settings.pad_token_id)
            times = None
            if with_times:
                spans = [[s["result"]["token_timestamps"][slice(*s["idxs"])] for s in segments] for segments in found]
                rows = [torch.cat([torch.zeros(0), *pieces]) for pieces in spans]
                last = [float(row[-1]) if len(row) else 0.0 for row in rows]
                size = sequences.shape[1]
                times = torch.cat([pad_rows([x], end, length=size) for x, end in zip(rows, last, strict=True)])
        if not (with_times or with_segments):
            return sequences
        output = {"sequences": sequences}
        if with_times:
            output["token_timestamps"] = times
        if with_segments:
            output["segments"] = found
        return output


def language_id(language: str, ids: dict[str, int]) -> int:
    """Name, code or token of a language -> its id.

    Raises:
        ValueError: no such language, or the model does not have it.
    """
    name = language.lower()
    code = CODES.get(name, name)
    token = name if name in ids else f"<|{code}|>"
    if token in ids:
        return ids[token]
    if code in CODES.values():
        raise ValueError(f"language={language!r}: {token} is not in lang_to_id of the generation configuration.")
    known = CODES.values() if len(name) == 2 else CODES
    raise ValueError(f"unknown language {language!r}; known are {', '.join(dict.fromkeys(known))}.")


def forced_tokens(forced: list[list[int]]) -> list[int | None]:
    """(place, token id) pairs -> the ids for places 1, 2, ...; None at place 1 says that the language is open.

    Raises:
        ValueError: a place is missing.
    """
    if not forced or forced[0][0] != 1:
        return []
    places = [place for place, _ in forced]
    if places != list(range(1, len(forced) + 1)):
        raise ValueError(f"forced_decoder_ids must have an entry for each place from 1 on, got places {places}.")
    logger.warning_once(
        "The first tokens are taken from forced_decoder_ids of the (generation) configuration, as older checkpoints "
        "have them; language= and task= take their place."
    )
    return [token for _, token in forced]
