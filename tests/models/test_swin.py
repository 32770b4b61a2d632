"""What is special to Swin: sizes, stages, the backbone."""

import pytest
import torch
import transformers
from cases import CASES
from harness import assert_close, randomise
from torch import Tensor

import hf_ext

FIELDS = CASES["ext_swin"].configs["square"]


def model_of(head: str = "Model", **fields: object):
    torch.manual_seed(0)
    model = getattr(hf_ext, f"ExtSwin{head}")(hf_ext.ExtSwinConfig(**{**FIELDS, **fields})).eval()
    randomise(model)
    return model


def images(*size: int) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(sum(size)))


@torch.no_grad()
def test_results_do_not_depend_on_earlier_images():
    """A small image leaves nothing behind; in the stock class the windows of all later ones shrink."""
    model = model_of()
    large, small = images(32, 32), images(8, 8)
    expected = model(large).last_hidden_state
    model(small)
    assert torch.equal(model(large).last_hidden_state, expected)


@torch.no_grad()
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (7, 30), (30, 7), (17, 33), (64, 2)])
def test_any_size(size):
    """Grids smaller than a window, of a single row, and of rests everywhere."""
    model = model_of()
    output = model(images(*size), output_hidden_states=True)
    rows, columns = (-(-x // 2) for x in size)
    assert [tuple(x.shape[2:]) for x in output.reshaped_hidden_states] == [
        (rows, columns), ((rows + 1) // 2, (columns + 1) // 2), ((rows + 1) // 2, (columns + 1) // 2)
    ]  # fmt: skip
    for flat, shaped in zip(output.hidden_states, output.reshaped_hidden_states, strict=True):
        assert torch.equal(flat, shaped.flatten(2).transpose(1, 2))
        assert flat.isfinite().all()


@torch.no_grad()
def test_rows_and_columns_are_not_swapped():
    """With biases that do not tell rows from columns, a transposed image gives the transposed map."""
    model = model_of(depths=[2], num_heads=[2], window_size=3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias_table"):
            table = parameter.view(5, 5, -1)
            parameter.copy_(((table + table.transpose(0, 1)) / 2).flatten(0, 1))
        elif name.endswith("projection.weight"):
            parameter.copy_((parameter + parameter.transpose(2, 3)) / 2)
    pixels = images(14, 26)
    expected = model(pixels, output_hidden_states=True).reshaped_hidden_states[-1]
    found = model(pixels.transpose(2, 3), output_hidden_states=True).reshaped_hidden_states[-1]
    assert_close(found.transpose(2, 3), expected, "transposed")


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 16), (18, 22), (40, 24)])
def test_backbone(size, tmp_path):
    """Maps of the stages asked for, out of the file of a whole model too."""
    source = model_of("ForImageClassification")
    hf_ext.export_official(source, tmp_path / "official")
    wanted = {"out_features": ["stem", "stage2"]}
    ours = hf_ext.ExtSwinBackbone.from_pretrained(tmp_path / "official", **wanted).eval()
    stock = transformers.SwinBackbone.from_pretrained(tmp_path / "official", **wanted).eval()
    for model in (ours, stock):
        randomise(model.hidden_states_norms)
    output, expected = (model(images(*size), output_hidden_states=True) for model in (ours, stock))
    assert [x.shape[1] for x in output.feature_maps] == ours.channels == [8, 16]
    for name in ("feature_maps", "hidden_states"):
        assert len(output[name]) == len(expected[name])
        for i, (x, y) in enumerate(zip(output[name], expected[name], strict=True)):
            assert_close(x, y, f"{name}.{i}")
    assert ours(images(*size)).hidden_states is None


def test_masked_images_of_any_size():
    """The loss is over the pixels of masked patches, as far as the image goes."""
    model = model_of("ForMaskedImageModeling")
    pixels = images(13, 18)  # 7 x 9 patches, 4 x 5 tokens of the last stage
    mask = torch.zeros(2, 63, dtype=torch.bool)
    mask[0, 0] = mask[1, 62] = True  # the last patch has one row of pixels
    output = model(pixels, bool_masked_pos=mask)
    assert output.reconstruction.shape == (2, 3, 16, 20)
    error = (output.reconstruction[..., :13, :18] - pixels).abs()
    wanted = (error[0, :, :2, :2].sum() + error[1, :, 12:, 16:].sum()) / (4 + 2) / 3
    assert_close(output.loss, wanted, "loss")


def test_what_users_get_wrong():
    with pytest.raises(ValueError, match="Swin attends inside windows and takes none"):
        model_of()(images(16, 16), attention_mask=torch.ones(2, 64))
    with pytest.raises(ValueError, match=r"are 18 x 16 pixels.*expects 16 x 16 \(image_size\).*interpolate_pos_enc"):
        model_of(use_absolute_embeddings=True)(images(18, 16))
    with pytest.raises(ValueError, match=r"encoder_stride \(8\) must be 4"):
        model = model_of("ForMaskedImageModeling", encoder_stride=8)
        model(images(16, 16), bool_masked_pos=torch.zeros(2, 64, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"width of stage 2, embed_dim \* 2 \(16\), must be a multiple.*\(3\)"):
        hf_ext.ExtSwinConfig(**{**FIELDS, "num_heads": [2, 3]})
