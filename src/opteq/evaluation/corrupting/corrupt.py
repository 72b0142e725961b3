"""The corruptions of CIFAR-10-C, made for any image (Hendrycks and Dietterich 2019)."""

from collections.abc import Callable

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from opteq.evaluation.corrupting import blur, digital, noise, weather
from opteq.evaluation.corrupting.noise import Image
from opteq.options import check

SEVERITIES = 5

_WAYS: tuple[Callable[[Image, int, RandomState], NDArray], ...] = (
    digital.brightness,
    digital.contrast,
    blur.defocus_blur,
    digital.elastic_transform,
    weather.fog,
    weather.frost,
    blur.gaussian_blur,
    noise.gaussian_noise,
    blur.glass_blur,
    noise.impulse_noise,
    digital.jpeg_compression,
    blur.motion_blur,
    digital.pixelate,
    digital.saturate,
    noise.shot_noise,
    weather.snow,
    weather.spatter,
    noise.speckle_noise,
    blur.zoom_blur,
)
_BY_NAME = {way.__name__: way for way in _WAYS}
CORRUPTIONS = tuple(_BY_NAME)


def corrupt(image: Image, name: str, severity: int, random: RandomState) -> Image:
    """An image under one of the 19 corruptions, with the constants of CIFAR-10-C.

    They are those of 32×32 pixels, far milder than ImageNet-C's. Lengths in pixels stay as they are for
    larger images, but for `elastic_transform`, which goes with the size. All but `frost` are what the program
    behind the published arrays computes from the same random numbers, to rounding. The photographs of `frost`
    are replaced by textures of their colours and spectrum.

    Args:
        image: Bytes `(height, width, 3)`.
        name: One of `CORRUPTIONS`.
        severity: From 1 to 5.
        random: Where the random numbers come from.

    Raises:
        ConfigError: There is no such corruption or severity.
    """
    check(name in _BY_NAME, "name", name, f"one of {', '.join(CORRUPTIONS)}")
    check(severity in range(1, SEVERITIES + 1), "severity", severity, f"from 1 to {SEVERITIES}")
    return _BY_NAME[name](image, severity, random).astype(np.uint8)
