"""A real language model, SmolLM2-135M-Instruct, in our classes and in the stock ones."""

import pytest
import real_weights
import torch
import transformers
from transformers import AutoTokenizer

import hf_ext

pytestmark = pytest.mark.slow
pytest.importorskip("gguf", reason="the weights come as GGUF")

PARAGRAPH = (
    "Photosynthesis is the process by which green plants turn light, water and carbon dioxide into sugar and oxygen. "
    "It takes place in the chloroplasts of the leaves, where chlorophyll absorbs mostly red and blue light. "
    "Nearly all life on Earth depends on it, directly or through the food that animals eat."
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return real_weights.smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def mistral(checkpoint, tmp_path_factory):
    return real_weights.as_mistral(tmp_path_factory.mktemp("mistral"), checkpoint)


ARCHITECTURES = [name for name in ("llama", "mistral") if f"ext_{name}" in hf_ext.architectures()]


@pytest.fixture(params=ARCHITECTURES)
def folder(request, checkpoint):
    return checkpoint if request.param == "llama" else request.getfixturevalue("mistral")


def loaded(folder):
    """The stock model, ours, and the tokenizer."""
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with hf_ext.takeover():
        ours = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(ours).__name__ == f"Ext{type(stock).__name__}"
    return stock, ours, AutoTokenizer.from_pretrained(folder)


def ask(model, tokenizer, question, **options):
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return model.generate(**prompt, do_sample=False, **options)[0, prompt["input_ids"].shape[1] :]


def test_same_text_and_perplexity(folder):
    stock, ours, tokenizer = loaded(folder)
    ids = tokenizer(PARAGRAPH, return_tensors="pt")
    with torch.no_grad():
        expected, actual = (model(**ids, labels=ids["input_ids"]) for model in (stock, ours))
    assert actual.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert actual.loss.exp().item() < 25
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-4, atol=2e-3)

    answer = tokenizer.decode(ask(ours, tokenizer, "What is the capital of France?", max_new_tokens=24))
    assert "Paris" in answer
    question = "Explain in a few paragraphs how rain forms, and why it matters to farmers."
    options = {"max_new_tokens": 200, "min_new_tokens": 200}
    tokens = [ask(model, tokenizer, question, **options) for model in (stock, ours)]
    assert torch.equal(*tokens)
    assert "water" in tokenizer.decode(tokens[1])


def test_tokenizer_of_the_folder(checkpoint):
    """Digits apart, spaces kept, special tokens whole."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "In 2024, naïve  tokens\n<|im_start|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[2:6] == list("2024")
    assert ids[-1] == 1
