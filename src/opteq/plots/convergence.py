"""The residual and the hidden objective along an iteration, each on a log scale."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from opteq.plots.style import BLUE, GREEN, ORANGE, new_figure, on_decades, styled

_EPSILON = float(np.finfo(np.float64).eps)


@styled
def draw_residual(residual: NDArray[np.float64], tolerance: float) -> Figure:
    """Draw the residual, one thin line per sample and their median, on a log scale, with the tolerance.

    Args:
        residual: `(samples, steps + 1)` relative residual.
        tolerance: at which a solve ends; NaN for a layer that has none.
    """
    figure = new_figure(4.2, 3.0)
    axes = figure.add_subplot()
    residual_panel(axes, residual, tolerance)
    axes.set_title("Residual in float64")
    return figure


@styled
def draw_objective(energy: NDArray[np.float64]) -> Figure:
    """Draw the hidden objective above its lowest value, likewise.

    Args:
        energy: `(samples, steps + 1)`.
    """
    figure = new_figure(4.2, 3.0)
    objective_panel(figure.add_subplot(), energy)
    return figure


def residual_panel(axes: Axes, residual: NDArray[np.float64], tolerance: float) -> None:
    """Draw what `draw_residual` draws into a part of a figure."""
    shown = _draw_lines(axes, residual, 100 * _EPSILON, BLUE)
    if np.isfinite(tolerance):
        axes.axhline(tolerance, color=ORANGE, linestyle="--", linewidth=1.2, label="tolerance")
    on_decades(axes, np.append(shown, tolerance))
    axes.set(title="Residual", ylabel="‖T(z) - z‖ / ‖T(z)‖")
    axes.legend()


def objective_panel(axes: Axes, energy: NDArray[np.floating]) -> None:
    """Draw what `draw_objective` draws into a part of a figure."""
    above = energy - energy.min(axis=1, keepdims=True)
    rounding = 100 * np.finfo(energy.dtype).eps * np.abs(energy).max(axis=1, keepdims=True)
    on_decades(axes, _draw_lines(axes, above, rounding, GREEN))
    axes.set(title="Hidden objective", ylabel="φ(z) - lowest φ")
    axes.legend()


def _draw_lines(
    axes: Axes, values: NDArray[np.floating], rounding: NDArray[np.floating] | float, colour: str
) -> NDArray[np.floating]:
    """Draw a line for each sample and one for their median; returns the values that are shown."""
    # Once an iteration has converged only rounding is left, which a log scale would blow up.
    shown = np.where(values > rounding, values, np.nan)
    steps = np.arange(values.shape[1])
    axes.plot(steps, shown.T, color=colour, alpha=0.35, linewidth=0.9)
    # What is no longer drawn counts as the lowest: the median goes on until half of the lines have ended.
    with np.errstate(invalid="ignore"):
        median = np.median(np.where(np.isnan(shown), -np.inf, shown), axis=0)
    axes.plot(steps, np.where(np.isfinite(median), median, np.nan), color=colour, label="median")
    axes.set_xlabel("plain iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return shown
