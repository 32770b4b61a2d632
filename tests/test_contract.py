"""Every check of the harness over every registered architecture, its heads and its configurations.

An architecture is tested because it is registered; `tests/cases/` describes its configurations and heads.
"""

import os

import harness
import pytest
import torch
from cases import CASES, POOLED
from harness import (
    BASES,
    IMPLEMENTATIONS,
    Subject,
    base_subject,
    broad,
    is_first,
    of_architectures,
    one_per_architecture,
    slow_unless,
    subjects,
)

import hf_ext

ARCHITECTURES = list(hf_ext.architectures())


def own_blocks(subject: Subject) -> bool:
    return subject.case.blocks_of is None


def is_text(subject: Subject) -> bool:
    return subject.is_text and subject.kind not in POOLED


def is_encoder(subject: Subject) -> bool:
    return is_text(subject) and not subject.causal


def over(found: list[Subject]):
    """Parametrise over subjects, with readable names."""
    assert found, "nothing to check"
    return pytest.mark.parametrize("subject", found, ids=str)


matrix = pytest.mark.matrix  # a column of the README's table of what was tried with what
attention = pytest.mark.parametrize("attn", IMPLEMENTATIONS)


def with_each_attention(found: list[Subject]):
    """Parametrise over subjects and kernels. That eager attention equals sdpa is checked for every configuration
    (`test_eager_equals_sdpa`); in others than the first it goes through the rest when slow tests are asked for."""
    assert found, "nothing to check"
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        ("subject", "attn"),
        [
            pytest.param(s, attn, id=f"{s}-{attn}", marks=slow if attn == "eager" and not is_first(s) else ())
            for attn in IMPLEMENTATIONS
            for s in found
        ],
    )


WITH_VOCABULARY = ("masked", "causal", "pretraining", "seq2seq", "aligned")
LABELLED = (*WITH_VOCABULARY, "row", "next_sentence", "token", "span", "choice", "double", "image_row", "speech_row")
architecture = pytest.mark.parametrize("model_type", ARCHITECTURES)


@architecture
def test_case_exists(model_type):
    harness.check_case_exists(model_type)


# --- configuration, loading, files --------------------------------------------------------------------------------


@over(subjects())
def test_config_reads_official(subject):
    harness.check_config_reads_official(subject)


@architecture
def test_official_files(model_type):
    harness.check_official_files(model_type)


@over(subjects(*BASES))
def test_config_round_trips(subject):
    harness.check_config_round_trips(subject)


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [(name, fields, named) for name, case in CASES.items() for fields, named in case.nonsense],
    ids=lambda value: str(value).replace("::", ":"),
)
def test_config_refuses(model_type, fields, named):
    harness.check_config_refuses(model_type, fields, named)


@pytest.mark.parametrize(
    ("model_type", "fields", "named"),
    [(name, fields, named) for name, case in CASES.items() for fields, named in case.inexpressible],
    ids=str,
)
def test_inexpressible(model_type, fields, named):
    harness.check_inexpressible(model_type, fields, named)


@architecture
def test_signature(model_type):
    harness.check_signature(model_type)


@over(subjects())
def test_loads_official(subject):
    harness.check_loads_official(subject)


@over(slow_unless(is_first, broad()))
def test_files_equal_stock(subject):
    harness.check_files_equal_stock(subject)


# --- forward ------------------------------------------------------------------------------------------------------


@with_each_attention(broad())
def test_forward(subject, attn):
    harness.check_forward(subject, attn)


@over(broad(where=is_text))
def test_embeds(subject):
    harness.check_embeds(subject)


@over(broad())
def test_eager_equals_sdpa(subject):
    harness.check_eager_equals_sdpa(subject)


@over(subjects(configs="first"))
def test_attention_switches(subject):
    harness.check_attention_switches(subject)


# --- training step ------------------------------------------------------------------------------------------------


@with_each_attention(broad())
def test_training_step(subject, attn):
    harness.check_training_step(subject, attn)


@attention
@over(subjects(configs="first"))
def test_training_step_with_dropout(subject, attn):
    harness.check_training_step_with_dropout(subject, attn)


