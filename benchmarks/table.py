"""The table: all contenders on one cell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.cells import Cell
from benchmarks.contenders import (
    IFT,
    PHANTOM,
    PYTORCH,
    WATCHED,
    Contender,
    Differentiable,
    Limit,
    Ours,
    TorchDEQ,
    Unrolled,
    equilibrium_layer,
)
from benchmarks.measure import Times, interleave, step_memory
from benchmarks.problem import Problem

# A contender further away from the equilibrium than this is solving another problem.
_SAME_FUNCTION = 0.05


@dataclass(frozen=True)
class Quality:
    """What a contender's step is worth and what it takes.

    Attributes:
        residual: largest relative residual of a sample, in float64.
        gradient_errors: relative error of every leaf's gradient, against the float64 reference.
        memory: peak bytes of a step.
    """

    residual: float
    gradient_errors: dict[str, float]
    memory: int

    @property
    def gradient_error(self) -> float:
        """The largest of a leaf."""
        return max(self.gradient_errors.values())


@dataclass(frozen=True)
class Row:
    """One contender on one cell, in its better layout; times are medians in seconds.

    Attributes:
        evaluations: of `T` forward, and products with its Jacobian backward, within the solves.
        quality: None for the bare operators, which compute nothing, and where it was not asked for.
        runs: all times.
        other_layouts: median step of the layouts not taken.
    """

    name: str
    layout: str
    forward: float
    backward: float
    step: float
    evaluations: tuple[int, int]
    quality: Quality | None
    runs: Times
    other_layouts: dict[str, float]


@dataclass(frozen=True)
class Flatness:
    """Peak memory of our step after few and after many iterations, with the evaluations really made."""

    evaluations: tuple[tuple[int, int], tuple[int, int]]
    memory: tuple[int, int]

    @property
    def ratio(self) -> float:
        """How much more the long solve needs."""
        return self.memory[1] / self.memory[0]


@dataclass(frozen=True)
class CellResult:
    """All that was measured on one cell."""

    cell: Cell
    active: float
    rows: dict[str, Row]
    flatness: Flatness


def measure_cell(cell: Cell, device: torch.device, runs: int) -> CellResult:
    """Run every contender of the table on one cell."""
    problem = Problem(cell, device)
    rows = measure(all_contenders(problem), runs)
    return CellResult(cell, problem.exact.active, rows, measure_flatness(cell, device))


def all_contenders(problem: Problem) -> list[Contender]:
    """Every contender in every layout worth trying."""
    contenders: list[Contender] = []
    for layout in problem.cell.family.operator.layouts:
        contenders += ours_and_limit(problem, layout)
        contenders += [Ours(problem, layout, name) for name in (WATCHED, PYTORCH)]
        contenders.append(TorchDEQ(problem, layout, IFT, attached=1, ift=True))
        contenders.append(TorchDEQ(problem, layout, PHANTOM, attached=5, grad=5, tau=0.8))
    ours = contenders[0]
    steps = problem.steps_to(problem.residual(ours.forward()))
    if steps is not None:
        contenders += [Unrolled(problem, layout, steps) for layout in problem.cell.family.operator.layouts]
    return contenders


def ours_and_limit(problem: Problem, layout: str) -> tuple[Ours, Limit]:
    """Our layer, and the bare operators for as many evaluations as it makes."""
    ours = Ours(problem, layout)
    return ours, Limit(problem, layout, *ours.evaluations())


def measure(contenders: Sequence[Contender], runs: int, with_quality: bool = True) -> dict[str, Row]:
    """Time the contenders and keep each one's better layout."""
    variants: dict[str, list[tuple[Contender, Times]]] = {}
    for contender, times in zip(contenders, interleave(contenders, runs), strict=True):
        variants.setdefault(contender.name, []).append((contender, times))
    rows = {}
    for name, tried in variants.items():
        contender, times = min(tried, key=lambda variant: variant[1].step)
        rows[name] = Row(
            name,
            contender.layout,
            statistics.median(times.forward),
            statistics.median(times.backward),
            times.step,
            contender.evaluations(),
            _quality(contender) if with_quality and isinstance(contender, Differentiable) else None,
            times,
            {c.layout: t.step for c, t in tried if c is not contender},
        )
    return rows


def measure_flatness(cell: Cell, device: torch.device, steps: tuple[int, int] = (10, 100)) -> Flatness:
    """Memory of our step when the solves run for few and for many iterations.

    So that the solves run on, this is a nearly singular equation in float64 with the tightest tolerance
    that it allows, and biases that keep every unit active; the evaluations say how far they got.
    """
    hard = replace(cell.resized(norm=1 - 1e-6), tol=10 * torch.finfo(torch.float64).eps, dtype=torch.float64)
    problem = Problem(hard, device)
    for name, tensor in problem.tensors.items():
        if name.startswith("b"):
            tensor += 10
    evaluations, memory = [], []
    for most in steps:
        ours = Ours(problem, cell.family.operator.layouts[-1])
        ours.layer = equilibrium_layer(ours.layer.map, hard.tol, most)
        log = ours.log()
        evaluations.append((log.forward.evaluations, log.adjoint.evaluations))
        memory.append(step_memory(ours))
    return Flatness((evaluations[0], evaluations[1]), (memory[0], memory[1]))


def _quality(contender: Differentiable) -> Quality:
    problem = contender.problem
    contender.reset()
    value = contender.forward()
    contender.backward(value)
    distance = problem.value_error(value)
    if not distance <= _SAME_FUNCTION:
        cell = problem.cell.title
        raise RuntimeError(f"{contender.name} is {distance:.1%} away from the equilibrium of {cell}.")
    errors = problem.gradient_errors(contender.gradients())
    return Quality(problem.residual(value), errors, step_memory(contender))
