"""Equations made by applying several maps one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import repeat

from torch import Tensor

from opteq.equation import Equation, Gradients, Linearization, Reformulation, SymmetricForm, eliminated
from opteq.maps.hiddenvariable import HiddenVariable, with_hidden
from opteq.results import Certificate, State, combined, largest, squared_norm

Rates = Callable[[Iterator[float]], tuple[float, float]]


@dataclass(frozen=True, eq=False)
class ChainEquation(HiddenVariable[Tensor]):
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

    units: tuple[Equation[Tensor], ...]
    # With the tensors, because the iterates of an unrolled solve depend on it.
    start: Tensor | None = None

    @property
    def structure(self) -> str:
        return self.units[0].structure if len(self.units) == 1 else "none"

    @property
    def batch_coupled(self) -> bool:
        return any(unit.batch_coupled for unit in self.units)

    def initial(self) -> Tensor:
        return self.units[0].initial() if self.start is None else self.start

    def first_iterate(self) -> Tensor:
        if self.start is not None:
            return self(self.start)
        return self._apply(self.units[1:], self.units[0].first_iterate())

    def __call__(self, state: Tensor) -> Tensor:
        return self._apply(self.units, state)

    def blocks(self, state: Tensor) -> tuple[Tensor, ...]:
        """`[z_1, …, z_{L-1}, z_0]` with `z_l = f_l(z_{l-1})`, the state of the multi-block form at `z_0`."""
        blocks, z = [], state
        for unit in self.units[:-1]:
            image = unit(z)
            blocks.append(z := image)
        return (*blocks, state)

    def reformulate(self, gradient: bool = False) -> Reformulation[Tensor]:
        if len(self.units) == 1 and self.start is None:
            return self.units[0].reformulate(gradient)
        return super().reformulate(gradient)

    @property
    def objective(self) -> Callable[[Tensor], Tensor] | None:
        """The objective of the units at the feasible point `p = T(z)`, for chains of one or two.

        With `v = f_1(z)` it is `F_2(f_2(v)) + E_1(p)`, `F_2(f_2(v)) = E_2(v) - ½‖v - f_2(v)‖²`, which
        needs no inner solve. None for longer chains; see `opteq.theory.theorem2` for what vanishes at their
        equilibria.
        """
        if len(self.units) == 1:
            return self.units[0].objective
        return self._sum_of_two if self._summable else None

    @property
    def _summable(self) -> bool:
        structures = [unit.structure for unit in self.units]
        return len(structures) == 2 and structures[0] != "none" and structures[1] == "proximal"

    def _sum_of_two(self, state: Tensor) -> Tensor:
        first, second = self.units
        assert first.objective is not None
        assert second.objective is not None
        v = first(state)
        p = second(v)
        return second.objective(v) - 0.5 * squared_norm(v - p) + first.objective(p)

    def curvature(self, state: Tensor | None = None) -> Certificate:
        """The larger one of two units: `E_1 + F_2` is convex if both of their Jacobians are at most 1."""
        if len(self.units) > 1 and not self._summable:
            return super().curvature(state)
        parts = []
        for unit in self.units:
            parts.append(unit.curvature(state))
            state = None if state is None else unit(state)
        return largest(parts)

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """The product of the units' bounds, at a state along the path from it."""
        bounds = []
        for unit in self.units:
            bounds.append(unit.contraction(state))
            state = None if state is None else unit(state)
        return combined(bounds, reduce(Tensor.mul, [bound.value for bound in bounds]))

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        return _composed([unit.rates for unit in self.units], pushes)

    def hidden(self, state: Tensor) -> State:
        """That of the last unit, at what the others make of `z`."""
        return with_hidden(self.units[-1]).hidden(self._apply(self.units[:-1], state))

    def hidden_rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        *others, last = self.units
        return _composed([*(unit.rates for unit in others), with_hidden(last).hidden_rates], pushes)

    def hidden_distance_bound(self, state: Tensor) -> Certificate:
        """That of `z` times the bounds of the units before the last, and what its own `y` follows."""
        *others, last = self.units
        steepness = with_hidden(last).hidden_rates(repeat(0.0))[1]
        parts = [self.distance_bound(state), *(unit.contraction() for unit in others)]
        return combined(parts, steepness * reduce(Tensor.mul, [part.value for part in parts]))

    def readout(self, state: Tensor) -> Tensor:
        """That of the last unit, whose image the state is."""
        return self.units[-1].readout(state)

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        parts: list[Linearization[Tensor]] = []
        for unit in self.units:
            parts.append(unit.linearize(parts[-1].image if parts else state))
        return _ChainLinearization(parts, self.start is not None, self._summable)

    @staticmethod
    def _apply(units: Sequence[Equation[Tensor]], state: Tensor) -> Tensor:
        for unit in units:
            state = unit(state)
        return state


def _composed(rates: Sequence[Rates], pushes: Iterator[float]) -> tuple[float, float]:
    """The Lipschitz constants of functions applied in turn, of which each reads the input as well."""
    push, pull = 0.0, 1.0
    for of_unit in rates:
        own, step = of_unit(pushes)
        push, pull = step * push + own, step * pull
    return push, pull


class _ChainLinearization(Linearization[Tensor]):
    """`J = J_L ⋯ J_1`."""

    def __init__(self, parts: list[Linearization[Tensor]], has_start: bool, summable: bool) -> None:
        self._parts, self._has_start, self._summable = parts, has_start, summable

    @property
    def image(self) -> Tensor:
        return self._parts[-1].image

    @property
    def symmetric(self) -> SymmetricForm[Tensor] | None:
        first, *others = self._parts
        if others:
            return eliminated(first.jvp, others[0].jvp) if self._summable else None
        form = first.symmetric
        if form is None or form.pullback is None or not self._has_start:
            return form
        pullback = form.pullback
        return replace(form, pullback=lambda v, g: (*pullback(v, g), None))

    def jvp(self, tangent: Tensor) -> Tensor:
        for part in self._parts:
            tangent = part.jvp(tangent)
        return tangent

    def vjp(self, cotangent: Tensor) -> Tensor:
        for part in reversed(self._parts):
            cotangent = part.vjp(cotangent)
        return cotangent

    def pullback(self, cotangent: Tensor) -> Gradients:
        gradients: Gradients = (None,) if self._has_start else ()
        for part in reversed(self._parts[1:]):
            own, cotangent = part.pullback_and_vjp(cotangent)
            gradients = own + gradients
        return self._parts[0].pullback(cotangent) + gradients
