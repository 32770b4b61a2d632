"""What users get wrong: the error's type, and a message that names the field, the value and the mend.

`ValueError` is this package's; where the library's own error is already clear, the test says which one it is.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModel, GPT2Config, MPNetConfig, RobertaConfig

from hf_ext import (
    ExtBertConfig,
    ExtBertForMaskedLM,
    ExtBertForMultipleChoice,
    ExtBertForNextSentencePrediction,
    ExtBertForPreTraining,
    ExtBertForQuestionAnswering,
    ExtBertForSequenceClassification,
    ExtBertForTokenClassification,
    ExtBertLMHeadModel,
    ExtBertModel,
    ExtLlamaConfig,
    ExtLlamaForCausalLM,
    ExtLlamaForQuestionAnswering,
    ExtLlamaForSequenceClassification,
    ExtLlamaForTokenClassification,
    ExtLlamaModel,
    takeover,
)

BERT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 12,
}
LLAMA = {**BERT, "num_key_value_heads": 1}
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def bert(cls: type = ExtBertModel, **fields: object):
    torch.manual_seed(0)
    return cls(ExtBertConfig(**{**BERT, **fields})).eval()


def llama(cls: type = ExtLlamaModel, **fields: object):
    torch.manual_seed(0)
    return cls(ExtLlamaConfig(**{**LLAMA, **fields})).eval()


MODELS = {"bert": bert, "llama": llama}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


# --- configurations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (ExtBertConfig, {"hidden_size": 50, "num_attention_heads": 4},
         r"hidden_size \(50\) must be a multiple of num_attention_heads \(4\); nearest: hidden_size=48 or 52"),
        (ExtBertConfig, {"hidden_size": 2, "num_attention_heads": 4}, r"hidden_size \(2\).*hidden_size=4"),
        (ExtLlamaConfig, {"hidden_size": 50, "num_attention_heads": 4},
         r"hidden_size \(50\) must be a multiple of num_attention_heads \(4\); nearest: hidden_size=48 or 52"),
        (ExtLlamaConfig, {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 4},
         r"num_attention_heads \(6\) must be a multiple of num_key_value_heads \(4\); nearest: .*=4 or 8"),
        (ExtLlamaConfig, {"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 8},
         r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(8\)"),
        (ExtLlamaConfig, {"hidden_size": 12, "num_attention_heads": 4},
         r"head_dim must be even, got 3: rotary .* Change head_dim, or hidden_size and num_attention_heads"),
        (ExtLlamaConfig, {"head_dim": 7}, "head_dim must be even, got 7"),
        (ExtLlamaConfig, {"rope_parameters": {"rope_type": "alibi", "rope_theta": 1e4}},
         "rope_type 'alibi'; known are default, linear, dynamic, yarn, longrope, llama3"),
        (ExtLlamaConfig, {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_type 'spiral'; known are default"),
        (ExtBertConfig, {"hidden_dropout_prob": 1.5}, r"hidden_dropout_prob .*\[0, 1\), got 1.5"),
        (ExtBertConfig, {"attention_probs_dropout_prob": -0.1}, "attention_probs_dropout_prob .* got -0.1"),
        (ExtLlamaConfig, {"attention_dropout": 1.0}, "attention_dropout .* got 1.0"),
        (ExtBertConfig, {"num_hidden_layers": -1}, "num_hidden_layers must be at least 0, got -1"),
        (ExtBertConfig, {"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        (ExtLlamaConfig, {"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
        (ExtLlamaConfig, {"num_key_value_heads": 0}, "num_key_value_heads must be at least 1, got 0"),
        (ExtBertConfig, {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        (ExtBertConfig, {"loss_chunk_size": 0}, "loss_chunk_size must be at least 1, got 0"),
        (ExtBertConfig, {"add_cross_attention": True}, "add_cross_attention=True needs is_decoder=True"),
        (ExtBertConfig, {"model_type": "roberta"}, "model_type is 'roberta', but ExtBertConfig reads 'bert'"),
    ],
)  # fmt: skip
def test_configuration_is_refused(config: type, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**fields)


def test_field_of_the_wrong_type_is_named() -> None:
    """The library's own check of annotated fields: a `StrictDataclassFieldValidationError`."""
    from huggingface_hub.errors import StrictDataclassFieldValidationError

    with pytest.raises(StrictDataclassFieldValidationError, match=r"(?s)hidden_size.*int.*'16'"):
        ExtBertConfig(hidden_size="16")


