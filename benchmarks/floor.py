"""What a step would take at the very least: the library's own products, as few as can do, and nothing else.

The products are those that the library multiplies with, at the cell's tolerance; they are counted as if a
method knew beforehand which units are active at the equilibrium, so that all that is left is a linear
equation, of which GMRES finds the best solution in every Krylov space. No method that knows the map by
evaluating it can do with fewer, and none can take less time with these products.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from benchmarks.cells import Cell
from benchmarks.contenders import IFT, OURS, Limit, Ours, TorchDEQ
from benchmarks.families import Call, Family, OptEq, Tensors
from benchmarks.operators import Matrix, Operator, Shape
from benchmarks.problem import Problem
from benchmarks.report import markdown_table
from benchmarks.table import Row, measure
from opteq.native.packed import Packed, gram
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.results import State, like, map_state, tensors_of

FLOOR = "own products alone"
_MOST_PRODUCTS = 40


@dataclass(frozen=True)
class FloorResult:
    """Median seconds of a step and the evaluations that it makes, by contender."""

    cell: Cell
    rows: dict[str, Row]

    def gain(self, name: str) -> float:
        """How many times as fast as torchdeq's implicit step."""
        return self.rows[IFT].step / self.rows[name].step


def measure_floor(cell: Cell, device: torch.device, runs: int) -> FloorResult:
    """Time our step, torchdeq's and our products alone, in every layout."""
    problem = Problem(cell, device)
    counts = least_evaluations(problem)
    contenders = []
    for layout in cell.family.operator.layouts:
        contenders += [Ours(problem, layout), Floor(problem, layout, *counts)]
        contenders.append(TorchDEQ(problem, layout, IFT, attached=1, ift=True))
    return FloorResult(cell, measure(contenders, runs, with_quality=False))


def floor_markdown(results: Sequence[FloorResult]) -> str:
    """The table, with the geometric means."""
    names = (IFT, OURS, FLOOR)
    rows = []
    for result in results:
        times = [f"{result.rows[name].step * 1e3:.1f}" for name in names]
        counts = [f"{a} + {b}" for a, b in (result.rows[name].evaluations for name in names)]
        gains = [f"{result.gain(name):.2f}" for name in names[1:]]
        rows.append([result.cell.name, *times, *counts, *gains])
    means = [statistics.geometric_mean([r.gain(name) for r in results]) for name in names[1:]]
    rows.append(["geometric mean", *["–"] * 6, *(f"{mean:.2f}" for mean in means)])
    columns = [f"{name}{unit}" for unit in (", ms", ", evaluations") for name in names]
    return markdown_table(["cell", *columns, "torchdeq / ours", "torchdeq / own products alone"], rows)


class Floor(Limit):
    """The library's own products with `W`, `U` and of their gradients, with kernels prepared beforehand.

    Sums, activations, couplings and forces on patches are left out, and all that a solver does.
    """

    name = FLOOR

    def __init__(self, problem: Problem, layout: str, forward: int, backward: int) -> None:
        own = copy.copy(problem)
        own.cell = replace(problem.cell, family=_of_own_products(problem.cell))
        super().__init__(own, layout, forward, backward)

    def _calls(self, family: Family) -> tuple[list[Call], list[Call]]:
        products = family.products(self.leaves)
        return products, products


def _of_own_products(cell: Cell) -> Family:
    operator = cell.family.operator
    if isinstance(operator, Matrix):
        return HiddenDense(operator)
    return replace(cell.family, operator=OwnOperator(operator, cell.tol))


