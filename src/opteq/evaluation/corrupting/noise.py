"""Noise of single pixels."""

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from opteq.evaluation.corrupting.filters import Array

Image = NDArray[np.uint8]


def gaussian_noise(image: Image, severity: int, random: RandomState) -> Array:
    """`x + n` with normal numbers `n`."""
    deviation = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return _in_bytes(image / 255 + random.normal(size=image.shape, scale=deviation))


def shot_noise(image: Image, severity: int, random: RandomState) -> Array:
    """The number of photons that arrive, where `x` times so many are expected."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return _in_bytes(random.poisson(image / 255 * photons) / photons)


def impulse_noise(image: Image, severity: int, random: RandomState) -> Array:
    """Single numbers become 0 or 255, black or white in their channel."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    hit, white = (random.random(image.shape) <= chance for chance in (share, 0.5))
    return np.where(hit, np.where(white, 255.0, 0.0), image)


def speckle_noise(image: Image, severity: int, random: RandomState) -> Array:
    """`x + x n` with normal numbers `n`."""
    deviation = (0.06, 0.1, 0.12, 0.16, 0.2)[severity - 1]
    pixels = image / 255
    return _in_bytes(pixels + pixels * random.normal(size=image.shape, scale=deviation))


def _in_bytes(pixels: Array) -> Array:
    return pixels.clip(0, 1) * 255