# --- ids outside their tables -------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("bad", [40, -1, 10**6])
def test_token_outside_the_vocabulary(make: Callable, bad: int) -> None:
    ids = IDS.clone()
    ids[1, 2] = bad
    with pytest.raises(ValueError, match=rf"input_ids holds {bad}, outside 0\.\.39 \(vocab_size=40\).*tokenizer"):
        make()(ids)


@pytest.mark.parametrize("bad", [2, -1])
def test_segment_outside(bad: int) -> None:
    segments = torch.zeros_like(IDS)
    segments[0, 1] = bad
    with pytest.raises(ValueError, match=rf"token_type_ids holds {bad}, outside 0\.\.1 \(type_vocab_size=2\)"):
        bert()(IDS, token_type_ids=segments)


@pytest.mark.parametrize("bad", [12, -1])
def test_position_outside(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"position_ids holds {bad}, outside 0\.\.11 \(max_position_embeddings=12\)"):
        bert()(IDS, position_ids=torch.tensor([[0, 1, 2, bad]]))


@pytest.mark.parametrize("embedded", [False, True])
def test_input_longer_than_learned_positions(embedded: bool) -> None:
    model = bert()
    inputs = {"inputs_embeds": torch.zeros(1, 13, 16)} if embedded else {"input_ids": torch.ones(1, 13).long()}
    with pytest.raises(ValueError, match=r"13 tokens.*\(max_position_embeddings=12\); truncate"):
        model(**inputs)
    model(input_ids=torch.ones(1, 12).long())


def test_cached_tokens_count_too() -> None:
    model = bert(is_decoder=True)
    cache = model(torch.ones(1, 11).long(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="13 tokens.*max_position_embeddings=12"):
        model(torch.ones(1, 2).long(), past_key_values=cache)


@pytest.mark.parametrize("bad", [40, -1])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("cls", [ExtBertForMaskedLM, ExtLlamaForCausalLM])
def test_label_outside_the_vocabulary(cls: type, training: bool, bad: int) -> None:
    """torch's own `IndexError` or `RuntimeError` is clear: it names the target."""
    labels = IDS.clone()
    labels[0, 2] = bad
    model = (llama if "Llama" in cls.__name__ else bert)(cls).train(training)
    with pytest.raises((IndexError, RuntimeError, ValueError), match=f"(?i)target|label|index.*{bad}|out of"):
        model(IDS, labels=labels).loss.backward()


# --- input shapes -------------------------------------------------------------------------------------------------


@each_model
def test_ids_and_embeddings(make: Callable) -> None:
    model = make()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds is needed, both were given"):
        model(input_ids=IDS, inputs_embeds=torch.zeros(2, 4, 16))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds is needed, neither was given"):
        model()
    with pytest.raises(ValueError, match="neither was given"):
        model(attention_mask=torch.ones(2, 4))


@each_model
@pytest.mark.parametrize("shape", [(4,), (2, 2, 4), ()])
def test_ids_of_the_wrong_rank(make: Callable, shape: tuple[int, ...]) -> None:
    found = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"input_ids must have shape \(batch, tokens\), got {found}"):
        make()(torch.ones(shape, dtype=torch.long))


@each_model
@pytest.mark.parametrize("shape", [(4, 16), (1, 2, 4, 16)])
def test_embeddings_of_the_wrong_rank(make: Callable, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"inputs_embeds must have shape \(batch, tokens, hidden_size\), got \("):
        make()(inputs_embeds=torch.zeros(shape))


@each_model
@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (2, 3), (2, 1)])
def test_mask_of_the_wrong_shape(make: Callable, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"attention_mask has shape \({shape[0]}, {shape[1]}\).*2 rows of 4 tokens"):
        make()(IDS, attention_mask=torch.ones(shape))


@pytest.mark.parametrize("real", [[6, 6], [6, 3], [3, 2]])
def test_mask_longer_than_the_input(real: list[int]) -> None:
    """Without a cache there is nothing that more entries could mean; packing would read other rows' tokens."""
    mask = (torch.arange(6)[None] < torch.tensor(real)[:, None]).long()
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 6\).*2 rows of 4 tokens"):
        bert()(IDS, attention_mask=mask)