@dataclass(frozen=True)
class OwnOperator(Operator):
    """`operator` by the library's products, whose rounding may be as large as `error`."""

    operator: Operator
    error: float
    bound: dict[int, BoundOperator] = field(default_factory=dict, compare=False)

    @property
    def layouts(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.operator.layouts

    def domain(self, channels: int, size: int) -> Shape:
        return self.operator.domain(channels, size)

    def weight_shape(self, in_channels: int, out_channels: int) -> Shape:
        return self.operator.weight_shape(in_channels, out_channels)

    def apply(self, weight: Tensor, x: Tensor) -> Tensor:
        return self._bound(weight, x)(x)

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        return self._bound(weight, y).adjoint(y)

    def weight_gradient(self, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self._bound(weight, x).weight_gradient((x, y))[0]

    def module(self, in_channels: int, out_channels: int) -> LinearOperator:
        return self.operator.module(in_channels, out_channels)

    def _bound(self, weight: Tensor, image: Tensor) -> BoundOperator:
        """Bound once, so that kernels are transformed before anything is timed."""
        if weight.data_ptr() not in self.bound:
            module = self.module(weight.shape[1], weight.shape[0])
            module.weight = nn.Parameter(weight.detach(), requires_grad=False)
            domain = (weight.shape[1], *image.shape[2:])
            self.bound[weight.data_ptr()] = module.bind(domain, error=self.error)
        return self.bound[weight.data_ptr()]


@dataclass(frozen=True)
class HiddenDense(OptEq):
    """A dense unit in its hidden variable, `u = W Wᵀσ(u + c)`: one packed product an evaluation."""

    def products(self, leaves: Tensors) -> list[Call]:
        W = leaves["W"].detach()
        multiply, hidden = Packed(gram(W)), leaves["x"].detach() @ W.mT
        return [lambda: multiply(hidden)]

    def bare_first(self, leaves: Tensors) -> list[Call]:
        """`W Wᵀ`, and the way back to `z`."""
        W, hidden = leaves["W"], leaves["x"] @ leaves["W"].mT
        return [lambda: gram(W), lambda: self.operator.adjoint(W, hidden)]

    def bare_gradients(self, leaves: Tensors) -> list[Call]:
        return Family.bare_gradients(self, leaves)


def least_evaluations(problem: Problem) -> tuple[int, int]:
    """Evaluations of `T` and products with its Jacobian that reach the cell's tolerance at best.

    On the linear equation at the equilibrium, from `T(0)` forward and from 0 backward, until the residual of
    every sample is at most `tol` times its solution. Forward the first residual takes an evaluation too.
    """
    leaves = problem.leaves("contiguous", torch.float64)
    T = problem.cell.family.equation(leaves)
    z = map_state(lambda t: t.clone().requires_grad_(), problem.exact.value)
    inputs, image = tensors_of(z), T(z)
    outputs = tensors_of(image)
    # The product with the Jacobian is the derivative of that with its transpose, which is linear.
    dual = [torch.zeros_like(t, requires_grad=True) for t in outputs]
    pulled = torch.autograd.grad(outputs, inputs, dual, create_graph=True)

    def forward(v: State) -> State:
        pushed = torch.autograd.grad(pulled, dual, tensors_of(v), retain_graph=True)
        return map_state(torch.sub, v, like(v, pushed))

    def backward(v: State) -> State:
        products = torch.autograd.grad(outputs, inputs, tensors_of(v), retain_graph=True)
        return map_state(torch.sub, v, like(v, products))

    with torch.no_grad():
        start = T(problem.cell.family.zero(leaves))
    missing = map_state(torch.sub, problem.exact.value, start)
    cotangent = map_state(Tensor.double, problem.cotangent)
    zero = map_state(torch.zeros_like, cotangent)
    tol = problem.cell.tol
    return 1 + _gmres(forward, start, forward(missing), tol), _gmres(backward, zero, cotangent, tol)


def _gmres(apply: Callable[[State], State], start: State, residual: State, tol: float) -> int:
    """Products with `A = apply` until `min ‖r - A V c‖ ≤ tol · ‖x + V c‖` in every sample."""
    basis, images = [_normalised(_rows(residual))], []
    while len(images) < _MOST_PRODUCTS:
        images.append(_rows(apply(_state(basis[-1], residual))))
        spanned, right = torch.stack(images, 2), _rows(residual)[:, :, None]
        coefficients = torch.linalg.lstsq(spanned, right).solution
        left = (right - spanned @ coefficients).norm(dim=(1, 2))
        solution = _rows(start) + (torch.stack(basis, 2) @ coefficients)[:, :, 0]
        if (left <= tol * solution.norm(dim=1)).all():
            return len(images)
        following = images[-1]
        for vector in basis:
            following = following - vector * (vector * following).sum(1, keepdim=True)
        basis.append(_normalised(following))
    raise RuntimeError(f"{_MOST_PRODUCTS} products did not reach the tolerance.")


def _rows(state: State) -> Tensor:
    return torch.cat([t.flatten(1) for t in tensors_of(state)], 1)


def _state(rows: Tensor, other: State) -> State:
    parts = rows.split([t[0].numel() for t in tensors_of(other)], 1)
    return like(other, tuple(p.reshape(t.shape) for p, t in zip(parts, tensors_of(other), strict=True)))


def _normalised(rows: Tensor) -> Tensor:
    return rows / rows.norm(dim=1, keepdim=True)
