"""The look that all figures share, and how they become files.

Figures are built on `matplotlib.figure.Figure` alone: no pyplot, hence no window and no global
state. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6B7280"
SEQUENTIAL = "cividis"

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#9CA3AF",
    "axes.grid": True,
    "axes.labelcolor": "#374151",
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00"]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": "#E5E7EB",
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "white",
    "svg.hashsalt": "opteq",
    "text.color": "#111827",
    "xtick.color": "#6B7280",
    "xtick.labelsize": 8,
    "ytick.color": "#6B7280",
    "ytick.labelsize": 8,
}

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Let a drawing function work in the common style, leaving the caller's settings alone."""

    @wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return draw_in_style


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of `width` × `height` inches that makes room for its labels."""
    return Figure(figsize=(width, height), layout="constrained")


def literal(text: str, longest: int = 18) -> str:
    """`text` as a label: on one line, shortened, and never read as a formula."""
    text = " ".join(text.split())
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    return text.replace("$", r"\$")


def to_svg(figure: Figure) -> bytes:
    """The figure as an SVG document; the same figure always gives the same bytes."""
    with matplotlib.rc_context(_STYLE), io.BytesIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()
