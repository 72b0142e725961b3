"""Cost curves: how the time of a step grows with the size of the problem and with the accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.cells import CURVES, Cell
from benchmarks.contenders import LIMIT, OURS
from benchmarks.measure import Deadline
from benchmarks.problem import Problem
from benchmarks.report import markdown_table
from benchmarks.table import measure, ours_and_limit
from benchmarks.targets import Verdict
from opteq.plots.style import new_figure, styled

_PROPORTIONAL = 1.2


@dataclass(frozen=True)
class Point:
    """One point of a curve, times in seconds.

    Attributes:
        value: batch size, resolution, channels or tolerance.
        forward, backward, step: of our layer.
        bare: a step of the bare operators.
        evaluations: forward and backward.
        work: multiplications in the bare operators of a step.
    """

    value: float
    forward: float
    backward: float
    step: float
    bare: float
    evaluations: tuple[int, int]
    work: float


def measure_curve(axis: str, device: torch.device, runs: int, deadline: Deadline) -> list[Point]:
    """The points of one curve, as many as the time allows."""
    points = []
    for value, cell in CURVES[axis].items():
        if deadline.passed():
            break
        points.append(_measure_point(value, cell, device, runs))
    return points


def spread(rates: Sequence[float]) -> float:
    """Smallest factor `f` such that one constant is within a factor `f` of all rates."""
    return math.sqrt(max(rates) / min(rates))


def verdicts(curves: dict[str, list[Point]]) -> list[Verdict]:
    """Whether time is proportional to the work, for our layer; the same number for the bare operators."""
    found = []
    for axis, points in curves.items():
        for quantity, rates in (
            ("time / work, ours", [p.step / p.work for p in points]),
            ("time / bare operators, ours", [p.step / p.bare for p in points]),
            ("time / work, bare operators", [p.bare / p.work for p in points]),
        ):
            factor = spread(rates)
            bound = f"constant within a factor {_PROPORTIONAL:g}"
            found.append(Verdict(axis, quantity, f"factor {factor:.2f}", bound, factor <= _PROPORTIONAL))
    return found


def curve_markdown(axis: str, points: Sequence[Point]) -> str:
    """The table of one curve."""
    columns = (
        axis, "forward ms", "backward ms", "step ms", "bare operators ms", "step / bare", "evaluations",
        "GMAC", "ours GMAC/s", "bare GMAC/s",
    )  # fmt: skip
    rows = (
        (
            f"{p.value:g}",
            f"{1e3 * p.forward:.1f}",
            f"{1e3 * p.backward:.1f}",
            f"{1e3 * p.step:.1f}",
            f"{1e3 * p.bare:.1f}",
            f"{p.step / p.bare:.2f}",
            "{} + {}".format(*p.evaluations),
            f"{p.work / 1e9:.2f}",
            f"{p.work / p.step / 1e9:.1f}",
            f"{p.work / p.bare / 1e9:.1f}",
        )
        for p in points
    )
    cell = next(iter(CURVES[axis].values()))
    return f"## {axis}\n\nThe first point is {cell.title}.\n\n{markdown_table(columns, rows)}"


@styled
def plot(curves: dict[str, list[Point]]) -> Figure:
    """Time per step along every curve, beside the bare operators and a line proportional to the work."""
    figure = new_figure(3.2 * len(curves), 3.0)
    for axes, (axis, points) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        values = [p.value for p in points]
        pace = math.exp(sum(math.log(p.step / p.work) for p in points) / len(points))
        axes.loglog(values, [1e3 * p.step for p in points], "o-", label="opteq, step")
        axes.loglog(values, [1e3 * p.bare for p in points], "s-", label="bare operators")
        axes.loglog(values, [1e3 * pace * p.work for p in points], "--", label="proportional to the work")
        axes.set(title=axis, ylabel="ms per step")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        if axis == "tolerance":
            axes.invert_xaxis()
    figure.axes[0].legend()
    return figure


def save_plot(curves: dict[str, list[Point]], path: Path) -> None:
    """Write the figure of all curves as PNG."""
    plot(curves).savefig(path, dpi=150)


def _measure_point(value: float, cell: Cell, device: torch.device, runs: int) -> Point:
    problem = Problem(cell, device)
    contenders = [c for layout in cell.family.operator.layouts for c in ours_and_limit(problem, layout)]
    rows = measure(contenders, runs, with_quality=False)
    ours, limit = rows[OURS], rows[LIMIT]
    sizes = cell.sizes
    single = cell.family.operator.multiplications(sizes.channels, sizes.hidden, sizes.size) * sizes.batch
    # The injection, two operators per evaluation, and the five that make the gradients.
    work = single * (6 + 2 * sum(ours.evaluations))
    return Point(value, ours.forward, ours.backward, ours.step, limit.step, ours.evaluations, work)
