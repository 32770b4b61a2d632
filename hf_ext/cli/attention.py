"""`hf-ext attention`: pictures of where a model looks."""

from pathlib import Path
from typing import Annotated

import typer

from hf_ext.cli.models import find_model, quiet, refuse_adapter


def attention(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder or Hub id, with its tokenizer or image processor.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pictures.")],
    text: Annotated[str | None, typer.Option(help="A text, for models of text.")] = None,
    image: Annotated[Path | None, typer.Option(help="An image file, for models of images.")] = None,
    layer: Annotated[list[int] | None, typer.Option(min=0, help="From 0; repeatable; default: all.")] = None,
    head: Annotated[list[int] | None, typer.Option(min=0, help="From 0; repeatable; default: all.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the text that are shown.")] = 48,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace pictures of the same names.")] = False,
) -> None:
    """Draw where a model looks: rollout.png, all layers in one, and layer-NN.png, the heads of a layer side by side."""
    if (text is None) == (image is None):
        raise typer.BadParameter("give either --text or --image")
    if image is not None and not image.is_file():
        raise ValueError(f"there is no file {image}; check the path.")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; give a folder.")
    found = find_model(model)
    refuse_adapter(found, "attention")
    from hf_ext.auto import architecture_of
    from hf_ext.inspection.attention import draw_layer, draw_rollout, new_figure, read_image, read_text, save_picture

    new_figure(1, 1)  # what is missing is said before a model is loaded
    picture = None if image is None else open_image(image)
    with quiet(context):
        from transformers import AutoImageProcessor, AutoTokenizer

        architecture = architecture_of(found.config["model_type"])
        whole = architecture.load(architecture.heads["AutoModel"]).from_pretrained(found.source).eval()
        if picture is None:
            seen = read_text(whole, AutoTokenizer.from_pretrained(found.source), text, max_tokens=max_tokens)
        else:
            seen = read_image(whole, AutoImageProcessor.from_pretrained(found.source), picture)
        layers, heads = (
            chosen(name, wanted, count)
            for name, wanted, count in zip(("layer", "head"), (layer, head), seen.weights.shape[:2])
        )
        files = {output / f"layer-{number:02}.png": number for number in layers}
        taken = [path for path in (output / "rollout.png", *files) if path.exists()]
        if taken and not overwrite:
            raise ValueError(f"{taken[0]} exists; give another folder, or --overwrite to replace the pictures in it.")
        output.mkdir(parents=True, exist_ok=True)
        name = Path(found.source).resolve().name
        save_picture(draw_rollout(seen, f"{name}, all layers"), output / "rollout.png")
        for path, number in files.items():
            save_picture(draw_layer(seen, number, heads, f"{name}, layer {number}"), path)
    print(f"wrote rollout.png and {len(files)} of single layers to {output}")


def chosen(name: str, wanted: list[int] | None, count: int) -> list[int]:
    """The numbers asked for, all without a wish."""
    for number in wanted or ():
        if number >= count:
            raise typer.BadParameter(f"there is no {number}; the model has 0 to {count - 1}", param_hint=f"'--{name}'")
    return sorted(set(wanted)) if wanted else list(range(count))


def open_image(path: Path):
    """The image in a file."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError('Pillow reads images; install it with: pip install "hf-ext[vision]"') from None
    try:
        return Image.open(path)
    except UnidentifiedImageError:
        raise ValueError(f"{path} is no image that Pillow can read; give a PNG or JPEG file.") from None
