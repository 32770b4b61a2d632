"""What is special to image encoders: sizes of images, and what users get wrong about them."""

import pytest
import torch
from cases import CASES
from harness import assert_close, randomise, sides, subjects
from torch import Tensor

import hf_ext

ENCODERS = subjects("image", configs="one")
CLASSIFIERS = subjects("image_row", configs="one", where=lambda s: "image_size" in s.fields)
MASKED = subjects("masked_image", configs="one")


def over(found):
    return pytest.mark.parametrize("subject", found, ids=str)


def model_of(subject, **fields: object):
    torch.manual_seed(0)
    return subject.ours(subject.our_config(**{**subject.fields, **fields})).eval()


def images(config: object, *size: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(batch, config.num_channels, *(size or sides(config.image_size)), generator=generator)


def pair(subject, tmp_path, **fields: object):
    """The stock model and ours from the same file."""
    stock = subject.stock(subject.stock_config(**{**subject.fields, **fields}))
    randomise(stock)
    stock.save_pretrained(tmp_path)
    return stock.eval(), subject.ours.from_pretrained(tmp_path).eval()


# --- position interpolation ---------------------------------------------------------------------------------------


@over(ENCODERS)
@torch.no_grad()
def test_other_sizes_are_those_of_the_stock_class(subject, tmp_path):
    _, ours = pair(subject, tmp_path)
    height, width = sides(subject.fields["image_size"])
    for size in ((2 * height, width), (height, 3 * width), (height + 5, width + 1), (height, height), (40, 37)):
        pixels = images(ours.config, *size)
        stock = subject.stock.from_pretrained(tmp_path).eval()  # a stock Swin changes with the images that it has seen
        expected = stock(pixels, interpolate_pos_encoding=True)
        assert_close(
            ours(pixels, interpolate_pos_encoding=True).last_hidden_state, expected.last_hidden_state, str(size)
        )


@over(ENCODERS)
@torch.no_grad()
def test_interpolation_to_the_native_size_changes_no_bit(subject):
    model = model_of(subject)
    pixels = images(model.config)
    expected = model(pixels).last_hidden_state
    assert torch.equal(model(pixels, interpolate_pos_encoding=True).last_hidden_state, expected)


@over(ENCODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_images_that_are_not_square(subject, dtype):
    """The grid of the positions is read from the configuration, not taken for a square."""
    model = model_of(subject, image_size=(224, 112), patch_size=14, encoder_stride=14).to(dtype)
    pixels = images(model.config).to(dtype)
    expected = model(pixels).last_hidden_state
    assert torch.equal(model(pixels, interpolate_pos_encoding=True).last_hidden_state, expected)
    for size in ((518, 518), (112, 224), (28, 14)):
        assert model(images(model.config, *size), interpolate_pos_encoding=True).last_hidden_state.isfinite().all()


@over([s for s in ENCODERS if s.case.fixed_size])  # how Swin cuts windows depends on the size
@torch.no_grad()
def test_sizes_in_traced_graphs(subject):
    """One exported program, and one compiled graph, take images of any size."""
    model = model_of(subject)
    patch = sides(model.config.patch_size)
    size = (patch[0] * 6, patch[1] * 7)
    batch, high, wide = (torch.export.Dim(name, min=2, max=12) for name in ("batch", "high", "wide"))
    arguments = {"pixel_values": images(model.config, *size, batch=3), "interpolate_pos_encoding": True}
    shapes = {"pixel_values": {0: batch, 2: patch[0] * high, 3: patch[1] * wide}, "interpolate_pos_encoding": None}
    program = torch.export.export(model, (), arguments, dynamic_shapes=shapes, strict=False).module()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for rows, columns in ((6, 7), (5, 3), (3, 9)):
        pixels = images(model.config, patch[0] * rows, patch[1] * columns)
        expected = model(pixels, interpolate_pos_encoding=True).last_hidden_state
        for name, traced in (("exported", program), ("compiled", compiled)):
            found = traced(pixel_values=pixels, interpolate_pos_encoding=True).last_hidden_state
            assert_close(found, expected, f"{name}, {rows} x {columns}")


@over([s for s in MASKED if s.case.fixed_size])
def test_reconstruction_of_images_that_are_not_square(subject):
    """The loss is the mean absolute error over the pixels of masked patches, and no others."""
    patch = 4
    model = model_of(subject, image_size=(12, 21), patch_size=patch, encoder_stride=patch)
    pixels = images(model.config)
    mask = torch.zeros(2, 15, dtype=torch.bool)
    mask[0, 0] = mask[0, 7] = mask[1, 14] = True  # row 0 column 0, row 1 column 2, row 2 column 4
    output = model(pixels, bool_masked_pos=mask)
    assert output.reconstruction.shape == (2, model.config.num_channels, 12, 20)
    error = (output.reconstruction - pixels[..., :20]).abs()
    cells = [(0, 0, 0), (0, 1, 2), (1, 2, 4)]
    wanted = torch.stack([error[b, :, r * 4 : r * 4 + 4, c * 4 : c * 4 + 4].mean() for b, r, c in cells]).mean()
    assert_close(output.loss, wanted, "loss")
    assert model(pixels).loss is None
    assert model(pixels, bool_masked_pos=torch.zeros_like(mask)).loss == 0


# --- what users get wrong -----------------------------------------------------------------------------------------

EVERY = [*ENCODERS, *CLASSIFIERS, *MASKED]


@over(EVERY)
def test_another_number_of_channels(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match="have 1 channels, the model takes num_channels=3"):
        model(images(model.config)[:, :1])


@over(EVERY)
def test_no_images(subject):
    with pytest.raises(ValueError, match="pixel_values are needed"):
        model_of(subject)()


@over(EVERY)
def test_one_image_without_a_batch(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match=r"must have shape \(batch, num_channels, height, width\), got \(3, "):
        model(images(model.config)[0])


@over([s for s in EVERY if s.case.fixed_size])  # Swin fills images up
def test_an_image_smaller_than_a_patch(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match=r"are 2 x 40 pixels.*smaller than one patch of \d+ x \d+ \(patch_size\)"):
        model(images(model.config, 2, 40), interpolate_pos_encoding=True)


@over([s for s in EVERY if s.case.fixed_size])
def test_another_size_without_the_flag(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match=r"are 24 x 48 pixels.*expects 12 x 12 \(image_size\).*interpolate_pos_enc"):
        model(images(model.config, 24, 48))


@over(CLASSIFIERS)
def test_labels_of_the_wrong_shape(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\)"):
        model(images(model.config), labels=torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=r"labels holds 3, outside 0\.\.2 \(num_labels=3\)"):
        model(images(model.config), labels=torch.tensor([0, 3]))


@over(CLASSIFIERS)
def test_no_labels_leaves_the_features(subject):
    model = model_of(subject, num_labels=0)
    assert model(images(model.config)).logits.shape == (2, model.config.hidden_size)


@over(MASKED)
def test_masks_that_do_not_fit(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match=r"bool_masked_pos must have shape \(2, \d+\).*got \(2, 5\)"):
        model(images(model.config), bool_masked_pos=torch.zeros(2, 5, dtype=torch.bool))
    model.config.encoder_stride = 1
    with pytest.raises(ValueError, match=r"encoder_stride \(1\) must be \d+"):
        model(images(model.config), bool_masked_pos=torch.zeros(2, 5, dtype=torch.bool))


@over(ENCODERS)
def test_a_mask_without_a_mask_token(subject):
    model = model_of(subject)
    with pytest.raises(ValueError, match="no mask token"):
        model(images(model.config), bool_masked_pos=torch.zeros(2, 9, dtype=torch.bool))


# --- attention masks ----------------------------------------------------------------------------------------------


def test_masked_out_patches_are_not_seen():
    """ViT takes a mask over its tokens, as the stock class does."""
    torch.manual_seed(0)
    config = hf_ext.ExtViTConfig(**CASES["ext_vit"].configs["square"])
    model = hf_ext.ExtViTModel(config).eval()
    pixels = images(config)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[:, 9] = 0
    changed = pixels.clone()
    changed[:, :, 8:, 8:] += 1.0  # the last patch
    with torch.no_grad():
        outputs = [model(x, attention_mask=mask).last_hidden_state[:, :9] for x in (pixels, changed)]
        assert torch.equal(*outputs)
        assert not torch.equal(*(model(x).last_hidden_state[:, :9] for x in (pixels, changed)))
