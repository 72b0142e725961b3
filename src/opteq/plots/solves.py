"""Solves as they are looked at in a notebook: on axes of the user's, or on new ones of pyplot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from opteq.plots.convergence import objective_panel, residual_panel
from opteq.plots.style import BLUE, GREEN, ORANGE, on_decades

if TYPE_CHECKING:
    from opteq.layer import SolveLog


def plot_iteration(
    axes: Axes | None, iteration: str, residual: Tensor, energy: Tensor | None, tol: float | None
) -> Axes:
    """Draw how residuals fall, and on an axis to the right the hidden objective above its lowest value.

    Args:
        axes: where to draw; new ones unless given.
        iteration: what the steps are those of.
        residual: `(batch, steps)`; NaN after a sample stopped.
        energy: `(batch, steps)`, if there is one.
        tol: the tolerance, if there is one.
    """
    axes = _own_or_new(axes)
    residual_panel(axes, _numbers(residual).astype(np.float64), np.nan if tol is None else tol)
    axes.set(title="", xlabel=iteration)
    panels = [axes]
    if energy is not None:
        right = axes.twinx()
        objective_panel(right, _numbers(energy))
        right.set_title("")
        right.grid(visible=False)
        right.spines["right"].set_visible(True)
        for panel, colour in ((axes, BLUE), (right, GREEN)):
            panel.yaxis.label.set_color(colour)
            panel.tick_params(axis="y", labelcolor=colour)
        panels.append(right)
    _one_legend(panels, {BLUE: "residual, median", GREEN: "objective, median", ORANGE: "tolerance"})
    return axes


def plot_log(axes: Axes | None, log: SolveLog) -> Axes:
    """Draw the largest residual that each solve ended with, forwards and backwards, with the tolerances."""
    axes = _own_or_new(axes)
    shown: list[float] = []
    for name, counts, colour, dashes in (
        ("forward", log.forward, BLUE, "--"),
        ("adjoint", log.adjoint, GREEN, ":"),
    ):
        if not counts.residuals:
            continue
        solves = range(1, len(counts.residuals) + 1)
        axes.plot(solves, counts.residuals, "o-", color=colour, markersize=3, linewidth=1, label=name)
        shown += counts.residuals
        if counts.tol is not None:
            axes.axhline(counts.tol, color=colour, linestyle=dashes, label=f"{name} tolerance")
            # Not on the frame, where a tolerance of a power of ten would be.
            shown.append(2 * counts.tol)
    on_decades(axes, np.array(shown))
    axes.set(xlabel="solve", ylabel="largest relative residual at its end")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown:
        axes.legend()
    return axes


def _own_or_new(axes: Axes | None) -> Axes:
    # By pyplot, which a notebook asks for the figures to show.
    return pyplot.subplots(figsize=(5.6, 3.4), layout="constrained")[1] if axes is None else axes


def _numbers(values: Tensor) -> NDArray[Any]:
    return values.detach().cpu().to(torch.promote_types(values.dtype, torch.float32)).numpy()


def _one_legend(panels: Sequence[Axes], names: dict[str, str]) -> None:
    """One legend for lines of all `panels`, which are named by their colours."""
    lines = []
    for panel in panels:
        lines += panel.get_legend_handles_labels()[0]
        if (legend := panel.get_legend()) is not None:
            legend.remove()
    # On the uppermost, lest lines run through it.
    panels[-1].legend(lines, [names[line.get_color()] for line in lines])