@each_model
def test_mask_for_the_new_tokens_only(make: Callable) -> None:
    """With a cache the mask covers the cached tokens too."""
    model = make(is_decoder=True) if make is bert else make()
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1\).*cached ones included"):
        model(IDS[:, :1], past_key_values=cache, attention_mask=torch.ones(2, 1))


def test_encoder_output_without_cross_attention() -> None:
    with pytest.raises(ValueError, match="no cross-attention; build it with add_cross_attention=True"):
        bert(is_decoder=True)(IDS, encoder_hidden_states=torch.zeros(2, 3, 16))


@pytest.mark.parametrize("shape", [(2, 4), (4,)])
def test_multiple_choice_without_choices(shape: tuple[int, ...]) -> None:
    found = str(shape).replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=rf"shape \(batch, choices, tokens\), got {found}"):
        bert(ExtBertForMultipleChoice)(torch.ones(shape, dtype=torch.long))
    with pytest.raises(ValueError, match=r"shape \(batch, choices, tokens\), got None"):
        bert(ExtBertForMultipleChoice)()


@pytest.mark.parametrize("num_labels", [1, 3])
def test_question_answering_needs_two_labels(num_labels: int) -> None:
    model = bert(ExtBertForQuestionAnswering, num_labels=num_labels)
    with pytest.raises(ValueError, match=rf"num_labels=2 \(start and end\), the configuration says {num_labels}"):
        model(IDS)


def test_batch_without_pad_token() -> None:
    model = llama(ExtLlamaForSequenceClassification)
    message = r"batch of 2 rows needs config\.pad_token_id.*model\.config\.pad_token_id = tokenizer\.pad_token_id"
    with pytest.raises(ValueError, match=message):
        model(IDS)
    assert model(IDS[:1]).logits.shape == (1, 2)
    model.config.pad_token_id = 0
    assert model(IDS).logits.shape == (2, 2)


# --- labels -------------------------------------------------------------------------------------------------------