@over(subjects(*WITH_VOCABULARY))
def test_logits_in_training(subject):
    harness.check_logits_in_training(subject)


@over(subjects("row", "image_row", configs="first"))
def test_problem_types(subject):
    harness.check_problem_types(subject)


# --- generation ---------------------------------------------------------------------------------------------------


@attention
@over(subjects(configs="first", where=lambda s: s.generates))
@matrix("generate")
def test_generation_equals_stock(subject, attn):
    harness.check_generation_equals_stock(subject, attn)


@over(subjects(configs="first", where=lambda s: s.generates))
def test_generation_after_resize(subject):
    harness.check_generation_after_resize(subject)


@with_each_attention(subjects(where=lambda s: s.generates and not s.depends_on_length))
def test_cache(subject, attn):
    harness.check_cache(subject, attn)


@attention
@over(subjects(configs="first", where=lambda s: s.generates and not s.head.positions_count_padding))
def test_left_padding(subject, attn):
    harness.check_left_padding(subject, attn)


@over(subjects(configs="one", where=lambda s: s.generates))
def test_assisted(subject):
    harness.check_assisted(subject)


@over(subjects(where=lambda s: s.generates))
def test_logits_to_keep(subject):
    harness.check_logits_to_keep(subject)


# --- packing ------------------------------------------------------------------------------------------------------


@with_each_attention(
    subjects("base", "causal", where=lambda s: s.causal and not s.depends_on_length and s.config_name != "cross")
)
def test_packed(subject, attn):
    harness.check_packed(subject, attn)


@with_each_attention(broad(where=is_encoder))
def test_padding_free(subject, attn):
    harness.check_padding_free(subject, attn)


@over(subjects(configs="first", where=is_encoder))
def test_padding_is_skipped(subject):
    harness.check_padding_is_skipped(subject)


# --- encoder-decoders ---------------------------------------------------------------------------------------------

SEQ2SEQ = over(subjects("base", "speech", "seq2seq", configs="one", where=lambda s: s.seq2seq))


@SEQ2SEQ
def test_encoder_outputs(subject):
    harness.check_encoder_outputs(subject)


@SEQ2SEQ
def test_decoder_embeds(subject):
    harness.check_decoder_embeds(subject)


@SEQ2SEQ
def test_decoder_mask(subject):
    harness.check_decoder_mask(subject)


@over(subjects("seq2seq"))
def test_labels_are_shifted_once(subject):
    harness.check_labels_are_shifted_once(subject)


# --- gradient checkpointing ---------------------------------------------------------------------------------------


@over(slow_unless(is_first, broad()))
@matrix("checkpointing")
def test_gradient_checkpointing(subject):
    harness.check_gradient_checkpointing(subject)


@over(subjects("causal", "seq2seq", configs="first"))
def test_cache_in_training(subject):
    harness.check_cache_in_training(subject)


# --- Trainer ------------------------------------------------------------------------------------------------------


@over(subjects(*LABELLED, "masked_image", configs="one", where=own_blocks))
@matrix("accumulation")
def test_accumulation(subject):
    harness.check_accumulation(subject)


@over(one_per_architecture("masked", "causal", "seq2seq", "image_row", where=own_blocks))
@matrix("resume")
def test_resume(subject):
    harness.check_resume(subject)


@over(subjects(*LABELLED, configs="one", where=own_blocks))
def test_evaluate(subject):
    harness.check_evaluate(subject)


# --- memory, ties, sizes, names, initial values -------------------------------------------------------------------


@over(slow_unless(is_first, broad()))
def test_reload(subject):
    harness.check_reload(subject)


@over(subjects(configs="one"))
def test_base_into_head(subject):
    harness.check_base_into_head(subject)


@over(subjects(*WITH_VOCABULARY, configs="first"))
def test_ties(subject):
    harness.check_ties(subject)


@over(subjects("base", *WITH_VOCABULARY, configs="first"))
def test_resize(subject):
    harness.check_resize(subject)


@over(subjects(configs="one"))
def test_keys_are_stable(subject):
    harness.check_keys_are_stable(subject)


@over(subjects(configs="one", where=lambda s: s.case.legacy_keys is not dict))
def test_legacy_keys(subject):
    harness.check_legacy_keys(subject)


