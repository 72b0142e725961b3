import pickle

import numpy as np
import pytest
import torch

from opteq.data.preprocess import Normalization, Preprocess, random_crop, random_flip, random_part

GREY = Normalization((0.3,), (0.4,))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_normalization_agrees_with_numpy():
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(5)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    result, same = Preprocess(Normalization(mean, std))((images, labels))
    expected = (images.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)
    assert torch.equal(same, labels)


def test_every_image_is_shifted_by_its_own_offset():
    images = torch.randint(1, 256, (200, 2, 6, 7), dtype=torch.uint8)
    shifted = random_crop(images, padding=2)
    offsets = set()
    for before, after in zip(images, shifted, strict=True):
        padded = np.pad(before.numpy(), ((0, 0), (2, 2), (2, 2)))
        matches = [
            (i, j)
            for i in range(5)
            for j in range(5)
            if np.array_equal(padded[:, i : i + 6, j : j + 7], after.numpy())
        ]
        assert len(matches) == 1
        offsets |= set(matches)
    assert len(offsets) == 25


def test_parts_are_of_eight_percent_to_all_of_the_image():
    """An image whose pixels hold their place shows which part was enlarged."""
    size = 64
    places = torch.arange(size, dtype=torch.float64)
    image = torch.stack([places[:, None].expand(size, size), places.expand(size, size)])
    shares = []
    for _ in range(300):
        part = random_part(image)
        assert part.shape == image.shape
        # Between pixels the places are linear: so many pixels of the image are one of the part.
        height, width = (
            float(part[0, 40, 9] - part[0, 24, 9]) / 16,
            float(part[1, 9, 40] - part[1, 9, 24]) / 16,
        )
        # By a pixel of rounding in each direction.
        assert 3 / 4 - 0.07 < width / height < 4 / 3 + 0.1
        shares.append(width * height)
    assert 0.08 - 0.02 < min(shares) < 0.15
    assert 0.85 < max(shares) <= 1 + 1e-9


def test_about_half_of_the_images_are_flipped():
    images = torch.arange(6, dtype=torch.uint8).expand(400, 1, 2, 6)
    flipped = random_flip(images)
    is_flipped = (flipped == images.flip(-1)).flatten(1).all(1)
    assert ((flipped == images).flatten(1).all(1) | is_flipped).all()
    assert 150 < is_flipped.sum() < 250


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augmentation", ["crop", "crop-flip", "resized-crop-flip", "randaugment"])
def test_augmentation_changes_images_and_keeps_their_form(augmentation, channels):
    normalization = Normalization((0.3,) * channels, (0.4,) * channels)
    images = torch.randint(0, 256, (32, channels, 16, 16), dtype=torch.uint8)
    plain, _ = Preprocess(normalization)((images, torch.zeros(32)))
    changed, _ = Preprocess(normalization, augmentation)((images, torch.zeros(32)))
    assert changed.shape == plain.shape
    assert changed.dtype == torch.float32
    assert not torch.equal(changed, plain)
    # Pixels stay within those of black and white.
    assert changed.min() >= -0.3 / 0.4 - 1e-6
    assert changed.max() <= 0.7 / 0.4 + 1e-6


def test_randaugment_goes_beyond_crop_and_flip():
    images = torch.full((8, 1, 8, 8), 128, dtype=torch.uint8)
    images[:, :, :, 4:] = 30
    batch = (images, torch.zeros(8))
    flipped, augmented = (Preprocess(GREY, name)(batch)[0] for name in ("crop-flip", "randaugment"))
    # Black, and the two greys of the images.
    assert len(flipped.unique()) == 3
    assert len(augmented.unique()) > 3


def test_works_in_worker_processes():
    assert pickle.loads(pickle.dumps(Preprocess(GREY, "randaugment"))).augmentation == "randaugment"
