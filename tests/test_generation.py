"""The checks of `generation.py` over every registered architecture that generates."""

import generation
import pytest
from generation import answering, answering_text, generating, windowed
from harness import of_architectures, slow_unless

over_generating = pytest.mark.parametrize("subject", generating(), ids=str)


@over_generating
@pytest.mark.parametrize(
    "check",
    [
        generation.check_decoding,
        generation.check_stopping,
        generation.check_caches,
        generation.check_continued_cache,
        generation.check_assistants,
        generation.check_early_exit,
        generation.check_continuous_batching,
        generation.check_right_padding,
        generation.check_no_prompt,
        generation.check_embedded_prompt,
        generation.check_long_prompt,
        generation.check_returned_dictionary,
        generation.check_text,
        generation.check_chat,
        generation.check_generation_config,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_generation(subject, check):
    check(subject)


@pytest.mark.parametrize("subject", answering(), ids=str)
@pytest.mark.parametrize(
    "check",
    [
        generation.check_decoding,
        generation.check_stopping,
        generation.check_caches,
        generation.check_encoder_once,
        generation.check_returned_dictionary,
        generation.check_text,
        generation.check_generation_config,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_answers(subject, check):
    check(subject)


@pytest.mark.parametrize("subject", answering_text(), ids=str)
@pytest.mark.parametrize(
    "check",
    [
        generation.check_assistants,
        generation.check_decoder_prompt,
        generation.check_forced_tokens,
        generation.check_embedded_prompt,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_answers_to_text(subject, check):
    check(subject)


@pytest.mark.slow  # quanto compiles its kernels when first used, for minutes
@pytest.mark.parametrize("backend", ["quanto", "hqq"])
@over_generating
def test_quantised_cache(subject, backend):
    pytest.importorskip({"quanto": "optimum.quanto"}.get(backend, backend))
    generation.check_quantised_cache(subject, backend)


@pytest.mark.parametrize("subject", windowed(), ids=str)
def test_window_cache(subject):
    generation.check_window_cache(subject)


# Those that share their attention and cache with one of these are compiled when slow tests are asked for.
KINDS_OF_STEPS = of_architectures("gpt2", "mistral", "gpt_neo", "bloom", "bart", "t5", "whisper", "transformer")


@pytest.mark.parametrize(
    "subject",
    slow_unless(KINDS_OF_STEPS, [s for s in generating() + answering() if not s.case.blocks_of]),
    ids=str,
)
def test_compiled_decoding(subject):
    generation.check_compiled_decoding(subject, "eager")


@pytest.mark.parametrize("subject", slow_unless(of_architectures("llama"), generating()), ids=str)
def test_compiled_blocks(subject):
    generation.check_compiled_blocks(subject)


@pytest.mark.slow
@over_generating
def test_compiled_decoding_with_inductor(subject, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    generation.check_compiled_decoding(subject, "inductor")
