"""Pictures of several branches: how they are related, and how they bear perturbed features."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from opteq.evaluation.branchstudy import DIRECTIONS, BranchRecord
from opteq.plots.style import BLUE, GREEN, ORANGE, SEQUENTIAL, new_figure, styled

_COLOURS = (ORANGE, BLUE, GREEN)


@styled
def draw_relations(record: BranchRecord) -> Figure:
    """Draw average heritage and diversity of every sample (Li et al. 2022, Figure 2a)."""
    figure = new_figure(4.2, 3.2)
    axes = figure.add_subplot()
    for values, name, colour in (
        (record.heritage, "average H, same channel", BLUE),
        (record.diversity, "average D, other channels", ORANGE),
    ):
        axes.plot(values, "o", color=colour, markersize=3.5, alpha=0.8, label=name)
        axes.axhline(float(values.mean()), color=colour, linewidth=1)
    axes.set(xlabel="test sample", ylabel="mean inner product")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


@styled
def draw_correlation(record: BranchRecord) -> Figure:
    """Draw the correlations between the channels of the first two branches (Figure 2c)."""
    figure = new_figure(4.2, 3.4)
    axes = figure.add_subplot()
    picture = axes.imshow(record.correlation, cmap=SEQUENTIAL, vmin=0, interpolation="nearest")
    axes.grid(visible=False)
    axes.locator_params(integer=True)  # there is no half a channel
    axes.set(
        title=f"Diagonal share {record.diagonal_share[0]:.1%} (chance {1 / len(record.correlation):.1%})",
        xlabel="channel of branch 1",
        ylabel="channel of branch 2",
    )
    bar = figure.colorbar(picture, ax=axes, shrink=0.85)
    bar.set_label("|inner product|")
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


@styled
def draw_perturbations(record: BranchRecord) -> Figure:
    """Draw accuracy against the size of perturbations of the features (Figure 3a)."""
    figure = new_figure(4.2, 3.2)
    axes = figure.add_subplot()
    for name, accuracy, colour in zip(DIRECTIONS, record.accuracy, _COLOURS, strict=True):
        axes.plot(record.sizes, accuracy.mean(0), "o-", color=colour, markersize=3.5, label=name)
        axes.fill_between(
            record.sizes, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.15, linewidth=0
        )
    axes.set(xlabel="size ε of the perturbation of g(x)", ylabel="accuracy", xlim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend()
    return figure
