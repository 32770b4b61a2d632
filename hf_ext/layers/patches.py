"""Images as tokens: patches, masked patches, and positions on a grid.

An image is cut into patches that do not overlap, and a linear layer makes a token of each (Dosovitskiy et al., 2020,
https://arxiv.org/abs/2010.11929). The layer is a convolution whose stride is its kernel, as checkpoints hold it.

Shapes: B batch, I image channels, C model width, N patches, P tokens before the patches, h and w rows and columns of
the grid of patches.
"""

import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

Size = tuple[int, int]  # height and width


def check_image(pixel_values: Tensor | None, *, channels: int, patch_size: Size) -> None:
    """Raise ValueError unless these are images with the right channels and of at least one patch."""
    if pixel_values is None:
        raise ValueError("pixel_values are needed: the images that an image processor returns.")
    if pixel_values.dim() != 4:
        raise ValueError(
            f"pixel_values must have shape (batch, num_channels, height, width), got {tuple(pixel_values.shape)}."
        )
    if pixel_values.shape[1] != channels:
        raise ValueError(
            f"pixel_values have {pixel_values.shape[1]} channels, the model takes num_channels={channels}."
        )
    height, width = pixel_values.shape[2:]
    if height < patch_size[0] or width < patch_size[1]:
        raise ValueError(
            f"the images are {height} x {width} pixels (height x width), smaller than one patch of {patch_size[0]} x "
            f"{patch_size[1]} (patch_size)."
        )


def check_size(pixel_values: Tensor, image_size: Size) -> None:
    """Raise ValueError unless the images have the size that the learned positions are for."""
    size = tuple(pixel_values.shape[2:])
    if size != image_size:
        raise ValueError(
            f"the images are {size[0]} x {size[1]} pixels (height x width), the model expects {image_size[0]} x "
            f"{image_size[1]} (image_size). Resize them, as the image processor does, or pass "
            "interpolate_pos_encoding=True."
        )


def embed_patches(projection: nn.Conv2d, pixel_values: Tensor) -> Tensor:
    """(B, I, height, width) -> (B, N, C). Pixels beyond the last whole patch are left out."""
    return projection(pixel_values.to(projection.weight.dtype)).flatten(2).transpose(1, 2)


class PatchEmbedding(nn.Module):
    """Patches as tokens, for checkpoints that call the convolution `projection`.

    Args:
        channels: I.
        width: C.
        patch_size: height and width of a patch.
    """

    def __init__(self, *, channels: int, width: int, patch_size: Size) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, I, height, width) -> (B, N, C)

        Raises:
            ValueError: no images, other channels, or images smaller than a patch.
        """
        check_image(pixel_values, channels=self.projection.in_channels, patch_size=self.patch_size)
        return embed_patches(self.projection, pixel_values)

    def grid_of(self, pixel_values: Tensor) -> Size:
        """Rows and columns of patches in images (B, I, height, width)."""
        return pixel_values.shape[2] // self.patch_size[0], pixel_values.shape[3] // self.patch_size[1]


class PaddedPatchEmbedding(PatchEmbedding):
    """Patches of images of any size: zeros below and on the right fill the last ones up."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, I, height, width) -> (B, N, C)

        Raises:
            ValueError: no images, or other channels.
        """
        check_image(pixel_values, channels=self.projection.in_channels, patch_size=(1, 1))
        height, width = (-size % patch for size, patch in zip(pixel_values.shape[2:], self.patch_size))
        return embed_patches(self.projection, nn.functional.pad(pixel_values, (0, width, 0, height)))

    def grid_of(self, pixel_values: Tensor) -> Size:
        return tuple(-(-size // patch) for size, patch in zip(pixel_values.shape[2:], self.patch_size))


class PatchMerging(nn.Module):
    """Four neighbours become one token of twice the width (Liu et al., 2021, https://arxiv.org/abs/2103.14030, section
    3.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(4 * width)

    def forward(self, x: Tensor, grid: Size) -> Tensor:
        """(B, h * w, C) -> (B, ceil(h / 2) * ceil(w / 2), 2 C); the grid is filled up with zeros."""
        x = x.unflatten(1, grid)
        x = nn.functional.pad(x, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        x = torch.cat([x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)], dim=-1)
        return self.reduction(self.norm(x.flatten(1, 2)))


def mask_patches(x: Tensor, bool_masked_pos: Tensor | None, mask_token: Tensor | None) -> Tensor:
    """Put the mask token in place of some patches.

    Args:
        x: (B, N, C)
        bool_masked_pos: (B, N), True where a patch is masked; None masks nothing.
        mask_token: (1, 1, C), None in models that have none.

    Returns:
        (B, N, C)

    Raises:
        ValueError: the mask does not fit the patches, or there is no mask token.
    """
    if bool_masked_pos is None:
        return x
    if mask_token is None:
        raise ValueError(
            "bool_masked_pos was given, but the model has no mask token: use the class for masked image modelling, or "
            "build the model with use_mask_token=True."
        )
    if not is_tracing(x) and bool_masked_pos.shape != x.shape[:2]:
        raise ValueError(
            f"bool_masked_pos must have shape {tuple(x.shape[:2])}, one entry per patch, got "
            f"{tuple(bool_masked_pos.shape)}."
        )
    # Multiplied and not selected: a mask may also be a share between 0 and 1.
    share = bool_masked_pos.unsqueeze(-1).to(mask_token.dtype)
    return x * (1.0 - share) + mask_token * share


def interpolate_positions(table: Tensor, grid: Size, target: Size, *, prefix: int = 0) -> Tensor:
    """Learned positions of one grid of patches, bicubically interpolated to another (Dosovitskiy et al., section 3.2).

    In fp32 whatever the model's precision, and to an explicit size: a scale factor may round to one row less. At the
    native size the table itself is returned.

    Args:
        table: (1, P + h * w, C)
        grid: h and w of the table.
        target: h and w wanted.
        prefix: P, tokens before the patches (class, distillation), whose positions stay as they are.

    Returns:
        (1, P + N, C) with N the patches of the target.
    """
    if not is_tracing(table) and tuple(target) == tuple(grid):
        return table
    patches = table[:, prefix:].unflatten(1, grid).permute(0, 3, 1, 2)  # (1, C, h, w)
    patches = nn.functional.interpolate(patches.float(), size=tuple(target), mode="bicubic", align_corners=False)
    return torch.cat([table[:, :prefix], patches.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)
