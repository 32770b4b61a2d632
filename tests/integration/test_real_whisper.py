"""Whisper tiny.en and base, with real weights and real speech, in our class and in the stock one."""

import re

import numpy
import pytest
import real_weights
import torch
import transformers
from harness import no_warning
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

import hf_ext

pytestmark = pytest.mark.slow
RATE = 16_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return real_weights.whisper("tiny.en", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory):
    return real_weights.whisper("base", tmp_path_factory.mktemp("whisper-base"))


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return real_weights.spoken_clips(tmp_path_factory.mktemp("speech"))


def both_classes(checkpoint):
    """The stock model and ours."""
    stock = AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint).eval()
    with hf_ext.takeover():
        ours = AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint).eval()
    assert type(ours) is hf_ext.ExtWhisperForConditionalGeneration
    return stock, ours


@pytest.fixture(scope="module")
def models(checkpoint):
    return both_classes(checkpoint)


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def words(text: str) -> list[str]:
    """Lower case, without punctuation and digits, as the transcripts are."""
    text = re.sub(r"\d+", lambda found: DIGITS[int(found[0])], text.lower().replace("mr.", "mister"))
    return re.sub(r"[^a-z' ]", " ", text).split()


def word_errors(said: list[str], heard: list[str]) -> int:
    """Fewest words to replace, insert or leave out."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


def transcribe(models, clips, checkpoint, **options) -> dict[str, float]:
    """Word error rate of each kind of clip; both classes must hear the same."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    errors = {"librivox": [0, 0], "cards": [0, 0]}
    for i, (samples, text) in enumerate(clips):
        inputs = processor(samples, sampling_rate=RATE, return_tensors="pt")
        tokens = [model.generate(**inputs, **options) for model in models]
        assert torch.equal(tokens[1], tokens[0])
        heard = processor.batch_decode(tokens[1], skip_special_tokens=True)[0]
        said = words(text)
        count = errors["librivox" if i < 5 else "cards"]
        count[0] += word_errors(said, words(heard))
        count[1] += len(said)
        print(f"{text!r}: {heard!r}")
    print({name: f"{wrong}/{count} = {wrong / count:.1%}" for name, (wrong, count) in errors.items()})
    return {name: wrong / count for name, (wrong, count) in errors.items()}


def test_clips_word_for_word(models, clips, checkpoint):
    assert transcribe(models, clips, checkpoint)["librivox"] < 0.08
    inputs = AutoProcessor.from_pretrained(checkpoint)(clips[0][0], sampling_rate=RATE, return_tensors="pt")
    with torch.no_grad():
        logits = [m(**inputs, decoder_input_ids=torch.tensor([[50257, 50362, 383]])).logits for m in models]
    assert (logits[1] - logits[0]).abs().max() < 1e-3 * logits[0].abs().max()


def test_base_with_language_and_task(clips, multilingual):
    models = both_classes(multilingual)
    assert transcribe(models, clips, multilingual, language="en", task="transcribe")["librivox"] < 0.03
    processor = AutoProcessor.from_pretrained(multilingual)
    inputs = processor([samples for samples, _ in clips[:2]], sampling_rate=RATE, return_tensors="pt")
    texts = {}
    for name, options in {
        "english": {"language": ["en", "en"]},
        "german": {"language": "german", "task": "transcribe"},
        "translated": {"language": "<|de|>", "task": "translate"},
        "mixed": {"language": ["de", "en"]},
    }.items():
        stock, ours = (model.generate(**inputs, **options) for model in models)
        assert torch.equal(ours, stock), name
        texts[name] = processor.batch_decode(ours, skip_special_tokens=True)
    assert texts["english"][1].lower().strip() == "he was not an ill-disposed young man."
    assert texts["german"][1].startswith(" Er war nicht") and texts["translated"][1] == texts["english"][1]
    assert texts["mixed"][1] == texts["english"][1] and texts["mixed"][0] == texts["german"][0]
    assert models[1].detect_language(inputs["input_features"]).tolist() == [50259, 50259]  # <|en|>


def long_clip(clips) -> numpy.ndarray:
    """Half a minute and more: the clips of LibriVox one after the other, twice."""
    pause = numpy.zeros(RATE // 2, dtype=numpy.float32)
    samples = numpy.concatenate([x for samples, _ in clips[:5] * 2 for x in (samples, pause)])
    assert len(samples) > 35 * RATE
    return samples


def test_long_clip(models, clips, checkpoint):
    processor = AutoProcessor.from_pretrained(checkpoint)
    options = {"truncation": False, "padding": "longest", "return_attention_mask": True}
    inputs = processor(long_clip(clips), sampling_rate=RATE, return_tensors="pt", **options)
    for asked in ({}, {"condition_on_prev_tokens": True, "temperature": (0.0, 0.4), "logprob_threshold": -1.0}):
        found = []
        for model in models:
            torch.manual_seed(0)
            found.append(model.generate(**inputs, return_timestamps=True, return_segments=True, **asked))
        assert torch.equal(found[1]["sequences"], found[0]["sequences"])
        spans = [[(float(s["start"]), float(s["end"])) for s in f["segments"][0]] for f in found]
        assert spans[0] == spans[1] and len(spans[1]) > 4
        times = [time for span in spans[1] for time in span]
        assert times == sorted(times)
    text = processor.batch_decode(found[1]["sequences"], skip_special_tokens=True)[0]
    said = words(" ".join(text for _, text in clips[:5] * 2))
    assert word_errors(said, words(text)) / len(said) < 0.12


@pytest.mark.parametrize(
    "options",
    [{}, {"return_timestamps": True}, {"return_timestamps": "word"}, {"chunk_length_s": 10, "batch_size": 2}],
    ids=["text", "timestamps", "words", "chunks"],
)
def test_pipeline(clips, checkpoint, options, tmp_path):
    folder = tmp_path / "ours"
    hf_ext.ExtWhisperForConditionalGeneration.from_pretrained(checkpoint).save_pretrained(folder)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(folder)
    results = []
    for place in (checkpoint, folder):
        pipe = transformers.pipeline("automatic-speech-recognition", model=str(place), device="cpu")
        samples = long_clip(clips) if "chunk_length_s" in options or "return_timestamps" in options else clips[0][0]
        results.append(pipe(samples.copy(), **options))
    assert results[1] == results[0]
    assert "dashwood" in results[1]["text"].lower()


def test_pipeline_is_quiet(clips, checkpoint, tmp_path):
    hf_ext.ExtWhisperForConditionalGeneration.from_pretrained(checkpoint).save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(tmp_path)
    with no_warning():
        pipe = transformers.pipeline("automatic-speech-recognition", model=str(tmp_path), device="cpu")
        assert "Dashwood" in pipe(clips[0][0].copy())["text"]
