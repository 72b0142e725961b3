"""How a classifier takes what it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from opteq.evaluation.ood import OodScores
from opteq.evaluation.subclasses import SubclassScores
from opteq.plots.style import BLUE, ORANGE, literal, new_figure, styled


@styled
def draw_confidences(scores: Sequence[OodScores]) -> Figure:
    """Draw the confidences on known and unknown classes, one panel for each temperature."""
    figure = new_figure(4.2 * len(scores), 3.2)
    panels = figure.subplots(1, len(scores), sharey=True, squeeze=False)[0]
    for axes, part in zip(panels, scores, strict=True):
        for values, name, colour in (
            (part.known_confidence, "known classes", BLUE),
            (part.unknown_confidence, "unknown classes", ORANGE),
        ):
            shares = np.full(len(values), 1 / len(values))
            axes.hist(values, np.linspace(0, 1, 21), weights=shares, color=colour, alpha=0.55, label=name)
        axes.set(
            title=f"temperature {part.temperature:.3g}, AUROC {part.auroc:.3f}",
            xlabel="confidence",
            xlim=(0, 1),
        )
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[0].set_ylabel("share of the images")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@styled
def draw_subclasses(scores: SubclassScores) -> Figure:
    """Draw the accuracy on each sub-class, those of a super-class together."""
    supers = list(dict.fromkeys(name.partition(".")[0] for name in scores.names))
    # Those of a super-class, the ones that were left out last.
    order = sorted(
        range(len(scores.names)),
        key=lambda i: (supers.index(scores.names[i].partition(".")[0]), not scores.known[i], scores.names[i]),
    )
    figure = new_figure(max(4.2, 0.9 + 0.2 * len(order)), 4.6)
    axes = figure.add_subplot()
    gaps = [supers.index(scores.names[i].partition(".")[0]) for i in order]
    places = np.arange(len(order)) + 0.8 * np.array(gaps)
    known = scores.known[order]
    values = np.nan_to_num(scores.accuracy[order])
    for chosen, name, colour, mean in (
        (known, "trained on", BLUE, scores.known_accuracy),
        (~known, "left out", ORANGE, scores.unknown_accuracy),
    ):
        label = f"{name}, all images {mean:.1%}"
        axes.bar(places[chosen], values[chosen], 0.8, color=colour, alpha=0.8, label=label)
        axes.axhline(mean, color=colour, linewidth=1.2, linestyle="--")
    axes.set_xticks(places, [literal(scores.names[i], longest=44) for i in order], rotation=90, fontsize=7)
    axes.set(ylabel="accuracy", ylim=(0, 1), xlim=(places[0] - 0.8, places[-1] + 0.8))
    axes.grid(visible=False, axis="x")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure
