"""Mazes: what is connected, against scipy's labels of connected regions."""

import numpy as np
import pytest
import torch
from scipy.ndimage import label

from opteq.data.connected import ConnectedPixels, mazes
from opteq.data.scenes import IGNORED, VOID
from opteq.errors import ConfigError


@pytest.mark.parametrize(("size", "open_share"), [(16, 0.62), (9, 0.3), (2, 0.01)])
def test_classes_are_the_regions_of_scipy(size: int, open_share: float):
    images, masks = mazes(60, size, open_share, seed=3)
    for image, mask in zip(images.numpy(), masks.numpy(), strict=True):
        red = (image[0] == 255) & (image[1] == 0)
        white = image[1] == 255
        assert red.sum() == 1
        assert ((image == 255) | (image == 0)).all()
        regions = np.asarray(label(white | red)[0])  # type: ignore[index]
        expected = np.where(white, regions == regions[red], VOID)
        np.testing.assert_array_equal(mask, expected)


def test_open_pixels_have_their_share():
    images, masks = mazes(500, 16, 0.62, seed=0)
    assert abs((images[:, 0] == 255).float().mean().item() - 0.62) < 0.01
    known = masks[masks != VOID]
    assert 0.3 < known.float().mean() < 0.9


def test_splits_are_different_and_fixed():
    def batches(seed: int):
        torch.manual_seed(seed)
        data = ConnectedPixels(size=8, test_size=12, train_images=32, test_images=16)
        data.setup("fit")
        data.setup("test")
        loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
        return [next(iter(loader)) for loader in loaders]

    (train, _), (val, val_masks), (test, test_masks) = batches(0)
    assert train.shape == val.shape == (16, 3, 8, 8)
    assert test.shape == (16, 3, 12, 12)
    assert set(val.unique().tolist()) == {-1.0, 1.0}
    assert set(test_masks.unique().tolist()) == {IGNORED, 0, 1}
    assert not torch.equal(train, val)
    _, (again, again_masks), (test_again, _) = batches(1)
    assert torch.equal(val, again)
    assert torch.equal(val_masks, again_masks)
    assert torch.equal(test, test_again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "at least 2 pixels"),
        ({"test_images": 0}, "one in every split"),
        ({"open_share": 1.0}, "open_share"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ConnectedPixels(**options)
