"""What is special to Whisper: prompts, timestamps, clips of any length, the limits of its inputs."""

import copy

import harness
import numpy
import pytest
import torch
import transformers
from harness import assert_close, no_warning
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.modeling_whisper import _compute_mask_indices
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

import hf_ext
from hf_ext.layers.spec_augment import random_spans
from hf_ext.models.whisper.languages import CODES
from hf_ext.models.whisper.rows import layer_tensors
from hf_ext.models.whisper.token_times import median_filter, warp

# The order of a real vocabulary: text, end, start, languages, tasks, marks, timestamps.
END, START, LANGUAGES, TRANSLATE, TRANSCRIBE, BEFORE, WITHOUT = 60, 61, {"en": 62, "fr": 63, "de": 64}, 65, 66, 68, 70
WINDOW = 40  # encoder tokens, as many timestamps
FIELDS = {
    "vocab_size": WITHOUT + 1 + WINDOW + 1, "num_mel_bins": 6, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 33, "decoder_ffn_dim": 27,
    "max_source_positions": WINDOW, "max_target_positions": 36, "pad_token_id": END, "bos_token_id": END,
    "eos_token_id": END, "decoder_start_token_id": START, "begin_suppress_tokens": None, "num_labels": 3,
}  # fmt: skip
SETTINGS = {
    "is_multilingual": True,
    "lang_to_id": {f"<|{code}|>": token for code, token in LANGUAGES.items()},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "no_timestamps_token_id": WITHOUT,
    "prev_sot_token_id": BEFORE,
    "alignment_heads": [[0, 1], [1, 0], [1, 3]],
    "max_initial_timestamp_index": 20,
    "max_length": 20,
    "suppress_tokens": [3, 9, START, BEFORE, WITHOUT - 1],
    "begin_suppress_tokens": [5, END],
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """A tiny multilingual Whisper with random weights, as the stock class and as ours."""
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    stock = WhisperForConditionalGeneration(WhisperConfig(**FIELDS))
    harness.randomise(stock, seed=2)
    with torch.no_grad():  # text that changes from step to step, and timestamps that are written now and then
        stock.model.decoder.embed_positions.weight.mul_(6)
        stock.proj_out.weight.mul_(3)
    stock.generation_config = GenerationConfig(**SETTINGS)
    stock.save_pretrained(folder)
    classes = (WhisperForConditionalGeneration, hf_ext.ExtWhisperForConditionalGeneration)
    return [cls.from_pretrained(folder, attn_implementation="sdpa").eval() for cls in classes]


def features(rows: int, windows: float, seed: int = 0) -> Tensor:
    """(rows, M, frames) of so many windows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FIELDS["num_mel_bins"], int(2 * WINDOW * windows), generator=generator)


def real(rows: int, windows: float) -> Tensor:
    """(rows, frames) mask; each row is a third shorter than the one before."""
    frames = int(2 * WINDOW * windows)
    lengths = torch.tensor([max(3, int(frames * (2 / 3) ** row)) for row in range(rows)])
    return (torch.arange(frames) < lengths[:, None]).long()


def both(models: list, inputs: Tensor, seed: int = 3, **options: object) -> list:
    """What the stock class and ours generate."""
    results = []
    for model in models:
        torch.manual_seed(seed)
        results.append(model.generate(inputs.clone(), **copy.deepcopy(options)))
    return results


def assert_equal(actual: object, expected: object, what: str) -> None:
    """Results of `generate`: tensors, dictionaries, segments."""
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype or not expected.numel(), what
        # What may not be written has a score of minus infinity.
        assert_close(*(x.double().clamp(min=-1e9) for x in (actual, expected)), what)
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), f"{what}: {sorted(actual)} instead of {sorted(expected)}"
        for name in expected:
            assert_equal(actual[name], expected[name], f"{what}: {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{what}: {len(actual)} instead of {len(expected)}"
        for i, (mine, reference) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(mine, reference, f"{what}: {i}")
    elif isinstance(expected, Cache):
        for mine, reference in zip(layer_tensors(actual), layer_tensors(expected), strict=True):
            assert_equal(mine, reference, what)
    else:
        assert actual == expected, what


SHORT = {
    "detected language": {},
    "language": {"language": "french", "task": "translate"},
    "code": {"language": "de"},
    "token": {"language": "<|en|>"},
    "languages": {"language": ["fr", "English", "<|de|>"]},
    "task": {"task": "transcribe"},
    "timestamps": {"return_timestamps": True},
    "segments": {"return_timestamps": True, "return_segments": True},
    "segments without timestamps": {"return_segments": True, "language": "en"},
    "new tokens": {"max_new_tokens": 7},
    "beams": {"num_beams": 3, "return_timestamps": True},
    "several": {"num_beams": 3, "num_return_sequences": 2},
    "sampled": {"temperature": 0.8, "do_sample": True, "return_timestamps": True},
    "dictionary": {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "dictionary, hidden states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "dictionary, beams": {"return_dict_in_generate": True, "output_scores": True, "num_beams": 2},
    "dictionary, timestamps": {"return_dict_in_generate": True, "return_timestamps": True},
    "prompt": {"prompt_ids": torch.tensor([BEFORE, 7, 8, 11]), "language": "en"},
    "static": {"cache_implementation": "static", "return_timestamps": True},
    "once": {"force_unique_generate_call": True, "language": "en"},
    "fallback": {
        "temperature": (0.0, 0.4, 0.9), "compression_ratio_threshold": 1.1, "logprob_threshold": -1.5,
        "return_timestamps": True,
    },
    "token times": {"return_token_timestamps": True, "return_timestamps": True, "return_segments": True},
    "token times alone": {"return_token_timestamps": True, "language": "en"},
    "token times, mask": {"return_token_timestamps": True, "attention_mask": real(3, 1), "language": "en"},
    "token times, beams": {"return_token_timestamps": True, "num_beams": 3, "language": "en"},
    "min": {"min_new_tokens": 12, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_short_clips(models, name):
    expected, actual = both(models, features(3, 1), **SHORT[name])
    beams = SHORT[name].get("num_beams", 1)
    if beams > 1 and isinstance(actual, dict) and "past_key_values" in actual:
        # The stock class cuts the cache by clip, though it has a row for each beam: what it calls the third clip's is
        # the second's. Ours has one row of the encoder's keys and values for each clip.
        actual, expected = dict(actual), dict(expected)
        ours, stock = (x.pop("past_key_values").cross_attention_cache.layers for x in (actual, expected))
        for mine, reference in zip(ours, stock, strict=True):
            for at in range(3):
                assert_equal(mine.keys[at // beams], reference.keys[at], name)
                assert_equal(mine.values[at // beams], reference.values[at], name)
    assert_equal(actual, expected, name)


def test_clips_shorter_than_the_window_are_padded(models):
    options = {"return_timestamps": True, "return_segments": True}
    expected, actual = both(models, features(2, 0.4), **options, language="en")
    assert_equal(actual, expected, "padded")
    models[1].generate(features(2, 0.4))  # the stock class does not pad before it looks for the language


LONG = {
    "plain": {},
    "segments": {"return_segments": True, "return_timestamps": True},
    "language": {"language": ["fr", "en", "de"], "task": "transcribe", "return_segments": True},
    "beams": {"num_beams": 2, "return_segments": True},
    "condition": {"condition_on_prev_tokens": True, "return_segments": True},
    "condition, static": {"condition_on_prev_tokens": True, "cache_implementation": "static"},
    "prompt": {"prompt_ids": torch.tensor([BEFORE, 7, 8, 11]), "return_segments": True},
    "prompt, condition": {"prompt_ids": torch.tensor([BEFORE, 7, 8]), "condition_on_prev_tokens": True},
    "prompt, all segments": {
        "prompt_ids": torch.tensor([BEFORE, 7, 8]), "condition_on_prev_tokens": True,
        "prompt_condition_type": "all-segments",
    },
    "fallback": {
        "temperature": (0.0, 0.4, 0.9), "compression_ratio_threshold": 1.1, "logprob_threshold": -1.5,
        "return_segments": True,
    },
    "dictionary": {"return_dict_in_generate": True, "return_timestamps": True, "output_scores": True},
    "token times": {"return_token_timestamps": True, "return_segments": True},
    "new tokens": {"max_new_tokens": 9, "return_segments": True},
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_long_clips(models, name):
    for rows, mask in ((1, None), (3, real(3, 2.6))):
        options = dict(LONG[name])
        if rows == 1 and isinstance(options.get("language"), list):
            options["language"] = options["language"][0]
        if mask is not None:
            options["attention_mask"] = mask
            if "fallback" in name:
                continue  # the stock class draws for rows that have ended
        expected, actual = both(models, features(rows, 2.6), **options)
        assert_equal(actual, expected, f"{name}, {rows} rows")


def test_silence_is_left_out(models):
    options = {"no_speech_threshold": 0.001, "logprob_threshold": -0.5, "temperature": (0.0, 0.3)}
    expected, actual = both(models, features(1, 2.5), **options, return_segments=True)
    assert_equal(actual, expected, "silence")


def test_encoder_outputs(models):
    results = []
    for model in models:
        encoded = model.get_encoder()(features(3, 1), return_dict=True)
        results.append(model.generate(encoder_outputs=encoded, language="fr"))
    assert_equal(results[1], results[0], "encoder outputs")
    assert_equal(results[1], models[1].generate(features(3, 1), language="fr"), "features")
    one = features(1, 1)
    assert torch.equal(*(model.detect_language(one, num_segment_frames=2 * WINDOW) for model in models))


def test_decoder_as_assistant(models, tmp_path):
    """The decoder of a smaller model proposes tokens from the encoder's output of the larger one."""
    stock = WhisperForCausalLM(WhisperConfig(**FIELDS))
    harness.randomise(stock, seed=9)
    stock.generation_config.pad_token_id = END
    stock.save_pretrained(tmp_path)
    clip = features(1, 1)
    expected = models[1].generate(clip, language="en")
    for model, cls in zip(models, (WhisperForCausalLM, hf_ext.ExtWhisperForCausalLM), strict=True):
        helper = cls.from_pretrained(tmp_path).eval()
        assert torch.equal(model.generate(clip, language="en", assistant_model=helper), expected), cls.__name__
        encoded = torch.randn(1, WINDOW, FIELDS["d_model"], generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            output = helper(torch.tensor([[61, 5, 6]]), encoder_outputs=(encoded,), use_cache=False)
        if cls is WhisperForCausalLM:
            reference = output
        else:
            assert_close(output.logits, reference.logits, "cross-attention")
    assert not hasattr(helper.generation_config, "force_unique_generate_call")


def test_progress_is_monotone(models):
    seen = []
    found = models[1].generate(
        features(2, 2.6),
        attention_mask=real(2, 2.6),
        return_segments=True,
        monitor_progress=lambda progress: seen.append(progress.clone()),
    )
    done = torch.stack(seen)
    assert (done[1:, :, 0] >= done[:-1, :, 0]).all() and (done[-1, :, 0] <= done[-1, :, 1]).all()
    for segments in found["segments"]:
        times = [float(x) for segment in segments for x in (segment["start"], segment["end"])]
        assert times == sorted(times)


def test_attention_is_as_before(models):
    """Token times need the attention weights; the fast kernel comes back afterwards."""
    models[1].generate(features(1, 1), return_token_timestamps=True, language="en", attention_mask=real(1, 1))
    assert models[1].config._attn_implementation == "sdpa"


def test_warp_and_median_filter():
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 1), (1, 7), (9, 1), (12, 30), (30, 12)):
        cost = torch.randint(4, (rows, columns), generator=generator).double().numpy()  # with ties
        for mine, reference in zip(warp(cost), _dynamic_time_warping(cost), strict=True):
            assert (mine == reference).all()
    x = torch.randn(3, 5, 20, generator=generator)
    for width in (1, 3, 7):
        assert torch.equal(median_filter(x, width), _median_filter(x, width))
    assert torch.equal(median_filter(x[..., :3], 7), x[..., :3])


