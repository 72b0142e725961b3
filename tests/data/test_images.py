import numpy as np
import pytest
import torch
from PIL import Image

from opteq.data import images as images_module
from opteq.data.images import ArrayImages, FileImages, read_image
from opteq.errors import ConfigError


def save(path, pixels):
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def test_an_image_of_the_right_size_is_unchanged(tmp_path, pixels):
    result = read_image(save(tmp_path / "a.png", pixels), channels=3, size=8)
    np.testing.assert_array_equal(result.numpy(), pixels.transpose(2, 0, 1))


def test_grey_from_colour(tmp_path, pixels):
    result = read_image(save(tmp_path / "a.png", pixels), channels=1, size=8)
    luma = pixels @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(result[0].numpy(), luma, atol=1)


def test_long_images_are_resized_and_cropped_at_the_centre(tmp_path):
    wide = np.zeros((16, 48), dtype=np.uint8)
    wide[:, 16:32] = 255
    result = read_image(save(tmp_path / "a.png", wide), channels=1, size=8)
    assert result.shape == (1, 8, 8)
    assert result[0, :, 2:6].min() == 255


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    deep = np.array([[0, 257], [32896, 65535]], dtype=np.uint16)
    result = read_image(save(tmp_path / "a.png", deep), channels=1, size=2)
    np.testing.assert_array_equal(result[0].numpy(), [[0, 1], [128, 255]])


def test_floating_point_pixels_are_refused(tmp_path):
    path = save(tmp_path / "a.tif", np.array([[np.nan, 1.0]], dtype=np.float32))
    with pytest.raises(ConfigError, match=r"a\.tif holds floating-point pixels"):
        read_image(path, channels=1, size=1)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n"])
def test_an_unreadable_image_is_named(tmp_path, content):
    path = tmp_path / "broken.png"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.png"):
        read_image(path, channels=3, size=8)


def test_a_truncated_image_is_named(tmp_path, pixels):
    path = save(tmp_path / "cut.png", np.tile(pixels, (20, 20, 1)))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ConfigError, match=r"cut\.png"):
        read_image(path, channels=3, size=8)


def test_files_are_read_into_memory_only_within_the_budget(tmp_path, pixels, monkeypatch):
    paths = [save(tmp_path / f"{i}.png", np.roll(pixels, i, axis=0)) for i in range(3)]
    files = FileImages(paths, torch.tensor([2, 1, 0]), channels=3, size=8)
    cached = files.in_memory()
    assert isinstance(cached, ArrayImages)
    for one, other in zip(files.__getitems__([2, 0]), cached.__getitems__([2, 0]), strict=True):
        assert torch.equal(one, other)
    assert files.subset(torch.tensor([1])).paths == [paths[1]]
    monkeypatch.setattr(images_module, "MEMORY_BUDGET_BYTES", 3 * 3 * 8 * 8 - 1)
    assert files.in_memory() is files
