"""Curves of a training run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from opteq.plots.style import BLUE, GREY, ORANGE, new_figure, on_decades, styled

# One curve: epochs and values, both `(points,)`.
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]

_COLOURS = {"train": BLUE, "val": ORANGE, "": GREY}
_STAGES = {"train": "training", "val": "validation", "": ""}
_SPOKEN = {
    "accuracy_top5": "top-5 accuracy",
    "residual_max": "largest residual",
    "unconverged": "unconverged solves",
    "adjoint_unconverged": "unconverged adjoint solves",
}
_SHARES = ("mIoU", "mAcc", "aAcc")


@styled
def draw_curves(quantity: str, curves: Mapping[str, Curve]) -> Figure:
    """Draw one quantity, with a curve per stage.

    Args:
        quantity: such as `"loss"`.
        curves: stage (`"train"`, `"val"` or `""`) → curve.
    """
    figure = new_figure(3.1, 2.4)
    axes = figure.add_subplot()
    for stage, (epochs, values) in curves.items():
        # A single epoch makes no line: markers keep it visible.
        marker = "o" if len(epochs) <= 12 else None
        (line,) = axes.plot(epochs, values, color=_COLOURS[stage], marker=marker, markersize=3.5)
        line.set(label=_STAGES[stage])
        # Not cut in half where it runs along the frame.
        line.set_clip_on(False)
    axes.set_title(spoken(quantity))
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    everything = np.concatenate([values for _, values in curves.values()])
    if is_share(quantity):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif "residual" in quantity and everything.min() > 0:
        on_decades(axes, everything)
    elif everything.min() >= 0:
        axes.set_ylim(bottom=0)
    if any(_STAGES[stage] for stage in curves):
        axes.legend()
    return figure


@styled
def draw_rates(rates: NDArray[np.float64], losses: NDArray[np.float64], chosen: float) -> Figure:
    """Draw the loss of a range test against the learning rate, with the one that was chosen."""
    figure = new_figure(4.2, 3.0)
    axes = figure.add_subplot()
    axes.plot(rates, losses, color=BLUE)
    axes.axvline(chosen, color=ORANGE, linestyle="--", linewidth=1.2, label=f"chosen: {chosen:.3g}")
    axes.set(title="Range test", xlabel="learning rate", ylabel="loss, smoothed", xscale="log")
    axes.legend()
    return figure


def spoken(quantity: str) -> str:
    """A quantity as a reader calls it."""
    return _SPOKEN.get(quantity, quantity.replace("_", " "))


def is_share(quantity: str) -> bool:
    """Whether a quantity is a share of something, to be read in percent."""
    return "accuracy" in quantity or quantity in _SHARES
