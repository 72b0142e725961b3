"""Pictures of what an equilibrium is worth, and of the weights behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from opteq.evaluation.equilibriumstudy import EquilibriumRecord, LayerRecord
from opteq.plots.style import BLUE, GREEN, ORANGE, SEQUENTIAL, literal, new_figure, on_decades, styled

# A panel shows at least so much of the accuracy, lest one image look like a fall.
_SPAN = 0.02
# So many names of lines fit into one column of a legend, and into two.
_COLUMN = 6


@styled
def draw_accuracy(record: EquilibriumRecord) -> Figure:
    """Draw the accuracy against the number of iterations in place of the equilibrium."""
    figure = new_figure(4.2, 3.2)
    axes = figure.add_subplot()
    axes.axhline(record.full_accuracy, color=ORANGE, linestyle="--", linewidth=1.2, label="equilibrium")
    (curve,) = axes.plot(
        record.steps, record.accuracy, "o-", color=BLUE, markersize=3.5, label="K iterations"
    )
    curve.set_clip_on(False)  # dots at 100 % are whole
    shown = [*record.accuracy, record.full_accuracy]
    room = max(_SPAN, max(shown) - min(shown)) / 2
    axes.set_ylim(max(0.0, min(shown) - room), min(1.0, max(shown) + room / 2))
    axes.set_xscale("log")
    axes.set_xticks(record.steps, [str(k) for k in record.steps])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(title="Accuracy", xlabel="iterations K", ylabel="accuracy")
    axes.legend(loc="lower right")
    return figure


@styled
def draw_residuals(layers: Sequence[LayerRecord]) -> Figure:
    """Draw the median residual of every layer along the plain iteration, in the range of most samples."""
    figure = new_figure(4.2, 3.2)
    axes = figure.add_subplot()
    for layer, colour in zip(layers, _colours(len(layers)), strict=True):
        low, middle, high = np.where(layer.residual > 0, layer.residual, np.nan)
        iterations = np.arange(len(middle))
        axes.plot(iterations, middle, color=colour, label=literal(layer.name))
        axes.fill_between(iterations, low, high, color=colour, alpha=0.15, linewidth=0)
    on_decades(axes, np.concatenate([layer.residual for layer in layers]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Residual over the test set", xlabel="plain iteration", ylabel="‖T(z) - z‖ / ‖T(z)‖")
    if len(layers) > 1:
        axes.legend()
    return figure


@styled
def draw_spectra(layer: LayerRecord) -> Figure:
    """Draw the singular values of a layer's operators in descending order."""
    figure = new_figure(4.2, 3.2)
    axes = figure.add_subplot()
    rows = list(zip(layer.operators, layer.spectra, strict=True))
    # The projection of patches belongs to its operator, and has its colour.
    colours = _colours(sum(not name.startswith("W_h") for name, _ in rows))
    for place, (name, spectrum) in enumerate(rows):
        # Each value stands for a share of the singular values: a step as long as that.
        ends = np.concatenate([[0.0], spectrum.shares.cumsum(0).cpu().numpy()])
        values = spectrum.values.cpu().numpy()
        line = ":" if name.startswith("W_h") else "-" if spectrum.kind == "exact" else "--"
        colour = colours[place % len(colours)]
        axes.step(ends, [*values, values[-1]], line, where="post", color=colour, lw=1.4, label=_name(name))
    axes.set(title="Singular values", xlabel="share of them, largest first", ylabel="σ", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    if len(rows) <= 2 * _COLUMN:
        axes.legend(ncols=1 if len(rows) <= _COLUMN else 2)
    return figure


@styled
def draw_units(layer: LayerRecord) -> Figure:
    """Draw the share of active units of each activation and, where there are, the `α` of skip connections."""
    panels = [("Active units", layer.active, GREEN), ("α", layer.alpha, BLUE)]
    panels = [panel for panel in panels if panel[1]]
    figure = new_figure(4.2, 3.2)
    grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, values, colour) in zip(grid, panels, strict=True):
        _draw_bars(axes, title, values, colour)
    grid[-1].set_xlabel("unit")
    return figure


def _draw_bars(axes: Axes, title: str, values: Sequence[float], colour: str) -> None:
    places = np.arange(1, len(values) + 1)
    bars = axes.bar(places, values, color=colour, alpha=0.8, width=0.6)
    share = title != "α"
    axes.bar_label(bars, [f"{v:.0%}" if share else f"{v:.2f}" for v in values], fontsize=8, padding=2)
    axes.set(title=title, ylim=(0, 1.15), xlim=(0.3, len(values) + 0.7))
    axes.set_xticks(places, [str(i) for i in places])
    axes.set_yticks([0, 0.5, 1])
    axes.grid(visible=False, axis="x")
    if share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _colours(count: int) -> list[str] | list[tuple[float, ...]]:
    """Colours that can be told apart; of many lines, in their order on one scale."""
    few = [BLUE, ORANGE, GREEN]
    return few[:count] if count <= len(few) else list(colormaps[SEQUENTIAL](np.linspace(0, 0.92, count)))


def _name(name: str) -> str:
    """`W_h2` as a formula: letters after an underscore and digits are indices."""
    letter, _, index = name.partition("_")
    index += letter[1:]
    return f"${letter[0]}_{{{index}}}$" if index else f"${letter}$"
