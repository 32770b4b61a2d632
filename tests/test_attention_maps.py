"""Pictures of attention: what is computed, what is drawn, and what is said when it cannot be."""

import re
import sys
from pathlib import Path

import numpy
import pytest
import torch
import transformers
from cases import CASES
from harness import randomise, tiny_tokenizer
from PIL import Image
from typer.testing import CliRunner

import hf_ext
from hf_ext.cli.app import app
from hf_ext.inspection.attention import ImageAttention, draw_tokens, read_image, read_text, rollout, save_picture


def test_rollout_by_hand():
    """Two layers over two tokens, two heads: mean of the heads, half of it the token itself, last @ first."""
    first = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]]])  # mean 1/2, so [[3/4, 1/4], [1/4, 3/4]]
    last = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]).expand(2, 2, 2)  # with the residual [[1/2, 1/2], [0, 1]]
    assert rollout(torch.stack([first, last])).tolist() == [[0.5, 0.5], [0.25, 0.75]]
    assert torch.equal(rollout(torch.eye(3).expand(4, 2, 3, 3)), torch.eye(3))


def model_of(kind: str, config: str = "", **fields: object):
    case = CASES[kind]
    architecture = hf_ext.architecture_of(kind)
    settings = case.configs[config or next(iter(case.configs))]
    model = architecture.load(architecture.heads["AutoModel"])(architecture.config_class(**{**settings, **fields}))
    randomise(model)
    return model.eval()


def processor_of(model) -> transformers.ViTImageProcessor:
    height, width = model.config.image_shape
    return transformers.ViTImageProcessor(size={"height": height, "width": width})


@pytest.mark.parametrize("kind", ["ext_vit", "ext_deit", "ext_clip"])
def test_attention_over_an_image(kind):
    """The weights are the model's own, and the map is that of the class token, row by row."""
    model = model_of(kind)
    tower = getattr(model, "vision_model", model)
    shape, implementation = tower.config.image_shape, tower.config._attn_implementation
    pixels = numpy.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=numpy.uint8)
    processor = processor_of(tower)
    seen = read_image(model, processor, Image.fromarray(pixels))
    assert tower.config._attn_implementation == implementation != "eager"
    tower.set_attn_implementation("eager")
    inputs = processor(images=Image.fromarray(pixels), return_tensors="pt")
    with torch.no_grad():  # as the reader: few numbers then take other operations
        expected = tower(**inputs, output_attentions=True).attentions
    assert torch.equal(seen.weights, torch.cat(expected))
    assert seen.grid == tower.config.patch_grid
    assert abs(seen.image - pixels / 255).max() < 1e-2
    patches = seen.grid[0] * seen.grid[1]
    assert numpy.array_equal(seen.map(seen.weights[0, 0]).ravel(), seen.weights[0, 0, 0, -patches:].numpy())


def test_map_of_a_grid_that_is_not_square():
    weights = torch.zeros(8, 8)
    weights[0, 2 + 3 + 1] = 1.0  # two prefix tokens, the second row of three columns, its second column
    seen = ImageAttention(weights[None, None], numpy.zeros((4, 6, 3)), (2, 3))
    assert seen.map(weights).tolist() == [[0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("kind", ["ext_bert", "ext_gpt2", "ext_t5", "ext_clip"])
def test_attention_over_a_text(kind):
    """Encoder, decoder, the encoder of a pair, the text half of a pair."""
    tokenizer = tiny_tokenizer()
    fields = {}
    if kind == "ext_clip":  # pooled at the end of the text
        text_config = CASES[kind].configs["first-eos"]["text_config"]
        fields = {"text_config": {**text_config, "eos_token_id": [tokenizer.eos_token_id]}}
    seen = read_text(model_of(kind, **fields), tokenizer, "the cat</s>the cat", max_tokens=4)
    assert seen.tokens == ["the", "cat", "</s>", "the"]
    assert seen.weights.shape[2:] == (4, 4)
    torch.testing.assert_close(seen.weights.sum(-1), torch.ones(seen.weights.shape[:3]))
    assert (seen.weights[..., 0, 1] == 0).all() == (kind in ("ext_gpt2", "ext_clip")), "causal"


def test_tokens_that_look_like_formulas(tmp_path):
    """A dollar sign is a dollar sign, and nothing is left behind beside the picture."""
    maps = {f"head {i}": torch.rand(3, 3) for i in range(2)}
    save_picture(draw_tokens(maps, ["$", "x_{", "$"], "2 heads"), tmp_path / "tokens.png")
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.png"]
    width, height = Image.open(tmp_path / "tokens.png").size
    assert width > height > 300


# ------------------------------------------------------------------------------------------------- the command


def run(*arguments: object):
    return CliRunner().invoke(app, ["attention", *map(str, arguments)])


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    model = model_of("ext_vit")
    model.save_pretrained(folder)
    processor_of(model).save_pretrained(folder)
    Image.fromarray(numpy.random.default_rng(0).integers(0, 255, (30, 20, 3), dtype=numpy.uint8)).save(
        folder / "image.png"
    )
    return folder


def test_pictures_of_an_image(vit, tmp_path):
    options = (vit, "--image", vit / "image.png", "-o", tmp_path / "out")
    result = run(*options, "--layer", 1, "--head", 0)
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["layer-01.png", "rollout.png"]
    before = (tmp_path / "out" / "layer-01.png").read_bytes()
    refused = run(*options)
    assert refused.exit_code == 1 and re.match(r"error: .*rollout.png exists; .*--overwrite", refused.stderr)
    assert (tmp_path / "out" / "layer-01.png").read_bytes() == before
    assert run(*options, "--layer", 1, "--overwrite").exit_code == 0
    assert (tmp_path / "out" / "layer-01.png").read_bytes() != before  # all heads now


def test_pictures_of_a_text(tmp_path):
    tokenizer = tiny_tokenizer()
    model_of("ext_bert", vocab_size=len(tokenizer), num_hidden_layers=2).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    result = run(tmp_path / "bert", "--text", "the cat sat", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "layer-00.png",
        "layer-01.png",
        "rollout.png",
    ]


def test_what_users_get_wrong(vit, tmp_path, monkeypatch):
    swin = model_of("ext_swin")
    swin.save_pretrained(tmp_path / "swin")
    processor_of(swin).save_pretrained(tmp_path / "swin")
    tiny_tokenizer().save_pretrained(tmp_path / "swin")
    image, out = ("--image", vit / "image.png"), ("-o", tmp_path / "out")
    for arguments, message in (
        ((vit, *out), "give either --text or --image"),
        ((vit, *image, "--text", "a", *out), "give either --text or --image"),
        ((vit, "--image", tmp_path / "none.png", *out), r"there is no file .*none\.png"),
        ((vit, "--image", vit / "config.json", *out), "is no image that Pillow can read"),
        ((vit, *image, "--layer", 7, *out), "there is no 7; the model has 0 to 1"),
        ((vit, *image, "-o", vit / "config.json"), "is a file; give a folder"),
        ((tmp_path / "swin", *image, *out), "attends inside windows that change from layer to layer"),
        ((tmp_path / "swin", "--text", "the cat", *out), "ExtSwinModel takes no text"),
    ):
        result = run(*arguments)
        assert result.exit_code and re.search(message, result.stderr), (message, result.stderr)
    with pytest.raises(ValueError, match="ExtBertModel takes no images"):
        read_image(model_of("ext_bert"), None, Image.new("RGB", (4, 4)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install "hf-ext[plots]"' in run(vit, *image, *out).stderr
    assert not (tmp_path / "out").exists()