def test_languages():
    assert CODES == TO_LANGUAGE_CODE


@pytest.mark.parametrize("lengths", [None, [50, 31, 4, 12]])
def test_spec_augment(lengths):
    mask = None if lengths is None else (torch.arange(50) < torch.tensor(lengths)[:, None]).long()
    for seed in range(20):
        numpy.random.seed(seed)
        expected = _compute_mask_indices((4, 50), 0.3, 6, attention_mask=mask, min_masks=1)
        numpy.random.seed(seed)
        assert (random_spans(4, 50, share=0.3, span=6, least=1, lengths=lengths).numpy() == expected).all()
    with pytest.raises(ValueError, match="does not fit"):
        random_spans(4, 5, share=0.3, span=6)


def test_spec_augment_in_training(models):
    inputs, labels = features(3, 1), torch.tensor([[5, 6, 7]] * 3)
    losses = []
    for model in copy.deepcopy(models):
        model.config.apply_spec_augment, model.config.mask_feature_prob, model.config.mask_feature_length = True, 0.5, 2
        numpy.random.seed(4)
        losses.append(model.train()(input_features=inputs.clone(), labels=labels).loss)
        again = model.eval()(input_features=inputs.clone(), labels=labels).loss
        assert again != losses[-1]
    assert_close(losses[1], losses[0], "loss")