WRONG_LABELS = {
    "bert_mlm": (bert, ExtBertForMaskedLM, {"labels": (2, 3)}, r"labels .*\(2, 4\).*got \(2, 3\)"),
    "bert_mlm_flat": (bert, ExtBertForMaskedLM, {"labels": (8,)}, r"labels .*\(2, 4\).*got \(8,\)"),
    "bert_lm": (bert, ExtBertLMHeadModel, {"labels": (2, 5)}, r"labels .*\(2, 4\).*got \(2, 5\)"),
    "bert_pretraining": (bert, ExtBertForPreTraining, {"labels": (1, 4)}, r"labels .*\(2, 4\).*got \(1, 4\)"),
    "bert_pretraining_nsp": (
        bert, ExtBertForPreTraining, {"next_sentence_label": (3,)}, r"next_sentence_label .*\(2,\).*got \(3,\)"),
    "bert_nsp": (bert, ExtBertForNextSentencePrediction, {"labels": (2, 2)}, r"labels .*\(2,\).*got \(4,\)"),
    "bert_sequence": (bert, ExtBertForSequenceClassification, {"labels": (3,)}, r"labels .*\(2,\).*got \(3,\)"),
    "bert_token": (bert, ExtBertForTokenClassification, {"labels": (2,)}, r"labels .*\(2, 4\).*got \(2,\)"),
    "bert_qa": (
        bert, ExtBertForQuestionAnswering, {"start_positions": (2,), "end_positions": (3,)},
        r"end_positions .*\(2,\).*got \(3,\)"),
    "llama_lm": (llama, ExtLlamaForCausalLM, {"labels": (2, 3)}, r"labels .*\(2, 4\).*got \(2, 3\)"),
    "llama_sequence": (
        llama, ExtLlamaForSequenceClassification, {"labels": (2, 4)}, r"labels .*\(2,\).*got \(8,\)"),
    "llama_token": (llama, ExtLlamaForTokenClassification, {"labels": (4, 2)}, r"labels .*\(2, 4\).*got \(4, 2\)"),
    "llama_qa": (
        llama, ExtLlamaForQuestionAnswering, {"start_positions": (1,), "end_positions": (2,)},
        r"start_positions .*\(2,\).*got \(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_LABELS)
@pytest.mark.parametrize("training", [False, True])
def test_labels_of_the_wrong_shape(case: str, training: bool) -> None:
    make, cls, shapes, message = WRONG_LABELS[case]
    labels = {name: torch.ones(shape, dtype=torch.long) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=message):
        make(cls, pad_token_id=0).train(training)(IDS, **labels)


@pytest.mark.parametrize(
    ("cls", "names"), [(ExtBertForMaskedLM, ["labels"]), (ExtBertForTokenClassification, ["labels"])]
)
def test_labels_of_the_wrong_shape_with_padding(cls: type, names: list[str]) -> None:
    """The same message where padding is left out."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"labels .*\(2, 4\).*got \(2, 3\)"):
        bert(cls)(IDS, attention_mask=mask, **{name: torch.ones(2, 3).long() for name in names})


def test_several_labels_of_the_wrong_shape() -> None:
    model = bert(ExtBertForSequenceClassification, num_labels=3)
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 3\).*multi_label_classification.*got \(2, 2\)"):
        model(IDS, labels=torch.ones(2, 2))
    model = bert(ExtBertForSequenceClassification, num_labels=1)
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\) \(one number per row\), got \(3,\)"):
        model(IDS, labels=torch.ones(3))


def test_multiple_choice_labels() -> None:
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\).*got \(2, 3\)"):
        bert(ExtBertForMultipleChoice)(IDS[:, None].expand(2, 3, 4), labels=torch.zeros(2, 3).long())


@pytest.mark.parametrize("cls", [ExtBertForSequenceClassification, ExtBertForTokenClassification])
def test_class_outside(cls: type) -> None:
    labels = torch.tensor([0, 5]) if cls is ExtBertForSequenceClassification else torch.full((2, 4), 5)
    with pytest.raises(ValueError, match=r"labels holds 5, outside 0\.\.1 \(num_labels=2\)"):
        bert(cls)(IDS, labels=labels)


# --- rows without any real token ----------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("empty", [[0], [1, 2], [0, 1, 2]])
def test_rows_without_a_real_token(make: Callable, implementation: str, empty: list[int]) -> None:
    """They come out finite, with finite gradients, and make no difference to the other rows."""
    model = make(attn_implementation=implementation)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]])
    mask = torch.tensor([[1, 1, 1, 0]] * 3)
    mask[empty] = 0
    others = [row for row in range(3) if row not in empty]
    out = model(ids, attention_mask=mask).last_hidden_state
    assert out.isfinite().all()

    def gradients(hidden: Tensor, rows: list[int]) -> list[Tensor]:
        loss = hidden[rows][:, :3].square().sum() if rows else hidden.sum() * 0.0
        return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    for gradient in torch.autograd.grad(out.sum(), list(model.parameters()), allow_unused=True, retain_graph=True):
        assert gradient is None or gradient.isfinite().all()
    if others:
        alone = model(ids[others], attention_mask=mask[others]).last_hidden_state
        torch.testing.assert_close(out[others][:, :3], alone[:, :3], atol=1e-6, rtol=1e-5)
        rows = list(range(len(others)))
        for a, b in zip(gradients(out, others), gradients(alone, rows), strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)  # sums over another number of rows


@pytest.mark.parametrize("cls", [ExtBertForMaskedLM, ExtBertForSequenceClassification, ExtBertForTokenClassification])
def test_heads_stay_finite_on_rows_without_a_real_token(cls: type) -> None:
    model = bert(cls).train()
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    labels = torch.tensor([0, 1]) if cls is ExtBertForSequenceClassification else torch.tensor([[1, 0, -100, -100], [-100] * 4])  # fmt: skip  # noqa: E501
    loss = model(IDS, attention_mask=mask, labels=labels).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# --- files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bert().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("damage", ["truncated", "cut_header", "garbage", "empty"])
def test_damaged_weights(folder: Path, damage: str) -> None:
    """safetensors' own error says that the file is damaged; nothing is loaded."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "cut_header": content[:20],
            "garbage": b"\xff" * len(content),
            "empty": b"",
        }[damage]
    )
    with pytest.raises((SafetensorError, OSError, ValueError), match="(?i)header|incomplete|invalid|safetensors|empty"):
        ExtBertModel.from_pretrained(folder)


