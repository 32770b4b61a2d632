"""What is special to MPT: the nested configuration, the list of blocks, inputs beyond the stated length."""

import json

import pytest
import torch
from transformers import MptConfig, MptForCausalLM

from hf_ext import ExtMptConfig, ExtMptForCausalLM, export_official
from hf_ext.inspection import compare

TINY = {"vocab_size": 50, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16}


def test_attn_config_from_a_file(tmp_path) -> None:
    content = {**TINY, "model_type": "mpt", "attn_config": {"clip_qkv": 6, "softmax_scale": 1, "attn_pdrop": 0.1}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    attention = ExtMptConfig.from_pretrained(tmp_path).attn_config
    assert (attention.clip_qkv, attention.softmax_scale, attention.attn_pdrop) == (6.0, 1.0, 0.1)
    assert ExtMptConfig(attn_config=attention).attn_config is attention
    assert ExtMptConfig().attn_config.clip_qkv is None


def test_integers_and_dropout_survive_the_official_export(tmp_path) -> None:
    """The official configuration refuses an integer bound and a fraction of dropout."""
    torch.manual_seed(0)
    model = ExtMptForCausalLM(ExtMptConfig(**TINY, attn_config={"clip_qkv": 1, "attn_pdrop": 0.0})).eval()
    export_official(model, tmp_path / "whole")
    stock = MptForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert stock.config.attn_config.clip_qkv == 1.0
    tokens = torch.arange(1, 10)[None]
    torch.testing.assert_close(model(tokens).logits, stock(tokens).logits, atol=1e-5, rtol=1e-5)
    model.config.attn_config.attn_pdrop = 0.1
    with pytest.raises(ValueError, match=r"attn_pdrop is 0\.1.*set config\.attn_config\.attn_pdrop = 0"):
        export_official(model, tmp_path / "fraction")


def test_dropout_is_in_use() -> None:
    torch.manual_seed(0)
    model = ExtMptForCausalLM(ExtMptConfig(**TINY, attn_config={"attn_pdrop": 0.3})).train()
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}
    assert {block.attn.attention_dropout for block in model.transformer.blocks} == {0.3}


def test_blocks_are_a_list_and_what_returns_it() -> None:
    model = ExtMptForCausalLM(ExtMptConfig(**TINY)).transformer
    assert model.blocks() is model.blocks is model.get_submodule("blocks")
    assert model.get_submodule("blocks.1") is model.blocks[1]
    assert len(model.blocks) == 2
    shorter = type(model.blocks)(list(model.blocks)[:1])
    model.blocks = shorter  # as layers are dropped
    assert model.blocks is shorter and model.blocks() is shorter


@torch.no_grad()
def test_beyond_max_seq_len(tmp_path) -> None:
    """Linear biases go on; the official class can be told by its field alone."""
    torch.manual_seed(0)
    MptForCausalLM(MptConfig(**TINY, initializer_range=0.2)).save_pretrained(tmp_path)
    tokens = torch.randint(1, 50, (2, 40))
    longer = MptForCausalLM.from_pretrained(tmp_path, max_seq_len=40).eval()
    ours = ExtMptForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(ours(tokens).logits, longer(tokens).logits, atol=1e-5, rtol=1e-5)


def test_parity_report(tmp_path) -> None:
    """The stock class has no sdpa, and its configuration takes integers only where dropout is switched off."""
    torch.manual_seed(0)
    fields = {**TINY, "max_seq_len": 64, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
    MptForCausalLM(MptConfig(**fields)).save_pretrained(tmp_path)
    report = compare(tmp_path, attn_implementation="sdpa", length=16)
    assert report.ok, report.rows
