"""Encoder-decoders in `Seq2SeqTrainer` as it is: its label smoothing, generation while evaluating, what is saved."""

from pathlib import Path

import numpy
import pytest
import torch
import transformers
from harness import assert_close, no_warning
from safetensors.torch import load_file
from transformers import DataCollatorForSeq2Seq, EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments

import hf_ext
from hf_ext.data.vocabulary import END, PAD, START, train_bpe

HALVES = {
    "vocab_size": 264, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "dropout": 0.0,
}  # fmt: skip
T5 = {
    "vocab_size": 264, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0, "dropout_rate": 0.0,
}  # fmt: skip
MODELS = {
    "T5ForConditionalGeneration": ("T5Config", T5),
    "BartForConditionalGeneration": ("BartConfig", HALVES),
    "MarianMTModel": ("MarianConfig", HALVES),
}
TEXTS = ["the cat", "a dog barks", "it was very big", "the mat and the cat", "small", "a", "big dogs", "no"]
PAIRS = [(text, text[::-1][: 3 + 2 * i]) for i, text in enumerate(TEXTS)]  # answers of very unequal length


@pytest.fixture(scope="module")
def tokenizer():
    found = train_bpe(TEXTS, vocab_size=264, longest=30)
    assert found.convert_tokens_to_ids([PAD, START, END]) == [0, 1, 2] and len(found) <= 264
    text = "naïve ✓ the cat"
    ids = found(text).input_ids
    assert ids[-1] == 2 and found.decode(ids, skip_special_tokens=True).strip() == text
    return found


@pytest.fixture(scope="module", params=MODELS)
def classes(request, tmp_path_factory):
    """Stock class and ours, and a checkpoint of both."""
    config, fields = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    stock = getattr(transformers, request.param)
    stock(getattr(transformers, config)(**fields)).save_pretrained(folder)
    return stock, getattr(hf_ext, f"Ext{request.param}"), folder


def trainer(cls: type, checkpoint: Path, tokenizer, folder: Path, **settings: object) -> Seq2SeqTrainer:
    model = cls.from_pretrained(checkpoint)
    rows = [dict(tokenizer(text, text_target=target, return_token_type_ids=False)) for text, target in PAIRS]

    def exact(prediction: EvalPrediction) -> dict[str, float]:
        labels = numpy.where(prediction.label_ids < 0, 0, prediction.label_ids)
        made = tokenizer.batch_decode(prediction.predictions.clip(min=0), skip_special_tokens=True)
        wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
        return {"exact": sum(a == b for a, b in zip(made, wanted)) / len(wanted)}

    arguments = Seq2SeqTrainingArguments(
        str(folder), report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no", logging_steps=1,
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    return Seq2SeqTrainer(
        model, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=exact,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_training_as_with_the_stock_class(classes, tokenizer, tmp_path, smoothing):
    """Losses of each step and weights after three; smoothed, over micro-batches with unequal numbers of labels. The
    stock classes' own losses ignore that number, and double with two micro-batches."""
    found = []
    for cls in classes[:2]:
        run = trainer(
            cls, classes[2], tokenizer, tmp_path, max_steps=3, per_device_train_batch_size=2, learning_rate=0.5,
            gradient_accumulation_steps=2 if smoothing else 1, optim="sgd", lr_scheduler_type="constant",
            max_grad_norm=0.0, label_smoothing_factor=smoothing,
        )  # fmt: skip
        run.train()
        run.save_model(tmp_path / cls.__name__)
        found.append(([entry["loss"] for entry in run.state.log_history if "loss" in entry], cls))
    (expected, stock), (losses, ours) = found
    assert losses == pytest.approx(expected, rel=1e-4) and len(losses) == 3
    weights = [load_file(tmp_path / cls.__name__ / "model.safetensors") for cls in (ours, stock)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert_close(weights[0][name], value, name, 1e-4)


def test_generation_while_evaluating(classes, tokenizer, tmp_path):
    results = []
    for cls in classes[:2]:
        run = trainer(
            cls, classes[2], tokenizer, tmp_path, predict_with_generate=True, generation_num_beams=2,
            generation_max_length=9, per_device_eval_batch_size=3,
        )  # fmt: skip
        output = run.predict(run.eval_dataset, num_beams=3, max_length=7)
        assert output.predictions.shape[0] == len(PAIRS) and (output.predictions[:, 7:] <= 0).all()
        results.append((run.evaluate(), output))
    (expected, reference), (metrics, output) = results
    assert numpy.array_equal(output.predictions, reference.predictions)
    assert numpy.array_equal(output.label_ids, reference.label_ids)
    for name in ("eval_loss", "eval_exact"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_textbook_model_learns_to_turn_words_round(tokenizer, tmp_path):
    """From scratch, until most answers are right; then from the folder that was saved."""
    config = hf_ext.ExtTransformerConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, dropout=0.0,
        max_position_embeddings=40, norm_placement="pre",
    )  # fmt: skip
    torch.manual_seed(0)
    hf_ext.ExtTransformerForConditionalGeneration(config).save_pretrained(tmp_path / "random")
    run = trainer(
        hf_ext.ExtTransformerForConditionalGeneration, tmp_path / "random", tokenizer, tmp_path,
        predict_with_generate=True, generation_max_length=30, max_steps=60, learning_rate=1e-2,
        label_smoothing_factor=0.1, warmup_steps=10, lr_scheduler_type="inverse_sqrt",
    )  # fmt: skip
    run.train()
    assert run.evaluate()["eval_exact"] > 0.5
    run.save_model(tmp_path / "trained")
    with no_warning():
        again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "trained")
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    assert torch.equal(again.generate(**inputs, max_length=20), run.model.generate(**inputs, max_length=20))


def test_pipelines_that_the_library_has_no_more(classes):
    """Release 5 has no pipeline from text to text: `generate` and `hf-ext generate` remain. Its own message is seen."""
    model = classes[1].from_pretrained(classes[2])
    for task in ("text2text-generation", "summarization", "translation_en_to_de"):
        with pytest.raises(KeyError, match="text-generation"):
            transformers.pipeline(task, model=model)


def test_zero_shot_classification(tokenizer, tmp_path):
    """The use that BART's classifier is best known for."""
    fields = {**HALVES, "num_labels": 3, "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2}}
    fields["id2label"] = {i: name for name, i in fields["label2id"].items()}
    torch.manual_seed(0)
    transformers.BartForSequenceClassification(transformers.BartConfig(**fields)).save_pretrained(tmp_path / "stock")
    ours = hf_ext.ExtBartForSequenceClassification.from_pretrained(tmp_path / "stock")
    ours.save_pretrained(tmp_path / "ours")
    answers = []
    for name in ("ours", "stock"):
        tokenizer.save_pretrained(tmp_path / name)
        pipe = transformers.pipeline("zero-shot-classification", model=str(tmp_path / name), device="cpu")
        answers.append(pipe("a dog barks", candidate_labels=["animals", "furniture", "sums"]))
    assert answers[0]["labels"] == answers[1]["labels"]
    assert answers[0]["scores"] == pytest.approx(answers[1]["scores"], rel=1e-4)
