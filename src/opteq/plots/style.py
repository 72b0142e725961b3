"""The look that all figures share, and how they become files.

Figures are built on `matplotlib.figure.Figure` alone: no pyplot, hence no window and no global
state. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#6B7280"
SEQUENTIAL = "cividis"
# Of text on a light ground: the green and the orange above are too pale for small letters.
RIGHT, WRONG = "#00765A", "#B84F00"
TEXT, _LABEL, _FRAME, _GRID = "#111827", "#374151", "#9CA3AF", "#E5E7EB"
# The colours that a page may change, by the names of its variables; those of data hold on any ground.
_VARIABLES = {
    TEXT: "--text",
    _LABEL: "--label",
    _FRAME: "--frame",
    _GRID: "--grid",
    GREY: "--grey",
    BLUE: "--blue",
    RIGHT: "--right",
    WRONG: "--wrong",
}
# What matplotlib writes beside the picture itself: names of what nothing refers to, remarks, the addresses of
# the formats, and a rule for all that a page has.
_BESIDE = re.compile(
    r'(?<=<g) id="[^"]*"|<!--.*?-->|<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"|<style.*?</style>',
    re.DOTALL,
)

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": _FRAME,
    "axes.grid": True,
    "axes.labelcolor": _LABEL,
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler(color=[BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00"]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.08,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "savefig.facecolor": "white",
    "svg.hashsalt": "opteq",
    "text.color": TEXT,
    "xtick.color": GREY,
    "xtick.labelsize": 8,
    "ytick.color": GREY,
    "ytick.labelsize": 8,
}

# Of the height of decades, above and below them.
_ROOM = 0.05

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


def wrapped(text: str, width: int, lines: int = 2) -> str:
    """`text` as a label of a few lines, shortened only beyond them, and never read as a formula."""
    parts = textwrap.wrap(" ".join(text.split()), width, max_lines=lines, placeholder="…")
    return "\n".join(parts).replace("$", r"\$")


def on_decades(axes: Axes, values: NDArray) -> None:
    """Give `axes` a log scale from one power of ten to another, and a line at each.

    It goes a little beyond both, lest a curve near one of them lie on the frame. What is not positive has no
    place on it.
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    known = values[np.isfinite(values) & (values > 0)]
    if known.size:
        low, high = math.floor(np.log10(known.min())), math.ceil(np.log10(known.max()))
        high = max(high, low + 1)
        room = _ROOM * (high - low)
        axes.set_ylim(10.0 ** (low - room), 10.0 ** (high + room))


def to_svg(figure: Figure) -> bytes:
    """The figure as an SVG document; the same figure always gives the same bytes."""
    with matplotlib.rc_context(_STYLE), io.BytesIO() as file:
        figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()


def to_element(figure: Figure) -> str:
    """The figure as an element `<svg>` of an HTML page: transparent, in colours that the page may change.

    These are the variables `--text`, `--label`, `--frame`, `--grid`, `--grey`, `--blue`, `--right` and
    `--wrong`, where the page has any; its rules have to give lines round joins and butt ends.
    """
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(_STYLE), io.StringIO() as file:
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        svg = file.getvalue()
    svg = _BESIDE.sub("", svg[svg.index("<svg") :])
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour.lower(), f"var({name}, {colour.lower()})")
    return svg
