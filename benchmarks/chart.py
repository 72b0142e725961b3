"""The chart of the README: time and memory of a training step beside torchdeq's, from `table.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opteq.plots.style import BLUE, new_figure, styled

RESULTS = Path(__file__).parent / "results" / "table.json"
CHART = Path(__file__).parents[1] / "docs" / "images" / "step.png"
CELLS = {
    "opteq": "one layer of 3×3 convolutions",
    "geq": "Gaussian kernel on patches",
    "deep": "five layers, one equilibrium",
    "mopteq": "four branches of several sizes",
    "dense": "dense layer",
}
OURS, THEIRS = "opteq", "torchdeq implicit"
# The width of a bar of torchdeq.
_WHOLE = 1.0


def steps(results: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """By cell and contender: milliseconds of a step, and megabytes at its peak."""
    return {
        cell["name"]: {
            row["name"]: (1e3 * row["step"], row["quality"]["memory"] / 1e6)
            for row in cell["contenders"]
            if row["name"] in (OURS, THEIRS)
        }
        for cell in results["cells"]
        if cell["name"] in CELLS
    }


@styled
def draw(measured: dict[str, dict[str, tuple[float, float]]]) -> Figure:
    """Two panels of bars: ours as a share of torchdeq's, with both numbers."""
    figure = new_figure(8.6, 2.9)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, title, place, unit in zip(panels, ("Time", "Memory"), (0, 1), ("ms", "MB"), strict=True):
        _draw_panel(panel, measured, place, unit)
        panel.set_title(f"{title} of a training step")
    panels[0].set_yticks(range(len(CELLS)), list(CELLS.values()))
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw_panel(
    panel: Axes, measured: dict[str, dict[str, tuple[float, float]]], place: int, unit: str
) -> None:
    pairs = [(measured[cell][OURS][place], measured[cell][THEIRS][place]) for cell in CELLS]
    rows = range(len(pairs))
    panel.barh(rows, [_WHOLE] * len(pairs), 0.62, color="#D1D5DB", label="torchdeq, implicit gradient")
    panel.barh(rows, [ours / theirs for ours, theirs in pairs], 0.62, color=BLUE, label="opteq")
    for row, (ours, theirs) in enumerate(pairs):
        text = f"{_short(ours)} of {_short(theirs)} {unit}"
        panel.text(0.97, row, text, ha="right", va="center", fontsize=8, color="#111827")
    panel.set_xlim(0, _WHOLE)
    panel.set_xticks([])
    panel.grid(visible=False)
    for side in ("left", "bottom"):
        panel.spines[side].set_visible(False)
    panel.tick_params(length=0)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


if __name__ == "__main__":
    draw(steps(json.loads(RESULTS.read_text(encoding="utf-8")))).savefig(CHART, dpi=150)
