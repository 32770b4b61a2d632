"""Pictures of attention: where each head of each layer looks, in a text or in an image, and the roll-out of all layers.

Attention roll-out (Abnar & Zuidema, 2020, https://arxiv.org/abs/2005.00928) follows what a token holds back through the
layers: each layer's attention, averaged over the heads, mixes the tokens of the layer below, and half of a token passes
it by on the residual path.

Legend: L layers, H heads, T tokens, P tokens before the patches (class token, ...), N patches.
"""

import inspect
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from hf_ext.modeling import ImageEncoderModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL.Image import Image

PANELS_IN_A_ROW = 4
INCHES_PER_TOKEN, LEAST_INCHES = 0.15, 2.2  # of a panel: a label for each token must stay readable
LEAST_WIDTH = 5.0  # inches of a picture, for its title
HEAT, COVER = "inferno", 0.6  # colours over an image, and how much of it they cover
BRIGHTEST = 0.98  # share of patches below the brightest colour: one or two often hold far more than all others


@dataclass
class TextAttention:
    """Attention over a text.

    Attributes:
        weights: (L, H, T, T), a row for each token that looks, a column for each that is looked at; rows sum to 1.
        tokens: T labels.
    """

    weights: Tensor
    tokens: list[str]


@dataclass
class ImageAttention:
    """Attention over an image.

    Attributes:
        weights: (L, H, T, T), rows sum to 1; the first P = T - N tokens are no patches.
        image: (height, width, 3 or 1), as the model saw it, 0 to 1.
        grid: rows and columns of the N patches.
    """

    weights: Tensor
    image: numpy.ndarray
    grid: tuple[int, int]

    def map(self, weights: Tensor) -> numpy.ndarray:
        """(T, T) -> (rows, columns): how much the first token, which stands for the image, looks at each patch."""
        return weights[0, -self.grid[0] * self.grid[1] :].unflatten(0, self.grid).numpy()


def rollout(weights: Tensor) -> Tensor:
    """What every token of the last layer holds of each token of the input.

    Args:
        weights: (L, H, T, T), rows sum to 1, the first layer first.

    Returns:
        (T, T), rows sum to 1.
    """
    held = torch.eye(weights.shape[-1])
    for layer in weights.float().mean(1):
        held = (layer + torch.eye(layer.shape[-1])) / 2 @ held
    return held


# ------------------------------------------------------------------------------------------------- reading


@torch.no_grad()
def read_text(model, tokenizer, text: str, *, max_tokens: int = 48) -> TextAttention:
    """Run a text through a model and keep the attention. Of an encoder-decoder it is the encoder's, of a pair of text
    and image encoders that of the text.

    Args:
        model: an encoder, decoder or encoder-decoder of this package, without a head.
        tokenizer: its tokenizer.
        max_tokens: a longer text is cut: labels could not be read.

    Raises:
        ValueError: the model takes no text, the text is empty, or the attention is not one over all tokens.
    """
    model = getattr(model, "text_model", model)
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    if "input_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no text; give it an image, if it takes images.")
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=max_tokens)
    ids = inputs["input_ids"]
    if not ids.numel():
        raise ValueError("the text has no token; give one with a word in it.")
    weights = _run(model, input_ids=ids, attention_mask=inputs["attention_mask"])
    tokens = [token.replace("Ġ", "▁").replace("Ċ", "↵") for token in tokenizer.convert_ids_to_tokens(ids[0].tolist())]
    if weights.shape[2:] != (len(tokens), len(tokens)):
        raise ValueError(
            f"the attention of {type(model).__name__} has the shape {tuple(weights.shape[2:])} over {len(tokens)} "
            "tokens: it is not one of every token to every token, and cannot be shown like this."
        )
    return TextAttention(weights, tokens)


@torch.no_grad()
def read_image(model, processor, image: "Image") -> ImageAttention:
    """Run an image through a model and keep the attention; of a pair of text and image encoders that of the image.

    Args:
        model: an image encoder of this package, without a head.
        processor: its image processor.

    Raises:
        ValueError: the model takes no images, or looks at parts of them only.
    """
    model = getattr(model, "vision_model", model)
    if not isinstance(model, ImageEncoderModel):
        takes = "pixel_values" in inspect.signature(model.forward).parameters
        raise ValueError(
            f"{type(model).__name__} attends inside windows that change from layer to layer, and has no token for the "
            "whole image: there is no map of it. ViT, DeiT and CLIP have one."
            if takes
            else f"{type(model).__name__} takes no images; give it a text."
        )
    image = image.convert("RGB" if model.config.num_channels == 3 else "L")
    pixels = processor(images=image, return_tensors="pt")["pixel_values"]
    # At the size that the positions were learned for, interpolation changes nothing.
    weights = _run(model, pixel_values=pixels, interpolate_pos_encoding=True)
    shown = pixels[0].permute(1, 2, 0).numpy()
    if getattr(processor, "do_normalize", True):
        shown = shown * numpy.array(processor.image_std) + numpy.array(processor.image_mean)
    return ImageAttention(weights, shown.clip(0, 1), model.patch_grid_of(pixels))


