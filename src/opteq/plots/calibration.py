"""The calibration (reliability) diagram of a classifier."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from opteq.evaluation.scores import Reliability
from opteq.plots.style import BLUE, GREY, new_figure, styled


@styled
def draw_calibration(reliability: Reliability) -> Figure:
    """Draw accuracy against confidence, and below it how many samples stand behind each bar."""
    figure = new_figure(3.8, 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    width = reliability.edges[1] - reliability.edges[0]
    middle, narrower = reliability.edges[:-1] + width / 2, 0.94 * width

    above.bar(middle, reliability.accuracy, narrower, color=BLUE, alpha=0.75)
    above.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1.2, label="perfect")
    above.plot(
        reliability.confidence,
        reliability.accuracy,
        "o",
        color="#111827",
        markersize=3,
        label="mean confidence of the bin",
        # Not cut in half where all of a bin are right, or none.
        clip_on=False,
    )
    above.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    above.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", ncols=2)

    below.bar(middle, reliability.counts, narrower, color=GREY, alpha=0.6)
    below.set(ylabel="samples", xlabel="confidence of the predicted class")
    # On the log scale of a few there would be one tick.
    if reliability.counts.max() < 10:
        below.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    else:
        below.set_yscale("symlog", linthresh=1)
    below.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure
