"""One compact picture of an evaluated network."""

from __future__ import annotations

from matplotlib.figure import Figure

from opteq.errors import ConfigError
from opteq.evaluation.trace import Traces
from opteq.plots.convergence import objective_panel, residual_panel
from opteq.plots.equilibria import name_row, show_state
from opteq.plots.samples import show_image
from opteq.plots.style import new_figure, styled


@styled
def draw_overview(traces: Traces) -> Figure:
    """Draw a row of inputs, their equilibria, and the curves along the way to them.

    Raises:
        ConfigError: if the network has no equilibrium layer, hence nothing to draw.
    """
    count = len(traces.images)
    if count == 0:
        raise ConfigError("There are no equilibria to draw: the network has no equilibrium layer.")
    figure = new_figure(9.0, 5.4)
    halves = figure.add_gridspec(2, 1, height_ratios=[1.25, 1])
    pictures, curves = (figure.add_subfigure(half) for half in halves)
    grid = pictures.subplots(2, count, squeeze=False)
    for column in range(count):
        show_image(grid[0, column], traces.images[column])
        show_state(grid[1, column], traces.rms[column], float(traces.rms.max()))
    name_row(grid[0, 0], "input")
    read = "equilibrium z*" if traces.symbol == "z" else f"hidden variable\n{traces.symbol}*"
    name_row(grid[1, 0], f"{read}\n(RMS over\nchannels)")
    panels = curves.subplots(1, 2 if traces.energy.size else 1, sharex=True, squeeze=False)[0]
    residual_panel(panels[0], traces.residual, float(traces.tolerance))
    if traces.energy.size:
        objective_panel(panels[1], traces.energy)
    return figure