def test_pipeline_knows_whisper(models):
    """Without it there would be no timestamps and no long clips; what it does then is in test_real_whisper.py."""
    for model in models:
        pipe = transformers.pipeline(
            "automatic-speech-recognition",
            model=model,
            tokenizer=harness.tiny_tokenizer(),
            feature_extractor=transformers.WhisperFeatureExtractor(FIELDS["num_mel_bins"]),
        )
        assert pipe.type == "seq2seq_whisper" and isinstance(pipe, transformers.AutomaticSpeechRecognitionPipeline)


# --- wrong input --------------------------------------------------------------------------------------------------


def test_wrong_features(models):
    _, model = models
    ids = torch.tensor([[START]])
    for frames in (2 * WINDOW - 1, WINDOW, 2 * WINDOW + 1):
        with pytest.raises(ValueError, match=rf"{2 * WINDOW} frames.*{frames}"):
            model(input_features=torch.zeros(1, 6, frames), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="num_mel_bins=6"):
        model(input_features=torch.zeros(1, 5, 2 * WINDOW), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="no row"):
        model(input_features=torch.zeros(0, 6, 2 * WINDOW), decoder_input_ids=ids)
    with pytest.raises(ValueError, match="input_features are needed"):
        model(decoder_input_ids=ids)
    with pytest.raises(ValueError, match="decoder has no input"):
        model(input_features=features(1, 1))
    with pytest.raises(ValueError, match="needs input_features"):
        model.generate()


def test_limits(models):
    _, model = models
    limit = FIELDS["max_target_positions"]
    for length in (limit - 1, limit):
        assert model(features(1, 1), labels=torch.full((1, length), 5)).loss.isfinite()
    with pytest.raises(ValueError, match=f"labels have {limit + 1} tokens.*max_target_positions={limit}"):
        model(features(1, 1), labels=torch.full((1, limit + 1), 5))
    with pytest.raises(ValueError, match=f"max_target_positions={limit}"):
        model(features(1, 1), decoder_input_ids=torch.full((1, limit + 1), 5))
    prompt = torch.full((limit - 10,), 7)
    with pytest.raises(ValueError, match=f"max_new_tokens is 20.*max_target_positions={limit}"):
        model.generate(features(1, 1), prompt_ids=prompt, max_new_tokens=20, language="en")


def test_languages_and_tasks_that_do_not_fit(models):
    _, model = models
    clip = features(2, 1)
    for options, message in (
        ({"language": "klingon"}, "unknown language 'klingon'"),
        ({"language": "xx"}, "unknown language 'xx'"),
        ({"language": "japanese"}, "<|ja|>.*lang_to_id"),
        ({"language": ["en"]}, "1 entries for 2 rows"),
        ({"task": "sing"}, "task must be one of translate, transcribe"),
        ({"language": "en", "is_multilingual": False}, "English only"),
        ({"forced_decoder_ids": [[1, LANGUAGES["fr"]]], "language": "en"}, "forced_decoder_ids.*fr.*language='en'"),
        ({"forced_decoder_ids": [[1, 62], [2, TRANSLATE]], "task": "transcribe"}, "translate.*task='transcribe'"),
        ({"forced_decoder_ids": [[1, 62], [3, TRANSLATE]]}, r"places \[1, 3\]"),
        ({"prompt_condition_type": "sometimes"}, "first-segment, all-segments"),
        ({"prompt_condition_type": "all-segments"}, "condition_on_prev_tokens"),
    ):
        with pytest.raises(ValueError, match=message.replace("|", r"\|")):
            model.generate(clip, **options)
    with pytest.raises(ValueError, match="attention_mask"):
        model.generate(features(2, 2))
    with pytest.raises(ValueError, match="return_timestamps=False"):
        model.generate(features(1, 2), return_timestamps=False)


def test_older_generation_configurations(models):
    """Without the fields of newer files there are no timestamps and no languages to choose."""
    model = copy.deepcopy(models[1])
    plain = {name: SETTINGS[name] for name in ("max_length", "pad_token_id", "eos_token_id", "decoder_start_token_id")}
    model.generation_config = GenerationConfig(**plain)
    assert model.generate(features(1, 1)).shape[0] == 1
    for options, field in (
        ({"language": "en"}, "lang_to_id"),
        ({"task": "transcribe"}, "task_to_id"),
        ({"is_multilingual": True}, "is_multilingual"),
        ({"return_timestamps": True}, "no_timestamps_token_id"),
        ({"return_token_timestamps": True}, "alignment_heads"),
    ):
        with pytest.raises(ValueError, match=field):
            model.generate(features(1, 1), **options)


def test_forced_ids_of_old_files_give_way(models):
    """Old checkpoints force English; a language that is asked for counts, and without one the ids do."""
    results = []
    for model in copy.deepcopy(models):
        model.generation_config.forced_decoder_ids = [[1, LANGUAGES["fr"]], [2, TRANSLATE]]
        results.append([model.generate(features(2, 1), **o) for o in ({}, {"language": "de"}, {"task": "transcribe"})])
    assert_equal(results[1], results[0], "old files")
    with no_warning():
        plain = models[1].generate(features(2, 1), language="de")
    assert torch.equal(results[1][1], plain)
