"""Pictures of equilibria beside the images they belong to."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from opteq.evaluation.trace import Traces
from opteq.plots.samples import show_image
from opteq.plots.style import SEQUENTIAL, new_figure, styled


@styled
def draw_equilibria(traces: Traces) -> Figure:
    """Draw one column per image: the input, the size of what is read of its equilibrium, a few channels."""
    count, shown = len(traces.images), len(traces.channel_indices)
    figure = new_figure(1.35 * count + 0.9, 1.35 * (2 + shown) + 0.4)
    grid = figure.subplots(2 + shown, count, squeeze=False)
    for column in range(count):
        show_image(grid[0, column], traces.images[column])
        show_state(grid[1, column], traces.rms[column], float(traces.rms.max()))
        if np.isfinite(traces.distance[column]):
            bound = f"± {traces.distance[column]:.1e}"
            grid[1, column].set_title(bound, fontsize=7.5, fontweight="normal", pad=2)
        for row in range(shown):
            # One colour scale per channel, so that images can be compared.
            channel = traces.channels[:, row]
            show_state(grid[2 + row, column], channel[column], float(channel.max()), float(channel.min()))
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