def _run(model, **inputs: object) -> Tensor:
    """The attention weights (L, H, T, T) of one example. Only the spelled-out implementation has them."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        outputs = model(**inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    return torch.cat([layer.float() for layer in outputs.attentions])


# ------------------------------------------------------------------------------------------------- drawing


def new_figure(width: float, height: float) -> "Figure":
    """A matplotlib figure of a size in inches, independent of any screen.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError('matplotlib draws the pictures; install it with: pip install "hf-ext[plots]"') from None
    return Figure(figsize=(width, height), layout="constrained")


def _panels(count: int, inches: float) -> tuple["Figure", list["Axes"]]:
    columns = min(count, PANELS_IN_A_ROW)
    rows = math.ceil(count / columns)
    figure = new_figure(max(columns * inches + 1.2, LEAST_WIDTH), rows * (inches + 0.2) + 0.9)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for empty in axes[count:]:
        empty.set_axis_off()
    return figure, axes[:count]


def draw_tokens(maps: dict[str, Tensor], tokens: list[str], title: str) -> "Figure":
    """Heat maps over a text side by side, in one scale of colours.

    Args:
        maps: heading -> (T, T).
        tokens: T labels, on the left of the first panel of a row and under the last one of a column.
    """
    figure, axes = _panels(len(maps), max(INCHES_PER_TOKEN * len(tokens), LEAST_INCHES))
    largest = max(float(values.max()) for values in maps.values())
    places = range(len(tokens))
    for i, (ax, (heading, values)) in enumerate(zip(axes, maps.items())):
        drawn = ax.imshow(values.numpy(), vmin=0, vmax=largest, cmap="viridis")
        ax.set_title(heading, fontsize=9)
        # parse_math=False: a token may be a dollar sign.
        left, bottom = i % PANELS_IN_A_ROW == 0, i + PANELS_IN_A_ROW >= len(maps)
        ax.set_yticks(places, tokens if left else [""] * len(tokens), fontsize=7, parse_math=False)
        ax.set_xticks(places, tokens if bottom else [""] * len(tokens), fontsize=7, rotation=90, parse_math=False)
        ax.tick_params(length=2)
    figure.colorbar(drawn, ax=axes, fraction=0.03, label="attention")
    figure.suptitle(f"{title}\nA row is a token that looks, a column one that is looked at.", fontsize=10)
    return figure


def draw_patches(maps: dict[str, numpy.ndarray], image: numpy.ndarray, title: str) -> "Figure":
    """The image, and maps of patches over it side by side, each in a scale of colours of its own.

    Args:
        maps: heading -> (rows, columns).
        image: (height, width, 3 or 1).
    """
    figure, axes = _panels(len(maps) + 1, 2.6)
    height, width, channels = image.shape
    grey = image.mean(2)
    for ax, (heading, values) in zip(axes, [("image", None), *maps.items()]):
        ax.imshow(image if values is None and channels == 3 else grey, cmap="gray", vmin=0, vmax=1)
        if values is not None:
            edges = (-0.5, width - 0.5, height - 0.5, -0.5)  # of the image in its own pixels
            scale = {"vmin": values.min(), "vmax": numpy.quantile(values, BRIGHTEST)}
            ax.imshow(values, cmap=HEAT, alpha=COVER, extent=edges, interpolation="bilinear", **scale)
        ax.set_title(heading, fontsize=9)
        ax.set_axis_off()
    figure.suptitle(f"{title}\nBright: what the first token looks at most.", fontsize=10)
    return figure


def draw_rollout(attention: TextAttention | ImageAttention, title: str) -> "Figure":
    """The roll-out over all layers."""
    values = rollout(attention.weights)
    if isinstance(attention, TextAttention):
        return draw_tokens({"roll-out": values}, attention.tokens, title)
    return draw_patches({"roll-out": attention.map(values)}, attention.image, title)


def draw_layer(attention: TextAttention | ImageAttention, layer: int, heads: list[int], title: str) -> "Figure":
    """Some heads of one layer, counted from 0."""
    chosen = {f"head {head}": attention.weights[layer, head] for head in heads}
    if isinstance(attention, TextAttention):
        return draw_tokens(chosen, attention.tokens, title)
    maps = {heading: attention.map(values) for heading, values in chosen.items()}
    return draw_patches(maps, attention.image, title)


def save_picture(figure: "Figure", path: Path) -> None:
    """Write a PNG next to its place and move it there, so that no reader ever sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            figure.savefig(file, format="png", dpi=110)
        os.chmod(name, 0o644)  # mkstemp's files are for their owner only
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
