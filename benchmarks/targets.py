"""What the measurements are held against."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.contenders import IFT, LIMIT, OURS, PHANTOM, UNROLLED
from benchmarks.table import CellResult

_MEAN_SPEEDUP = 2.0
_BACKWARD_OVERHEAD = 1.2
_FLAT, _MEMORY_SHARE = 1.05, 0.6


@dataclass(frozen=True)
class Verdict:
    """One target: what was measured, what was asked, and whether it was reached."""

    cell: str
    quantity: str
    measured: str
    target: str
    passed: bool


def verdicts(results: list[CellResult]) -> list[Verdict]:
    """All targets, cell by cell, and the geometric mean over the cells."""
    found = [verdict for result in results for verdict in _of_cell(result)]
    speedups = [r.rows[IFT].step / r.rows[OURS].step for r in results]
    mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
    return [
        *found,
        _at_least("all of these", "torchdeq implicit step / ours, geometric mean", mean, _MEAN_SPEEDUP),
    ]


def _of_cell(result: CellResult) -> Iterator[Verdict]:
    cell, rows = result.cell.name, result.rows
    ours, ift, limit = rows[OURS], rows[IFT], rows[LIMIT]
    yield _at_least(cell, "torchdeq implicit step / ours", ift.step / ours.step, result.cell.speedup)
    yield _at_least(cell, "torchdeq phantom step / ours", rows[PHANTOM].step / ours.step, 1.0)
    overhead = ours.forward / limit.forward
    yield _at_most(cell, "forward / bare operators", overhead, result.cell.forward_overhead)
    yield _at_most(cell, "backward / bare operators", ours.backward / limit.backward, _BACKWARD_OVERHEAD)
    for half, mine, theirs in zip(("forward", "backward"), ours.evaluations, ift.evaluations, strict=True):
        yield _no_more(cell, f"{half} evaluations, ours and torchdeq", mine, theirs, "{}")
    # Only the bare operators have none.
    assert ours.quality is not None
    assert ift.quality is not None
    errors = ours.quality.gradient_error, ift.quality.gradient_error
    yield _no_more(cell, "gradient error, ours and torchdeq", *errors, "{:.1e}")
    share = ours.quality.memory / ift.quality.memory
    yield _at_most(cell, "memory, ours / torchdeq implicit", share, _MEMORY_SHARE)
    flat = result.flatness
    reached = " → ".join("+".join(map(str, pair)) for pair in flat.evaluations)
    yield _at_most(cell, f"memory, {reached} evaluations", flat.ratio, _FLAT)
    if UNROLLED in rows:
        yield _at_least(cell, "unrolled step / ours", rows[UNROLLED].step / ours.step, 1.0)


def _at_least(cell: str, quantity: str, value: float, bound: float) -> Verdict:
    return Verdict(cell, quantity, f"{value:.2f}", f"≥ {bound:g}", value >= bound)


def _at_most(cell: str, quantity: str, value: float, bound: float) -> Verdict:
    return Verdict(cell, quantity, f"{value:.2f}", f"≤ {bound:g}", value <= bound)


def _no_more(cell: str, quantity: str, mine: float, theirs: float, form: str) -> Verdict:
    # In the digits shown. Further ones of a gradient error are rounding, where the same units of both are on
    # the wrong side of their kinks.
    measured, bound = form.format(mine), form.format(theirs)
    return Verdict(cell, quantity, measured, f"≤ {bound}", float(measured) <= float(bound))
