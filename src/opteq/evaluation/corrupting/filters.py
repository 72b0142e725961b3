"""Filters of images, as the programs compute them that the published corruptions were made with.

They take arrays `(height, width)` or `(height, width, channels)`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Array = NDArray[np.floating]


def gaussian(image: Array, sigma: float) -> Array:
    """Blur each channel, the border repeated (`skimage.filters.gaussian`)."""
    return ndimage.gaussian_filter(image, (sigma, sigma) + (0,) * (image.ndim - 2), mode="nearest")


def clipped_zoom(image: Array, factor: float) -> Array:
    """Enlarge the centre of an image to the size of the whole."""
    height, width = image.shape[:2]
    rows, columns = int(np.ceil(height / factor)), int(np.ceil(width / factor))
    top, left = (height - rows) // 2, (width - columns) // 2
    centre = image[top : top + rows, left : left + columns]
    factors = (factor, factor) + (1,) * (image.ndim - 2)
    large: NDArray[Any] = np.asarray(ndimage.zoom(centre, factors, order=1))
    top, left = (large.shape[0] - height) // 2, (large.shape[1] - width) // 2
    return large[top : top + height, left : left + width]


def motion_blur(image: NDArray[np.uint8], radius: float, sigma: float, angle: float) -> NDArray[np.uint8]:
    """Blur along a line that leaves each pixel at an angle in degrees (`MotionBlurImage` of ImageMagick)."""
    width = 2 * int(np.ceil(radius)) + 1
    steps = np.arange(width)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    turn = np.deg2rad(angle)
    right, down = (np.ceil(steps * f(turn) - 0.5).astype(int) for f in (np.cos, np.sin))
    padded = np.pad(image.astype(float), [(width, width)] * 2 + [(0, 0)] * (image.ndim - 2), mode="edge")
    height, breadth = image.shape[:2]
    blurred = np.zeros(image.shape)
    for weight, x, y in zip(weights, right, down, strict=True):
        blurred += weight * padded[width + y : width + y + height, width + x : width + x + breadth]
    # ImageMagick computes with 16 bits for each colour, and drops those that are left over.
    return (np.floor(blurred * 257 + 0.5) // 257).astype(np.uint8)


def box(image: Array) -> Array:
    """Means of 3×3 pixels, the border mirrored (`cv2.blur`)."""
    return ndimage.correlate(image, np.ones((3, 3)), mode="mirror") / 9


def edges(image: NDArray[np.uint8], low: float, high: float) -> NDArray[np.bool_]:
    """Edges of a grey image by Canny's method (`cv2.Canny`): thin, and connected to a strong one."""
    wide = image.astype(int)
    across, along = ndimage.sobel(wide, 1, mode="nearest"), ndimage.sobel(wide, 0, mode="nearest")
    size = np.pad(np.abs(across) + np.abs(along), 1)
    height, width = image.shape

    def beside(down: int, right: int) -> NDArray[np.int_]:
        return size[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    # The largest along its gradient, in the nearest of the directions that are multiples of 45°.
    here, x, y = beside(0, 0), np.abs(across), np.abs(along)
    tangent = np.tan(np.deg2rad(22.5))
    horizontal, vertical = y < tangent * x, y > x / tangent
    rising = (across < 0) != (along < 0)
    thin = np.select(
        [horizontal, vertical, rising],
        [
            (here > beside(0, -1)) & (here >= beside(0, 1)),
            (here > beside(-1, 0)) & (here >= beside(1, 0)),
            (here > beside(-1, 1)) & (here > beside(1, -1)),
        ],
        (here > beside(-1, -1)) & (here > beside(1, 1)),
    )
    weak = thin & (here > low)
    parts = np.zeros(weak.shape, np.int32)
    ndimage.label(weak, np.ones((3, 3)), output=parts)
    return weak & np.isin(parts, parts[weak & (here > high)])


def distance(marked: NDArray[np.bool_], furthest: float) -> Array:
    """Distance of each pixel to a marked one, by steps of a king and a knight, up to `furthest`.

    Their lengths are 1, 1.4 and 2.1969, to 16 binary places (`cv2.distanceTransform` with a mask of 5×5).
    """
    king, knight = (round(length * 2**16) / 2**16 for length in (1.4, 2.1969))
    steps = np.array(
        [
            [2 * king, knight, 2.0, knight, 2 * king],
            [knight, king, 1.0, king, knight],
            [2.0, 1.0, 0.0, 1.0, 2.0],
            [knight, king, 1.0, king, knight],
            [2 * king, knight, 2.0, knight, 2 * king],
        ]
    )
    reached = np.where(marked, 0.0, furthest)
    while True:
        further = ndimage.grey_erosion(reached, structure=-steps, mode="constant", cval=furthest)
        if (further == reached).all():
            return reached
        reached = further


def equalized(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Levels spread so that all are about equally frequent (`cv2.equalizeHist`)."""
    counts = np.bincount(image.ravel(), minlength=256)
    lowest = np.flatnonzero(counts)[0]
    if counts[lowest] == image.size:
        return image
    above = np.cumsum(counts) - counts[lowest]
    above[:lowest] = 0
    return np.rint(above * np.float32(255 / (image.size - counts[lowest]))).astype(np.uint8)[image]