@over(subjects(configs="first"))
def test_initial_values(subject):
    harness.check_initial_values(subject)


# --- adapters, quantisation ---------------------------------------------------------------------------------------


@over(subjects(configs="one"))
@matrix("LoRA")
def test_lora(subject):
    harness.check_lora(subject)


@over(subjects(*BASES, "masked", "causal", "seq2seq", configs="one", where=own_blocks))
def test_lora_with_checkpointing(subject):
    harness.check_lora_with_checkpointing(subject)


@pytest.mark.parametrize("bits", [4, 8])
@over(
    subjects(
        "masked",
        "causal",
        "seq2seq",
        "row",
        "token",
        "span",
        "image_row",
        "speech_row",
        configs="one",
        where=own_blocks,
    )
)
@matrix("4/8 bit")
def test_quantised(subject, bits):
    pytest.importorskip("bitsandbytes", reason="quantisation needs bitsandbytes")
    harness.check_quantised(subject, bits)


# --- export, compile ----------------------------------------------------------------------------------------------


# Tracing takes seconds, and heads of one kind are one class: one for each kind of blocks in every run, the others when
# asked for.
TRACED = one_per_architecture("masked", "causal", *BASES, where=own_blocks)
OTHERS = [s for s in subjects(configs="one") if s not in TRACED]
# The others share their attention with one of these.
KINDS_OF_BLOCKS = of_architectures("bert", "llama", "longformer", "big_bird", "bart", "t5", "swin")


@over(slow_unless(KINDS_OF_BLOCKS, TRACED))
@matrix("torch.export")
def test_export(subject):
    harness.check_export(subject)


@over(slow_unless(KINDS_OF_BLOCKS, TRACED))
@matrix("compile")
def test_compile(subject):
    harness.check_compile(subject)


@pytest.mark.slow
@over(OTHERS)
def test_export_of_other_heads(subject):
    harness.check_export(subject)


@pytest.mark.slow
@over(OTHERS)
def test_compile_other_heads(subject):
    harness.check_compile(subject)


@pytest.mark.slow
@over(one_per_architecture("masked", "causal", "seq2seq"))
def test_compile_with_inductor(subject, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # other processes may be writing the shared one
    harness.check_compile(subject, "inductor")


# --- Auto classes, pipelines, interface ---------------------------------------------------------------------------


@architecture
def test_auto_classes(model_type):
    harness.check_auto_classes(model_type)


# Features come from the class that AutoModel finds.
@over(
    subjects(
        *harness.PIPELINES,
        configs="one",
        where=lambda s: s.kind != "base" or (s == base_subject(s.model_type) and not s.case.decoder_needs_input),
    )
)
@matrix("pipelines")
def test_pipeline(subject):
    harness.check_pipeline(subject)


@over(subjects(*harness.IMAGE_PIPELINES, configs="one", where=harness.image_processor))
@matrix("pipelines")
def test_image_pipeline(subject):
    harness.check_image_pipeline(subject)


@over(subjects("speech_row", configs="one"))
@matrix("pipelines")
def test_speech_pipeline(subject):
    harness.check_speech_pipeline(subject)


@over(broad())
def test_every_parameter_is_trained(subject):
    harness.check_every_parameter_is_trained(subject)


@attention
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@over(subjects(configs="first", where=lambda s: s.kind not in POOLED and own_blocks(s)))
def test_finite(subject, dtype, attn):
    harness.check_finite(subject, dtype, attn)


@over(subjects(*WITH_VOCABULARY))
def test_loss_by_hand(subject):
    harness.check_loss_by_hand(subject)


@over(subjects(configs="first", where=is_text))
def test_token_type_ids(subject):
    harness.check_token_type_ids(subject)


@over(subjects("base", where=lambda s: "rope_parameters" in s.fields))
def test_rotary(subject):
    harness.check_rotary(subject)


def test_fresh_import():
    harness.check_fresh_import("ExtBertModel")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes that start from one state")
def test_first_import():
    harness.check_first_import([next(iter(x.heads.values())) for x in hf_ext.architectures().values()])
