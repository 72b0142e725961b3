"""Arrays as PNG pictures that a page can hold, `data:image/png;base64,…`."""

from __future__ import annotations

import base64
import io

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from numpy.typing import NDArray
from PIL import Image

from opteq.plots.masks import class_colours
from opteq.plots.style import SEQUENTIAL

_HEAT = "inferno"


def image_picture(image: NDArray) -> str:
    """`(height, width, 1 or 3)` in [0, 1]."""
    return _picture(image[..., 0] if image.shape[2] == 1 else image)


def state_picture(values: NDArray, lowest: float, highest: float) -> str:
    """`(h, w)` on the colour scale of the reports, from `lowest` to `highest`."""
    span = highest - lowest
    share = (values - lowest) / span if span > 0 else np.zeros_like(values)
    return _picture(matplotlib.colormaps[SEQUENTIAL](share.clip(0, 1))[..., :3])


def mask_picture(labels: NDArray[np.int64], classes: int) -> str:
    """`(h, w)` classes, each in its colour; below 0 there is none, which is white."""
    colours = class_colours(classes)[labels.clip(0), :3]
    return _picture(np.where(labels[..., None] < 0, 1.0, colours))


def mask_colours(classes: int) -> list[str]:
    """The colours of `mask_picture`, such as `#1f77b4`."""
    return [to_hex(colour) for colour in class_colours(classes)]


def heat_picture(values: NDArray) -> str:
    """`(h, w)` of at least zero, to be laid over an image: what is zero is transparent."""
    highest = values.max()
    share = values / highest if highest > 0 else values
    colours = matplotlib.colormaps[_HEAT](share)
    colours[..., 3] = share
    return _picture(colours)


def _picture(values: NDArray) -> str:
    with io.BytesIO() as file:
        Image.fromarray((255 * values).round().astype(np.uint8)).save(file, "PNG")
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
