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
    from opteq.solvelog import SolveCounts, SolveLog


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
    """Draw what each solve took and came to, see `SolveLog.plot`."""
    axes = _own_or_new(axes)
    kinds = (("forward", log.forward, BLUE, "--"), ("adjoint", log.adjoint, GREEN, ":"))
    shown = [(name, counts, colour, line) for name, counts, colour, line in kinds if counts.residuals]
    values: list[float] = []
    for name, counts, colour, dashes in shown:
        solves = np.arange(1, len(counts.residuals) + 1)
        residuals = np.array(counts.residuals)
        axes.plot(solves, residuals, "o-", color=colour, markersize=3, linewidth=1, label=name)
        values += counts.residuals
        missed = np.array(counts.missed) > 0
        if missed.any():
            total = f"{name}, unconverged ({counts.unconverged} of {counts.samples} samples)"
            axes.plot(solves[missed], residuals[missed], "X", color=ORANGE, markersize=7, label=total)
        if counts.tol is not None:
            axes.axhline(counts.tol, color=colour, linestyle=dashes, linewidth=1, label=f"{name} tolerance")
            values.append(counts.tol)
    on_decades(axes, np.array(values))
    axes.set(xlabel="solve", ylabel="largest relative residual at its end")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown:
        _draw_steps(axes, [(counts, colour) for _, counts, colour, _ in shown])
        means = " and ".join(f"{counts.steps_mean:.1f} {name}" for name, counts, _, _ in shown)
        # Above the picture, in which solves that fell short stand out at the top.
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2, "fontsize": "small"}
        axes.legend(title=f"{means} evaluations per sample", frameon=False, **place)
    return axes


def _draw_steps(axes: Axes, kinds: Sequence[tuple[SolveCounts, str]]) -> None:
    """Bars of the evaluations per sample, behind the lines of `axes` and low enough to be told from them."""
    right = axes.twinx()
    width = 0.8 / len(kinds)
    for place, (counts, colour) in enumerate(kinds):
        solves = np.arange(1, len(counts.step_means) + 1) - 0.4 + (place + 0.5) * width
        right.bar(solves, counts.step_means, width, color=colour, alpha=0.18)
    highest = max(max(counts.step_means) for counts, _ in kinds)
    right.set(ylabel="evaluations per sample (bars)", ylim=(0, max(3 * highest, 1)))
    right.set_yticks(
        [tick for tick in MaxNLocator(4, integer=True).tick_values(0, highest) if tick <= 1.3 * highest]
    )
    right.grid(visible=False)
    right.spines["right"].set_visible(True)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)


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
