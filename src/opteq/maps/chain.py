"""Equations made by applying several maps one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm, eliminated, with_tensors_of
from opteq.results import Certificate, State, combined


@dataclass(frozen=True, eq=False)
class ChainEquation(Equation):
    """`z = f_L(⋯f_1(z))` for single-tensor states, each `f_l` the map of an equation.

    A chain of two has a scalar objective if `f_1` is conservative and `f_2` proximal: with
    `f_2 = prox_{F_2}` and `∇E_1 = z - f_1(z)` (`E_1` is the Moreau envelope of `F_1` if `f_1 = prox_{F_1}`)
    equilibria minimise

        E_1(z) + F_2(z)

    (Xie et al. 2022, Corollary 1, minimised over its first block). Chains of three and more have none.

    Attributes:
        units: the equations, first to last.
        start: initial state; None for that of the first unit.
    """

    units: tuple[Equation, ...]
    start: Tensor | None = None

    @property
    def has_energy(self) -> bool:
        if len(self.units) == 1:
            return self.units[0].has_energy
        return len(self.units) == 2 and self.units[0].conservative and self.units[1].proximal

    @property
    def conservative(self) -> bool:
        return len(self.units) == 1 and self.units[0].conservative

    @property
    def proximal(self) -> bool:
        return len(self.units) == 1 and self.units[0].proximal

    @property
    def batch_coupled(self) -> bool:
        return any(unit.batch_coupled for unit in self.units)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        # The start belongs here because the iterates of an unrolled solve depend on it.
        start = () if self.start is None else (self.start,)
        return (*(t for unit in self.units for t in unit.tensors), *start)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        units, rest = with_tensors_of(self.units, tensors)
        return replace(self, units=units, start=None if self.start is None else rest[0])

    def initial(self) -> State:
        return self.units[0].initial() if self.start is None else self.start

    def first_iterate(self) -> State:
        if self.start is not None:
            return self(self.start)
        return self._apply(self.units[1:], self.units[0].first_iterate())

    def __call__(self, state: State) -> State:
        return self._apply(self.units, state)

    def blocks(self, state: Tensor) -> tuple[Tensor, ...]:
        """`[z_1, …, z_{L-1}, z_0]` with `z_l = f_l(z_{l-1})`, the state of the multi-block form at `z_0`."""
        blocks, z = [], state
        for unit in self.units[:-1]:
            image = unit(z)
            assert isinstance(image, Tensor)
            blocks.append(z := image)
        return (*blocks, state)

    def energy(self, state: State) -> Tensor:
        """`(batch,)` objective at the feasible point `p = T(z)`, for chains of one or two units.

        With `v = f_1(z)` it is `F_2(f_2(v)) + E_1(p)`, `F_2(f_2(v)) = E_2(v) - ½‖v - f_2(v)‖²`, which
        needs no inner solve.

        Raises:
            NotImplementedError: for longer chains, which have no scalar objective.
        """
        if not self.has_energy:
            raise NotImplementedError(
                f"A chain of {len(self.units)} such maps has no scalar objective; see"
                " opteq.theory.deep.theorem2_residual for what vanishes at its equilibrium."
            )
        if len(self.units) == 1:
            return self.units[0].energy(state)
        first, second = self.units
        v = first(state)
        p = second(v)
        assert isinstance(v, Tensor)
        assert isinstance(p, Tensor)
        return second.energy(v) - 0.5 * (v - p).square().flatten(1).sum(1) + first.energy(p)

    def contraction(self, state: State | None = None) -> Certificate:
        """The product of the units' bounds, at a state along the path from it."""
        bounds = []
        for unit in self.units:
            bounds.append(unit.contraction(state))
            state = None if state is None else unit(state)
        value = bounds[0].value
        for bound in bounds[1:]:
            value = value * bound.value
        return combined(bounds, value)

    def linearize(self, state: State) -> Linearization:
        return self.value_and_linearization(state)[1]

    def value_and_linearization(self, state: State) -> tuple[State, Linearization]:
        parts = []
        for unit in self.units:
            state, linearization = unit.value_and_linearization(state)
            parts.append(linearization)
        return state, _ChainLinearization(self, parts)

    def gradient_map(self) -> tuple[Callable[[State], State], float]:
        return (self, 1.0) if self.proximal else super().gradient_map()

    @staticmethod
    def _apply(units: Sequence[Equation], state: State) -> State:
        for unit in units:
            state = unit(state)
        return state


class _ChainLinearization(Linearization):
    """`J = J_L ⋯ J_1`."""

    def __init__(self, equation: ChainEquation, parts: list[Linearization]) -> None:
        self._parts, self._has_start = parts, equation.start is not None
        if len(parts) == 1:
            self.structure = parts[0].structure
        elif equation.has_energy:
            self.structure = "symmetrizable"

    @property
    def symmetric(self) -> SymmetricForm | None:
        if len(self._parts) == 1:
            return self._parts[0].symmetric
        return None if self.structure == "none" else eliminated(self._parts[0].jvp, self._parts[1].jvp)

    def jvp(self, tangent: State) -> State:
        for part in self._parts:
            tangent = part.jvp(tangent)
        return tangent

    def vjp(self, cotangent: State) -> State:
        for part in reversed(self._parts):
            cotangent = part.vjp(cotangent)
        return cotangent

    def pullback(self, cotangent: State) -> Gradients:
        gradients: Gradients = (None,) if self._has_start else ()
        for part in reversed(self._parts[1:]):
            own, cotangent = part.pullback_and_vjp(cotangent)
            gradients = own + gradients
        return self._parts[0].pullback(cotangent) + gradients
