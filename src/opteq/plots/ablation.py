"""A score against the values of an option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure

from opteq.plots.style import BLUE, GREY, literal, new_figure, styled


@styled
def draw_ablation(
    curves: Mapping[str, Mapping[float, Sequence[float]]], reference: Sequence[float], label: str
) -> Figure:
    """Draw one panel per option: a point per training, a line through the means, the reference dashed.

    Args:
        curves: option → value → scores; a value without any is left out.
        reference: scores of the row that everything is compared with.
        label: what the scores are.
    """
    figure = new_figure(3.4 * len(curves), 2.9)
    panels = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
    for axes, (option, scores) in zip(panels, curves.items(), strict=True):
        found = {value: list(those) for value, those in sorted(scores.items()) if those}
        for value, those in found.items():
            axes.plot([value] * len(those), those, "o", color=BLUE, markersize=4, alpha=0.75)
        axes.plot(list(found), [fmean(those) for those in found.values()], color=BLUE)
        if reference:
            axes.axhline(fmean(reference), color=GREY, linewidth=1, linestyle="--")
        axes.set_xscale("log")
        axes.set_xticks(list(scores), [f"{value:g}" for value in scores])
        axes.minorticks_off()
        axes.set_xlabel(literal(option, 40))
    panels[0].set_ylabel(label)
    return figure
