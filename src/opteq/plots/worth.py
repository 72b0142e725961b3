"""Pictures of what an equilibrium is worth, and of the weights behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from opteq.evaluation.equilibriumstudy import EquilibriumRecord, LayerRecord
from opteq.plots.style import BLUE, GREEN, ORANGE, SEQUENTIAL, literal, new_figure, styled

# Beyond so many lines their names fill the panel.
_NAMED = 8


@styled
def draw_iterations(record: EquilibriumRecord) -> Figure:
    """Draw the accuracy against the number of iterations, and the residual along them."""
    figure = new_figure(8.4, 3.0)
    left, right = figure.subplots(1, 2)
    left.axhline(record.full_accuracy, color=ORANGE, linestyle="--", linewidth=1.2, label="equilibrium")
    left.plot(record.steps, record.accuracy, "o-", color=BLUE, markersize=3.5, label="K iterations")
    left.set_xscale("log")
    left.set_xticks(record.steps, [str(k) for k in record.steps])
    left.minorticks_off()
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    left.set(title="Accuracy", xlabel="iterations K", ylabel="accuracy")
    left.legend(loc="lower right")
    for layer, colour in zip(record.layers, _colours(len(record.layers)), strict=True):
        low, middle, high = np.where(layer.residual > 0, layer.residual, np.nan)
        iterations = np.arange(len(middle))
        right.plot(iterations, middle, color=colour, label=literal(layer.name) or "median")
        right.fill_between(iterations, low, high, color=colour, alpha=0.15, linewidth=0)
    right.set_yscale("log")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(title="Residual", xlabel="iteration", ylabel="‖T(z) - z‖ / ‖T(z)‖")
    if len(record.layers) > 1:
        right.legend()
    return figure


@styled
def draw_spectra(layer: LayerRecord) -> Figure:
    """Draw the singular values of a layer's operators in descending order."""
    figure = new_figure(4.2, 3.2)
    axes = figure.add_subplot()
    for name, spectrum, colour in zip(
        layer.operators, layer.spectra, _colours(len(layer.spectra)), strict=True
    ):
        # Each value stands for a share of the singular values: a step as long as that.
        ends = np.concatenate([[0.0], spectrum.shares.cumsum(0).cpu().numpy()])
        values = spectrum.values.cpu().numpy()
        style = "-" if spectrum.kind == "exact" else "--"
        axes.step(
            ends, np.append(values, values[-1]), style, where="post", color=colour, linewidth=1.4,
            label=_name(name),
        )  # fmt: skip
    axes.set(title="Singular values", xlabel="share of them, largest first", ylabel="σ", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    if len(layer.spectra) <= _NAMED:
        axes.legend()
    return figure


@styled
def draw_units(layer: LayerRecord) -> Figure:
    """Draw the share of active units of each activation and, where there are, the `α` of skip connections."""
    panels: list[tuple[str, Sequence[float], str]] = [("Active units", layer.active, GREEN)]
    if layer.alpha:
        panels.append(("α", layer.alpha, BLUE))
    figure = new_figure(4.2, 3.2)
    for axes, (title, values, colour) in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        _draw_bars(axes, title, values, colour)
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
    axes.set_xlabel("unit")


def _colours(count: int) -> list[str] | list[tuple[float, ...]]:
    """Colours that can be told apart; of many lines, in their order on one scale."""
    few = [BLUE, ORANGE, GREEN]
    return few[:count] if count <= len(few) else list(colormaps[SEQUENTIAL](np.linspace(0, 0.92, count)))


def _name(name: str) -> str:
    """`W_h2` as a formula: letters after an underscore and digits are indices."""
    letter, _, index = name.partition("_")
    index += letter[1:]
    return f"${letter[0]}_{{{index}}}$" if index else f"${letter}$"
