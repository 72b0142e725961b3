"""The corruptions are those of the authors' program.

`published_corruptions.npz` holds ten photographs of 32×32 pixels and, for each corruption but `frost`, every
second row and column of what the program behind CIFAR-10-C (`make_cifar_c.py` of hendrycks/robustness) makes
of them, two of each severity, the mildest first. It was run with scikit-image 0.26, OpenCV 4.10, ImageMagick
6.9 and the random numbers of `RandomState(k)` for photograph `k`.
"""

from pathlib import Path

import numpy as np
import pytest

from opteq.errors import ConfigError
from opteq.evaluation.corrupting.corrupt import CORRUPTIONS, SEVERITIES, corrupt

PUBLISHED = np.load(Path(__file__).with_name("published_corruptions.npz"))
IMAGES = PUBLISHED["images"]


@pytest.mark.spec("R7.3")
@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name != "frost"])
def test_corruptions_are_the_published_ones(name):
    made = [corrupt(im, name, 1 + k // 2, np.random.RandomState(k)) for k, im in enumerate(IMAGES)]
    difference = np.abs(np.stack(made)[:, ::2, ::2].astype(int) - PUBLISHED[name])
    # Where a value is whole but for rounding, cutting it off gives one level or the next. OpenCV blurs with
    # Fourier transforms, hence in a flat disk one in twenty; JPEG is not rounded alike by all its libraries.
    assert difference.max() <= 1
    assert (difference > 0).mean() < (0.02 if name in ("defocus_blur", "jpeg_compression") else 0.001)
    assert (np.stack(made) != IMAGES).mean() > 0.005


@pytest.mark.spec("R7.3")
def test_frost_is_like_the_published_one():
    """The colours of the photographs that it has textures for, and a spectrum that falls like theirs."""
    black, random = np.zeros((64, 64, 3), np.uint8), np.random.RandomState(0)
    ice = np.stack([corrupt(black, "frost", 1, random) for _ in range(400)]) / 0.2
    means = [(166, 149, 78), (214, 205, 201), (214, 205, 201), (166, 153, 138), (135, 123, 112)]
    np.testing.assert_allclose(ice.mean((0, 1, 2)), np.mean(means, 0), atol=6)
    grey = ice.mean(3) - ice.mean((1, 2, 3))[:, None, None]
    power = (np.abs(np.fft.fft2(grey)) ** 2).mean(0)
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(64), np.fft.fftfreq(64)))
    band = (frequency > 0.05) & (frequency < 0.4)
    assert np.polyfit(np.log(frequency[band]), np.log(power[band]), 1)[0] == pytest.approx(-1, abs=0.2)
    white = corrupt(np.full((32, 32, 3), 255, np.uint8), "frost", 5, random)
    assert white.min() >= int(0.75 * 255)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_images_may_have_any_size(name):
    image = np.random.RandomState(0).randint(0, 256, (20, 44, 3)).astype(np.uint8)
    for severity in range(1, SEVERITIES + 1):
        made = corrupt(image, name, severity, np.random.RandomState(1))
        assert made.shape == image.shape
        assert made.dtype == np.uint8


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.filterwarnings("error")
def test_an_image_of_one_colour_has_corruptions(name):
    for level in (0, 255):
        image = np.full((8, 8, 3), level, np.uint8)
        for severity in range(1, SEVERITIES + 1):
            corrupt(image, name, severity, np.random.RandomState(1))


def test_there_are_nineteen_of_five_severities():
    assert len(set(CORRUPTIONS)) == 19
    with pytest.raises(ConfigError, match="one of brightness, contrast"):
        corrupt(IMAGES[0], "haze", 1, np.random.RandomState(0))
    with pytest.raises(ConfigError, match="from 1 to 5"):
        corrupt(IMAGES[0], "fog", 6, np.random.RandomState(0))
