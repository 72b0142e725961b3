"""Growth: how the time of a step grows along one axis, beside torchdeq's and that of the bare operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from benchmarks.cells import CURVES, Cell
from benchmarks.contenders import IFT, LIMIT, OURS, TorchDEQ
from benchmarks.measure import Deadline
from benchmarks.problem import Problem
from benchmarks.report import markdown_table
from benchmarks.table import measure, ours_and_limit
from benchmarks.targets import Verdict
from opteq.plots.style import new_figure, styled

_STEEPER = 1.1
_COLUMNS = 4


@dataclass(frozen=True)
class Point:
    """One point of a curve, times in seconds.

    Attributes:
        value: where on the axis.
        forward, backward, step: of our layer.
        bare: a step of the bare operators, for as many evaluations.
        theirs: an implicit step of torchdeq, to the same tolerances.
        evaluations: ours, forward and backward.
    """

    value: float
    forward: float
    backward: float
    step: float
    bare: float
    theirs: float
    evaluations: tuple[int, int]


def measure_curve(axis: str, device: torch.device, runs: int, deadline: Deadline) -> list[Point]:
    """The points of one curve, as many as the time allows."""
    points = []
    for value, cell in CURVES[axis].items():
        if deadline.passed():
            break
        with _threads(int(value) if axis == "threads" else torch.get_num_threads()):
            points.append(_measure_point(value, cell, device, runs))
    return points


def verdicts(curves: dict[str, list[Point]]) -> list[Verdict]:
    """Whether our time, from one end of a curve to the other, grows no more than that of the bare operators.

    The curve of threads has no such end: there is nothing to grow.
    """
    found = []
    for axis, points in curves.items():
        if axis == "threads":
            continue
        growth = points[-1].step / points[0].step
        bare = points[-1].bare / points[0].bare
        measured = f"{growth:.2f} times, bare operators {bare:.2f}"
        bound = f"at most {_STEEPER:g} times theirs"
        found.append(Verdict(axis, "growth of a step", measured, bound, growth <= _STEEPER * bare))
    return found


def curve_markdown(axis: str, points: Sequence[Point]) -> str:
    """The table of one curve."""
    columns = (
        axis, "forward ms", "backward ms", "step ms", "bare operators ms", "torchdeq ms", "step / bare",
        "torchdeq / step", "evaluations",
    )  # fmt: skip
    rows = (
        (
            f"{p.value:g}",
            *(f"{1e3 * seconds:.1f}" for seconds in (p.forward, p.backward, p.step, p.bare, p.theirs)),
            f"{p.step / p.bare:.2f}",
            f"{p.theirs / p.step:.2f}",
            "{} + {}".format(*p.evaluations),
        )
        for p in points
    )
    cell = next(iter(CURVES[axis].values()))
    return f"## {axis}\n\nThe first point is {cell.title}.\n\n{markdown_table(columns, rows)}"


@styled
def plot(curves: dict[str, list[Point]]) -> Figure:
    """Time per step along every curve, on a logarithmic scale, point by point."""
    rows = -(-len(curves) // _COLUMNS)
    figure = new_figure(2.9 * min(len(curves), _COLUMNS), 2.6 * rows)
    panels = figure.subplots(rows, min(len(curves), _COLUMNS), squeeze=False).flat
    for axes, (axis, points) in zip(panels, curves.items(), strict=False):
        places = range(len(points))
        axes.semilogy(places, [1e3 * p.theirs for p in points], "^-", label="torchdeq, implicit gradient")
        axes.semilogy(places, [1e3 * p.bare for p in points], "s-", label="bare operators")
        axes.semilogy(places, [1e3 * p.step for p in points], "o-", label="opteq")
        axes.set(title=axis, xticks=places, xticklabels=[f"{p.value:g}" for p in points])
        # Plain numbers, and between the decades only where a panel spans few of them.
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    for axes in figure.axes[:: min(len(curves), _COLUMNS)]:
        axes.set_ylabel("ms per step")
    for axes in figure.axes[len(curves) :]:
        axes.set_axis_off()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def save_plot(curves: dict[str, list[Point]], path: Path) -> None:
    """Write the figure of all curves as PNG."""
    plot(curves).savefig(path, dpi=150)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure_point(value: float, cell: Cell, device: torch.device, runs: int) -> Point:
    problem = Problem(cell, device)
    contenders = []
    for layout in cell.family.operator.layouts:
        contenders += ours_and_limit(problem, layout)
        contenders.append(TorchDEQ(problem, layout, IFT, attached=1, ift=True))
    rows = measure(contenders, runs, with_quality=False)
    ours = rows[OURS]
    others = (rows[LIMIT].step, rows[IFT].step)
    return Point(value, ours.forward, ours.backward, ours.step, *others, ours.evaluations)
