"""Accuracy under corruptions and attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from opteq.evaluation.robustness import Robustness
from opteq.plots.style import BLUE, GREY, ORANGE, SEQUENTIAL, new_figure, styled


@styled
def draw_corruptions(accuracy: Mapping[str, Sequence[float]], clean: float) -> Figure:
    """Draw a table of accuracies, a row for each corruption and a column for each severity, and row means.

    Args:
        accuracy: for each corruption the accuracy at each severity.
        clean: accuracy on the images as they are.
    """
    # The hardest at the bottom.
    names = sorted(accuracy, key=lambda name: -float(np.mean(accuracy[name])))
    values = np.array([accuracy[name] for name in names])
    figure = new_figure(6.8, 0.9 + 0.26 * len(names))
    table, bars = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    table.imshow(values, aspect="auto", cmap=SEQUENTIAL, vmin=0, vmax=1)
    table.grid(visible=False)
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value < 0.55 else "#111827"
        table.text(column, row, f"{100 * value:.1f}", ha="center", va="center", fontsize=7.5, color=colour)
    table.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    table.set_xticks(range(values.shape[1]), [str(s) for s in range(1, values.shape[1] + 1)])
    table.tick_params(length=0)
    table.set(title="Accuracy, %", xlabel="severity")
    means = values.mean(1)
    bars.barh(range(len(names)), means, 0.7, color=BLUE, alpha=0.8)
    bars.axvline(clean, color=GREY, linestyle="--", linewidth=1.2, label=f"clean {clean:.1%}")
    bars.axvline(float(means.mean()), color=ORANGE, linewidth=1.2, label=f"mean {means.mean():.1%}")
    bars.set_xlim(0, 1)
    bars.tick_params(axis="y", length=0)
    bars.grid(visible=False, axis="y")
    bars.xaxis.set_major_formatter(PercentFormatter(1.0))
    bars.set(title="Mean over severities", xlabel="accuracy")
    figure.legend(*bars.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    return figure


@styled
def draw_attacks(record: Robustness) -> Figure:
    """Draw the accuracy against the number of steps, a line for each `ε`, and against `ε`."""
    figure = new_figure(8.4, 3.4)
    by_steps, by_size = figure.subplots(1, 2, sharey=True)
    epsilons = sorted(record.pgd)
    colours = colormaps[SEQUENTIAL](np.linspace(0, 0.85, max(len(epsilons), 2)))
    for epsilon, colour in zip(epsilons, colours, strict=False):
        name = f"ε = {255 * epsilon:.3g}/255"
        by_steps.plot(
            [0, *record.steps], [record.clean, *record.pgd[epsilon]], "o-", color=colour, ms=3.5, label=name
        )
    by_steps.set_xscale("symlog", linthresh=1)
    by_steps.set_xticks([0, *record.steps], [str(k) for k in (0, *record.steps)])
    by_steps.minorticks_off()
    by_steps.set(title="PGD", xlabel="steps", ylabel="accuracy", ylim=(0, 1))
    by_steps.legend(loc="lower left")

    sizes = [0.0, *(255 * e for e in epsilons)]
    strongest = [record.clean, *(record.pgd[e][-1] for e in epsilons)]
    by_size.plot(sizes, strongest, "o-", color=BLUE, ms=3.5, label=f"PGD, {record.steps[-1]} steps")
    if record.autoattack:
        found = [record.clean, *(record.autoattack[e] for e in epsilons)]
        by_size.plot(sizes, found, "s--", color=ORANGE, ms=3.5, label="AutoAttack")
    by_size.set(title="Size of the attack", xlabel="255 ε")
    by_size.set_xlim(-0.02 * sizes[-1], 1.02 * sizes[-1])
    by_size.legend(loc="upper right")
    by_steps.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure
