"""Changes that cameras and programs make."""

from io import BytesIO

import numpy as np
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from numpy.random import RandomState
from PIL import Image as Pictures
from scipy import ndimage

from opteq.evaluation.corrupting.filters import Array
from opteq.evaluation.corrupting.noise import Image


def brightness(image: Image, severity: int, random: RandomState) -> Array:
    """The value is raised, in hue, saturation and value."""
    added = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    colours = rgb_to_hsv(image / 255)
    colours[..., 2] = (colours[..., 2] + added).clip(0, 1)
    return hsv_to_rgb(colours) * 255


def saturate(image: Image, severity: int, random: RandomState) -> Array:
    """The saturation is changed, in hue, saturation and value."""
    factor, added = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))[severity - 1]
    colours = rgb_to_hsv(image / 255)
    colours[..., 1] = (colours[..., 1] * factor + added).clip(0, 1)
    return hsv_to_rgb(colours) * 255


def contrast(image: Image, severity: int, random: RandomState) -> Array:
    """Distances from the mean of each channel shrink."""
    kept = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    pixels = image / 255
    means = pixels.mean((0, 1))
    return ((pixels - means) * kept + means).clip(0, 1) * 255


def jpeg_compression(image: Image, severity: int, random: RandomState) -> Image:
    """JPEG of low quality."""
    quality = (80, 65, 58, 50, 40)[severity - 1]
    file = BytesIO()
    Pictures.fromarray(image).save(file, "JPEG", quality=quality)
    return np.asarray(Pictures.open(file))


def pixelate(image: Image, severity: int, random: RandomState) -> Image:
    """A smaller image, enlarged."""
    share = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    picture = Pictures.fromarray(image)
    width, height = picture.size
    small = picture.resize((int(width * share), int(height * share)), Pictures.Resampling.BOX)
    return np.asarray(small.resize((width, height), Pictures.Resampling.BOX))


def elastic_transform(image: Image, severity: int, random: RandomState) -> Array:
    """An affine map about the centre, then small smooth shifts."""
    # In widths of the image.
    strength, sigma, shift = (
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]
    height, width = image.shape[:2]
    size = min(height, width)
    warped = _warped((image / 255).astype(np.float32), shift * size, random)
    across, down = (
        ndimage.gaussian_filter(random.uniform(-1, 1, (height, width)), sigma * size, truncate=3)
        * (strength * size)
        for _ in range(2)
    )
    rows, columns = np.mgrid[:height, :width]
    return _at(warped, rows + down, columns + across, "reflect").clip(0, 1) * 255


def _warped(image: Array, shift: float, random: RandomState) -> Array:
    """The image under the affine map that moves three points about its centre by up to `shift` pixels."""
    height, width = image.shape[:2]
    centre, third = np.array([width // 2, height // 2]), min(height, width) // 3
    points = centre + third * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points.astype(np.float32) + random.uniform(-shift, shift, points.shape).astype(np.float32)
    # Where a pixel comes from: (x, y) = x' of_column + y' of_row + origin.
    of_column, of_row, origin = np.linalg.solve(np.column_stack([np.float64(moved), np.ones(3)]), points)
    rows, columns = np.arange(height)[:, None, None], np.arange(width)[None, :, None]
    # OpenCV adds these with 10 binary places, and rounds the sum to 5.
    sums = np.rint((rows * of_row + origin) * 1024) + np.rint(columns * of_column * 1024)
    x, y = np.moveaxis((sums + 16) // 32 / 32, -1, 0)
    return _at(image, y, x, "mirror")


def _at(image: Array, rows: Array, columns: Array, border: str) -> Array:
    """The image at any places, linear between its pixels."""
    channels = np.moveaxis(image, -1, 0)
    found = [ndimage.map_coordinates(c, [rows, columns], order=1, mode=border) for c in channels]
    return np.stack(found, -1)
