"""One cell's tensors on a device, and its exact solution and gradients in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from benchmarks.cells import Cell
from benchmarks.families import Leaves, Map, Tensors
from opteq.results import State, like, map_state, tensors_of
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import solve_fixed_point

_EXACT = 1e-11
_MOST_UNROLLED = 3000


@dataclass(frozen=True)
class Exact:
    """Float64 equilibrium, gradients of `⟨w, z*⟩` towards every leaf, share of units above zero."""

    value: State
    gradients: Tensors
    active: float


class Problem:
    """The leaves and the cotangent `w` of one cell, the same numbers for every contender."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self.cell, self.device = cell, device
        # Drawn in float64 and rounded once, so that the float64 reference sees the very same numbers.
        drawn = cell.family.draw(cell.sizes)
        self.tensors = {name: t.to(device, cell.dtype) for name, t in drawn.items()}
        generator = torch.Generator().manual_seed(3)

        def normal(t: Tensor) -> Tensor:
            drawn = torch.randn(t.shape, generator=generator, dtype=torch.float64)
            return drawn.to(device, cell.dtype)

        self.cotangent = map_state(normal, cell.family.zero(drawn))

    def leaves(self, layout: str, dtype: torch.dtype | None = None) -> Leaves:
        """Fresh leaves that require gradients, images and kernels in the memory layout `layout`."""
        leaves = {}
        for name, tensor in self.tensors.items():
            tensor = tensor.to(dtype or tensor.dtype, copy=True)
            if tensor.dim() == 4 and layout == "channels_last":
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            leaves[name] = nn.Parameter(tensor)
        return leaves

    def residual(self, value: State) -> float:
        """Largest relative residual over the batch, `‖T(z)-z‖ / ‖T(z)‖` in float64."""
        z = _double(value)
        with torch.no_grad():
            return _relative(self._map64(z), z).max().item()

    def gradient_errors(self, gradients: Tensors) -> dict[str, float]:
        """Relative error of the gradient of every leaf."""
        exact = self.exact.gradients
        return {name: ((gradients[name].double() - g).norm() / g.norm()).item() for name, g in exact.items()}

    def value_error(self, value: State) -> float:
        """Relative distance of a value to the equilibrium."""
        exact = _flat(self.exact.value)
        return ((_flat(_double(value)) - exact).norm() / exact.norm()).item()

    def steps_to(self, residual: float) -> int | None:
        """Plain iterations, in float64, until the residual is at most `residual`; None if too many."""
        with torch.no_grad():
            z = _double(self.cell.family.zero(self.tensors))
            for steps in range(_MOST_UNROLLED):
                following = self._map64(z)
                if steps and _relative(following, z).max() <= residual:
                    return steps
                z = following
        return None

    @cached_property
    def exact(self) -> Exact:
        """Solved with the plain functions and autograd; both residuals are checked."""
        leaves = self.leaves("contiguous", torch.float64)
        T = self.cell.family.equation(leaves)
        z = map_state(torch.Tensor.requires_grad_, _solve(T, self.cell.family.zero(leaves)))
        inputs, outputs = tensors_of(z), tensors_of(T(z))
        w = _double(self.cotangent)

        def adjoint_map(u: State) -> State:
            products = torch.autograd.grad(outputs, inputs, tensors_of(u), retain_graph=True)
            return map_state(torch.add, w, like(w, products))

        adjoint = tensors_of(_solve(adjoint_map, w))
        gradients = torch.autograd.grad(outputs, list(leaves.values()), adjoint)
        with torch.no_grad():
            active = (self.cell.family.units(leaves, z) > 0).double().mean().item()
        return Exact(_double(z), dict(zip(leaves, gradients, strict=True)), active)

    @cached_property
    def _map64(self) -> Map:
        leaves = {name: t.double() for name, t in self.tensors.items()}
        return self.cell.family.equation(leaves)


def _double(state: State) -> State:
    return map_state(lambda t: t.detach().double(), state)


def _flat(state: State) -> Tensor:
    """`(batch, n)`, the branches side by side."""
    return torch.cat([t.flatten(1) for t in tensors_of(state)], 1)


def _relative(image: State, z: State) -> Tensor:
    size = _flat(image).norm(dim=1)
    return (_flat(image) - _flat(z)).norm(dim=1) / size


def _solve(function: Callable[[State], State], start: State) -> State:
    z, _ = solve_fixed_point(function, start, Anderson(tol=0.1 * _EXACT, max_steps=2000, memory=10))
    # The solver is not taken at its word.
    residual = _relative(function(z), z).max().item()
    if not residual <= _EXACT:
        raise RuntimeError(f"The float64 reference has a residual of {residual:.1g} instead of {_EXACT:g}.")
    return map_state(Tensor.detach, z)
