"""Rows of a table with a point per training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure

from opteq.plots.style import BLUE, GREY, ORANGE, literal, new_figure, styled


@styled
def draw_rows(rows: Mapping[str, Sequence[float]], reference: str, label: str) -> Figure:
    """Draw one line of points per row, with a bar at its mean.

    Args:
        rows: values of each row; a row without any leaves its line empty.
        reference: row whose mean is drawn through all lines.
        label: what the values are.
    """
    names = list(rows)
    figure = new_figure(6.4, 0.8 + 0.3 * len(names))
    axes = figure.subplots()
    if rows[reference]:
        axes.axvline(fmean(rows[reference]), color=GREY, linewidth=1, linestyle="--")
    for line, name in enumerate(names):
        values = list(rows[name])
        colour = ORANGE if name == reference else BLUE
        axes.plot(values, [line] * len(values), "o", color=colour, markersize=4, alpha=0.75)
        if values:
            axes.plot([fmean(values)], [line], "|", color=colour, markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(names)), [literal(name, 40) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel(label)
    return figure
