"""Blurs."""

import numpy as np
from numpy.random import RandomState
from scipy import ndimage

from opteq.evaluation.corrupting.filters import Array, clipped_zoom, gaussian
from opteq.evaluation.corrupting.filters import motion_blur as blurred_along
from opteq.evaluation.corrupting.noise import Image


def gaussian_blur(image: Image, severity: int, random: RandomState) -> Array:
    """A Gaussian blur."""
    sigma = (0.4, 0.6, 0.7, 0.8, 1)[severity - 1]
    return gaussian(image / 255, sigma).clip(0, 1) * 255


def defocus_blur(image: Image, severity: int, random: RandomState) -> Array:
    """A blur with a disk, as of a lens out of focus."""
    radius, sigma = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    x, y = np.meshgrid(np.arange(-8, 9), np.arange(-8, 9))
    disk = (x**2 + y**2 <= radius**2).astype(float)
    side = np.exp(-1 / (2 * sigma**2))
    smooth = np.array([side, 1, side]) / (1 + 2 * side)
    kernel = ndimage.convolve(disk / disk.sum(), np.outer(smooth, smooth), mode="mirror")
    return ndimage.correlate(image / 255, kernel[:, :, None], mode="mirror").clip(0, 1) * 255


def glass_blur(image: Image, severity: int, random: RandomState) -> Array:
    """A Gaussian blur of pixels that take the place of their neighbours, as behind frosted glass."""
    sigma, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    pixels = (gaussian(image / 255, sigma) * 255).astype(np.uint8)
    height, width = image.shape[:2]
    places = [
        (row, column) for row in range(height - 1, 1, -1) for column in range(width - 1, 1, -1)
    ] * rounds
    shifts = random.randint(-1, 1, size=(len(places), 2)).tolist()
    for (row, column), (right, down) in zip(places, shifts, strict=True):
        # Meant to swap two pixels; the arrays that were published have one of them twice.
        pixels[row, column] = pixels[row + down, column + right]
    return gaussian(pixels / 255, sigma).clip(0, 1) * 255


def motion_blur(image: Image, severity: int, random: RandomState) -> Image:
    """A blur along a line of any direction."""
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    return blurred_along(image, radius, sigma, random.uniform(-45, 45))


def zoom_blur(image: Image, severity: int, random: RandomState) -> Array:
    """The mean of the image and of enlargements of it."""
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    pixels = (image / 255).astype(np.float32)
    total = pixels + np.sum([clipped_zoom(pixels, factor) for factor in factors], axis=0)
    return (total / (len(factors) + 1)).clip(0, 1) * 255
