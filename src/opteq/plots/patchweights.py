"""Where Gaussian kernel maps pay attention."""

from __future__ import annotations

from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from opteq.evaluation.trace import Traces
from opteq.plots.equilibria import name_row, show_state
from opteq.plots.samples import show_image
from opteq.plots.style import SEQUENTIAL, new_figure, styled


@styled
def draw_attention(traces: Traces) -> Figure:
    """Draw the weight of every patch below its image, one row per branch, on one colour scale."""
    count, branches = traces.attention.shape[:2]
    figure = new_figure(1.35 * count + 0.9, 1.35 * (1 + branches) + 0.8)
    grid = figure.subplots(1 + branches, count, squeeze=False)
    lowest, highest = float(traces.attention.min()), float(traces.attention.max())
    for column in range(count):
        show_image(grid[0, column], traces.images[column])
        for axes, weight in zip(grid[1:, column], traces.attention[column], strict=True):
            show_state(axes, weight, highest, lowest)
    name_row(grid[0, 0], "input")
    for branch, axes in enumerate(grid[1:, 0], start=1):
        name_row(axes, f"weights,\nbranch {branch}" if branches > 1 else "weights")
    bar = figure.colorbar(
        ScalarMappable(Normalize(lowest, highest), SEQUENTIAL),
        ax=list(grid[-1]),
        location="bottom",
        aspect=40,
    )
    bar.set_label("weight $e^{-γd}$ of a patch")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure
