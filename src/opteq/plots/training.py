"""Curves of a training run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from opteq.plots.style import BLUE, GREY, ORANGE, new_figure, styled

# One curve: epochs and values, both `(points,)`.
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]

_COLOURS = {"train": BLUE, "val": ORANGE, "": GREY}
_STAGES = {"train": "training", "val": "validation", "": ""}
_COLUMNS = 3
_SHARES = ("mIoU", "mAcc", "aAcc")


@styled
def draw_training(panels: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Draw one panel per quantity, with a curve per stage.

    Args:
        panels: quantity (such as `"loss"`) → stage (`"train"`, `"val"` or `""`) → curve.
    """
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = new_figure(3.4 * columns, 2.5 * rows)
    for index, (quantity, curves) in enumerate(panels.items(), start=1):
        _draw_panel(figure.add_subplot(rows, columns, index), quantity, curves)
    return figure


def _draw_panel(axes: Axes, quantity: str, curves: Mapping[str, Curve]) -> None:
    for stage, (epochs, values) in curves.items():
        # A single epoch makes no line: markers keep it visible.
        marker = "o" if len(epochs) <= 12 else None
        colour, label = _COLOURS[stage], _STAGES[stage]
        axes.plot(epochs, values, color=colour, marker=marker, markersize=3.5, label=label)
    axes.set_title(quantity.replace("_", " "))
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    everything = np.concatenate([values for _, values in curves.values()])
    if "accuracy" in quantity or quantity in _SHARES:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif "residual" in quantity and everything.min() > 0:
        axes.set_yscale("log")
    elif everything.min() >= 0:
        axes.set_ylim(bottom=0, top=None if everything.any() else 1)
    if any(_STAGES[stage] for stage in curves):
        axes.legend()