@pytest.mark.parametrize(
    ("cls", "config", "name"),
    [
        (ExtBertModel, RobertaConfig(hidden_size=16, num_attention_heads=2), "roberta"),
        (ExtBertForMaskedLM, RobertaConfig(hidden_size=16, num_attention_heads=2), "roberta"),
        (ExtLlamaModel, GPT2Config(), "gpt2"),
        (ExtLlamaForCausalLM, GPT2Config(), "gpt2"),
        (ExtLlamaModel, ExtBertConfig(), "ext_bert"),
    ],
)
def test_checkpoint_of_another_architecture(cls: type, config: object, name: str, folder: Path) -> None:
    config.save_pretrained(folder)
    with pytest.raises(ValueError, match=rf"model_type is '{name}' in .*model, but Ext\w+Config reads .*AutoModel"):
        cls.from_pretrained(folder)
    with pytest.raises(ValueError, match=f"model_type is '{name}'"):
        cls.config_class.from_pretrained(folder)


def test_official_checkpoint_of_a_missing_architecture_during_a_takeover(folder: Path) -> None:
    """What this package does not have stays stock."""
    shutil.rmtree(folder)
    MPNetConfig(hidden_size=16, num_attention_heads=2).save_pretrained(folder)
    with takeover():
        assert type(AutoModel.from_config(MPNetConfig(hidden_size=16, num_attention_heads=2,
                                                      num_hidden_layers=1))).__name__ == "MPNetModel"  # fmt: skip


def refuse_to_build(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path must not end in a model of the default size: 27 GB for LLaMA."""

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise AssertionError("a model was built with the default configuration")

    monkeypatch.setattr(cls, "__init__", fail)


@pytest.mark.parametrize("cls", [ExtBertModel, ExtLlamaForCausalLM])
def test_folder_without_config(cls: type, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_build(cls, monkeypatch)
    (folder / "config.json").unlink()
    for loads in (cls, cls.config_class):
        with pytest.raises((OSError, ValueError), match=r"(?s)model.*config\.json|config\.json.*model"):
            loads.from_pretrained(folder)


@pytest.mark.parametrize("cls", [ExtBertModel, ExtLlamaForCausalLM])
def test_folder_that_does_not_exist(cls: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own `OSError` names what it looked for."""
    refuse_to_build(cls, monkeypatch)
    for loads in (cls, cls.config_class):
        with pytest.raises(OSError, match="nowhere"):
            loads.from_pretrained(tmp_path / "nowhere")


def test_folder_without_weights(folder: Path) -> None:
    """The library's own `OSError` names the missing files."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        ExtBertModel.from_pretrained(folder)


def test_config_with_a_wrong_field(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "num_attention_heads": 3}))
    with pytest.raises(ValueError, match=r"hidden_size \(16\) must be a multiple of num_attention_heads \(3\)"):
        ExtBertModel.from_pretrained(folder)


def test_config_that_is_no_json(folder: Path) -> None:
    """The library's own `OSError` says so."""
    (folder / "config.json").write_text("{not json")
    with pytest.raises(OSError, match="not a valid JSON file"):
        ExtBertModel.from_pretrained(folder)


def test_weights_of_another_size(folder: Path) -> None:
    """The library's `RuntimeError`, which others may wait for, with a tensor and both shapes."""
    with pytest.raises(RuntimeError, match=r"word_embeddings.weight has shape \(40, 16\) in the file and \(41, 16\)"):
        ExtBertModel.from_pretrained(folder, vocab_size=41)


# --- positions and empty inputs -----------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 4)])
def test_positions_of_another_shape(make, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"position_ids must have shape \(2, 4\) or \(1, 4\)"):
        make()(IDS, position_ids=torch.zeros(shape, dtype=torch.long))


@each_model
@pytest.mark.parametrize("ids", [IDS[:0], IDS[:, :0]])
def test_no_token_at_all(make, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="there is no token in it"):
        make()(ids)


def test_token_label_outside_the_vocabulary() -> None:
    labels = torch.full((2, 4), 999)
    with pytest.raises(ValueError, match=r"labels holds 999, outside 0\.\.\d+ \(vocab_size="):
        bert(ExtBertForMaskedLM)(IDS, labels=labels)
