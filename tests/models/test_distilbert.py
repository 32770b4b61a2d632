"""What is special to DistilBERT: a table of sinusoids that is a parameter."""

import torch
from harness import dirty_memory
from transformers import DistilBertConfig, DistilBertModel

import hf_ext

FIELDS = {
    "vocab_size": 40,
    "dim": 14,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 20,
    "max_position_embeddings": 600,
    "sinusoidal_pos_embds": True,
}


def table(model: torch.nn.Module) -> torch.Tensor:
    return model.embeddings.position_embeddings.weight


def test_initial_sinusoids_are_the_official_ones() -> None:
    """Built directly, and on the meta device first, where no value is computed."""
    expected = table(DistilBertModel(DistilBertConfig(**FIELDS)))
    config = hf_ext.ExtDistilBertConfig(**FIELDS)
    model = hf_ext.ExtDistilBertModel(config)
    assert table(model).requires_grad
    torch.testing.assert_close(table(model), expected, rtol=0, atol=1e-7)
    with torch.device("meta"):
        late = hf_ext.ExtDistilBertModel(config)
    with dirty_memory():
        late = late.to_empty(device="cpu")
    late.initialize_weights()
    torch.testing.assert_close(table(late), expected, rtol=0, atol=1e-7)


def test_a_trained_table_is_not_overwritten(tmp_path) -> None:
    """Neither by loading it, nor where another tensor of the model is missing in the file."""
    model = hf_ext.ExtDistilBertModel(hf_ext.ExtDistilBertConfig(**FIELDS))
    with torch.no_grad():
        table(model).fill_(0.5)
    model.save_pretrained(tmp_path)
    head = hf_ext.ExtDistilBertForSequenceClassification.from_pretrained(tmp_path)
    assert (table(head.distilbert) == 0.5).all()


def test_segments_change_nothing() -> None:
    torch.manual_seed(0)
    model = hf_ext.ExtDistilBertModel(hf_ext.ExtDistilBertConfig(**FIELDS)).eval()
    ids = torch.randint(1, 40, (2, 6))
    with torch.no_grad():
        assert torch.equal(model(ids, token_type_ids=torch.ones_like(ids))[0], model(ids)[0])
