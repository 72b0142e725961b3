"""Pictures of equilibria beside the images they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from opteq.evaluation.trace import Traces
from opteq.plots.samples import show_image
from opteq.plots.style import SEQUENTIAL, new_figure, styled


@styled
def draw_equilibria(traces: Traces, images: Sequence[int] | None = None) -> Figure:
    """Draw one column per image: the input, the size of what is read of its equilibrium, a few channels.

    Args:
        traces: of images.
        images: which of them to draw, all unless given; the colours are those that all of them share.
    """
    images, shown = range(len(traces.images)) if images is None else images, len(traces.channel_indices)
    figure = new_figure(1.06 * len(images) + 0.9, 1.06 * (2 + shown) + 0.4)
    grid = figure.subplots(2 + shown, len(images), squeeze=False)
    for column, image in enumerate(images):
        show_image(grid[0, column], traces.images[image])
        show_state(grid[1, column], traces.rms[image], float(traces.rms.max()))
        if np.isfinite(traces.distance[image]):
            bound = f"± {traces.distance[image]:.1e}"
            grid[1, column].set_title(bound, fontsize=7.5, fontweight="normal", pad=2)
        for row in range(shown):
            # One colour scale per channel, so that images can be compared.
            channel = traces.channels[:, row]
            show_state(grid[2 + row, column], channel[image], float(channel.max()), float(channel.min()))
    names = ["input", f"{traces.symbol}*, RMS over\nchannels"]
    names += [f"{traces.symbol}*, channel {index}" for index in traces.channel_indices]
    for axes, name in zip(grid[:, 0], names, strict=True):
        name_row(axes, name)
    return figure


def show_state(axes: Axes, state: NDArray, highest: float, lowest: float = 0.0) -> None:
    """Show `(h, w)` on a colour scale from `lowest` to `highest`, without ticks."""
    axes.imshow(state, cmap=SEQUENTIAL, vmin=lowest, vmax=highest, interpolation="nearest", aspect="auto")
    height, width = state.shape
    # A dense state is one row of pixels, too flat to be seen in its true shape.
    axes.set_box_aspect(height / width if height > 1 else 1)
    axes.axis("off")


def name_row(axes: Axes, name: str) -> None:
    """Write `name` to the left of `axes`."""
    axes.text(-0.12, 0.5, name, transform=axes.transAxes, ha="right", va="center", fontsize=8.5)
