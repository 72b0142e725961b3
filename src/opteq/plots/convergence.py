"""The residual and the hidden objective along an iteration."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from opteq.plots.style import BLUE, GREEN, new_figure, styled

_EPSILON = float(np.finfo(np.float64).eps)


@styled
def draw_convergence(residual: NDArray[np.float64], energy: NDArray[np.float64]) -> Figure:
    """Draw both curves, one thin line per sample and their median, on a log scale.

    Args:
        residual: `(samples, steps + 1)` relative residual.
        energy: `(samples, steps + 1)` hidden objective, or `(samples, 0)` where there is none.
    """
    figure = new_figure(8.4 if energy.size else 4.2, 3.0)
    draw_curves(figure, residual, energy)
    return figure


def draw_curves(figure: FigureBase, residual: NDArray[np.float64], energy: NDArray[np.float64]) -> None:
    """Draw what `draw_convergence` draws into a figure or a part of one."""
    panels = figure.subplots(1, 2 if energy.size else 1, sharex=True, squeeze=False)[0]
    _draw_lines(panels[0], residual, 100 * _EPSILON, BLUE)
    panels[0].set(title="Residual", ylabel="‖T(z) - z‖ / ‖T(z)‖")
    if energy.size:
        above = energy - energy.min(axis=1, keepdims=True)
        rounding = 100 * _EPSILON * np.abs(energy).max(axis=1, keepdims=True)
        _draw_lines(panels[1], above, rounding, GREEN)
        panels[1].set(title="Hidden objective", ylabel="φ(z) - lowest φ")


def _draw_lines(
    axes: Axes, values: NDArray[np.float64], rounding: NDArray[np.float64] | float, colour: str
) -> None:
    # Once an iteration has converged only rounding is left, which a log scale would blow up.
    shown = np.where(values > rounding, values, np.nan)
    steps = np.arange(values.shape[1])
    axes.plot(steps, shown.T, color=colour, alpha=0.35, linewidth=0.9)
    axes.plot(steps, np.median(shown, axis=0), color=colour, label="median")
    axes.set_yscale("log")
    axes.set_xlabel("plain iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
