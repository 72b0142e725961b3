"""Weather."""

import numpy as np
from numpy.random import RandomState
from scipy import ndimage

from opteq.evaluation.corrupting.filters import (
    Array,
    box,
    clipped_zoom,
    distance,
    edges,
    equalized,
    gaussian,
    motion_blur,
)
from opteq.evaluation.corrupting.noise import Image


def fog(image: Image, severity: int, random: RandomState) -> Array:
    """A plasma cloud is added, and the sum scaled to the range of the image."""
    thickness, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    pixels = image / 255
    height, width = image.shape[:2]
    cloud = _plasma(1 << (max(height, width) - 1).bit_length(), decay, random)[:height, :width, None]
    largest = pixels.max()
    return ((pixels + thickness * cloud) * largest / (largest + thickness)).clip(0, 1) * 255


def _plasma(size: int, decay: float, random: RandomState) -> Array:
    """A cloud on a torus of `size` × `size` pixels, from 0 to 1, by the diamond-square algorithm."""
    cloud = np.zeros((size, size))
    step, wobble = size, 100.0

    def wobbled(total: Array) -> Array:
        return total / 4 + wobble * random.uniform(-wobble, wobble, total.shape)

    while step >= 2:
        half = step // 2
        corners = cloud[::step, ::step]
        square = corners + np.roll(corners, -1, 0)
        cloud[half::step, half::step] = wobbled(square + np.roll(square, -1, 1))
        centres = cloud[half::step, half::step]
        cloud[::step, half::step] = wobbled(
            centres + np.roll(centres, 1, 0) + corners + np.roll(corners, -1, 1)
        )
        cloud[half::step, ::step] = wobbled(
            centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 0)
        )
        step, wobble = half, wobble / decay
    cloud -= cloud.min()
    return cloud / cloud.max()


# Mean and standard deviation of red, green and blue of the photographs of frost, as they are laid over.
_FROST = (
    ((166, 149, 78), (15, 16, 27)),
    ((214, 205, 201), (23, 22, 21)),
    ((214, 205, 201), (23, 22, 21)),
    ((166, 153, 138), (30, 29, 29)),
    ((135, 123, 112), (42, 43, 44)),
)


def frost(image: Image, severity: int, random: RandomState) -> Array:
    """The image under frost: not the photographs of the published arrays, but textures like them.

    They have the photographs' mean and deviation of each colour, and a spectrum that falls as theirs.
    """
    clear, ice = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    mean, deviation = _FROST[random.randint(len(_FROST))]
    texture = _texture(image.shape[:2], random)[:, :, None] * deviation + mean
    return (clear * image + ice * texture.clip(0, 255)).clip(0, 255)


def _texture(shape: tuple[int, ...], random: RandomState) -> Array:
    """Noise of mean 0 and deviation 1 whose power falls in proportion to the frequency."""
    rows, columns = np.fft.fftfreq(shape[0]), np.fft.rfftfreq(shape[1])
    frequency = np.hypot(rows[:, None], columns)
    frequency[0, 0] = np.inf
    noise = np.fft.irfft2(np.fft.rfft2(random.normal(size=shape)) / np.sqrt(frequency), shape)
    return noise / noise.std()


def snow(image: Image, severity: int, random: RandomState) -> Array:
    """Flakes, and the same turned by 180°, fall on a whitened image."""
    mean, deviation, zoom, least, radius, sigma, clear = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    pixels = (image / 255).astype(np.float32)
    flakes = clipped_zoom(random.normal(size=image.shape[:2], loc=mean, scale=deviation), zoom)
    flakes = (np.where(flakes < least, 0, flakes).clip(0, 1) * 255).astype(np.uint8)
    flakes = motion_blur(flakes, radius, sigma, random.uniform(-135, -45))[:, :, None] / 255
    grey = pixels @ np.array([0.299, 0.587, 0.114], np.float32)
    white = np.maximum(pixels, grey[:, :, None] * 1.5 + 0.5)
    return (clear * pixels + (1 - clear) * white + flakes + np.rot90(flakes, 2)).clip(0, 1) * 255


_WATER, _MUD = np.array([175, 238, 238]) / 255, np.array([63, 42, 20]) / 255


def spatter(image: Image, severity: int, random: RandomState) -> Array:
    """Drops of water, or from severity 4 stains of mud."""
    mean, deviation, sigma, least, strength = (
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    )[severity - 1]
    pixels = image / 255
    liquid = gaussian(random.normal(size=image.shape[:2], loc=mean, scale=deviation), sigma)
    liquid[liquid < least] = 0
    if severity <= 3:
        drops = _drops((liquid * 255).astype(np.uint8))[:, :, None]
        return (pixels + strength * drops * _WATER).clip(0, 1) * 255
    mud = gaussian((liquid > least).astype(np.float32), strength)[:, :, None]
    mud[mud < 0.8] = 0
    return (pixels * (1 - mud) + mud * _MUD).clip(0, 1) * 255


def _drops(liquid: Image) -> Array:
    """How much light drops of a liquid reflect, the brightest 1."""
    depth = box(distance(edges(liquid, 50, 150), furthest=20))
    slope = ndimage.correlate(
        equalized(depth.astype(np.uint8)).astype(int),
        np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]]),
        mode="mirror",
    )
    light = liquid * np.rint(box(slope.clip(0, 255).astype(float)))
    return light / max(light.max(), 1)
