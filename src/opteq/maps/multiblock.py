"""The multi-block form of deep OptEq: one equation for the states of all units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import DeepOptEq
from opteq.options import check_kind
from opteq.results import Certificate, State, largest, squared_norm, tensors_of


class MultiBlockOptEq(EquilibriumMap):
    """`z̃ = αW̃ᵀσ(W̃Pz̃ + Ũx + b̃) + (1-α)Pz̃`, with the equilibria of a deep OptEq (Xie et al. 2022, Lemma 3).

    The state `z̃ = [z_1, …, z_{L-1}, z_0]` holds what every unit puts out, and the cyclic shift
    `(Pz̃)_i = z_{i-1}` hands each unit its predecessor's. (The printed Eq. 7 lacks the `P` inside `σ`.)

    Readout: the whole state, a tuple of `L` tensors; the last one is the deep model's `z*`.

    Args:
        deep: the deep OptEq, whose parameters it shares.

    Raises:
        ConfigError: if it is something else.
    """

    def __init__(self, deep: DeepOptEq) -> None:
        super().__init__()
        check_kind(DeepOptEq, "deep", deep, "a DeepOptEq")
        self.deep = deep

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return self.deep.injections

    def bind(self, x: State, error: float = 0.0) -> MultiBlockEquation:
        return MultiBlockEquation(self.deep.bind_units(x, error))


@dataclass(frozen=True, eq=False)
class MultiBlockEquation(Equation):
    """`z_i = f_i(z_{i-1})`, `i = 1 … L`, with `z_L` called `z_0`."""

    units: tuple[Equation[Tensor], ...]

    def initial(self) -> tuple[Tensor, ...]:
        # The block before unit i has the shape that unit i starts from.
        starts = tuple(unit.initial() for unit in self.units)
        return (*starts[1:], starts[0])

    def first_iterate(self) -> tuple[Tensor, ...]:
        return tuple(unit.first_iterate() for unit in self.units)

    def __call__(self, state: State) -> tuple[Tensor, ...]:
        return tuple(u(z) for u, z in zip(self.units, _shifted(state), strict=True))

    @property
    def objective(self) -> Callable[[State], Tensor] | None:
        """The objective of Corollary 1 at the feasible point `z̃ := T(z̃)`; None for three and more blocks.

        `F_1(z_1) + F_2(z_0) + ½‖z_1 - z_0‖²` with `f_i = prox_{F_i}`; at `p_i = f_i(z_{i-1})` the terms
        `F_i(p_i) = E_i(z_{i-1}) - ½‖z_{i-1} - p_i‖²` follow from the units' objectives.
        """
        return self._corollary1 if self._summable else None

    @property
    def _summable(self) -> bool:
        return len(self.units) <= 2 and all(unit.structure == "proximal" for unit in self.units)

    def _corollary1(self, state: State) -> Tensor:
        points = self(state)
        total = 0.5 * squared_norm(points[0] - points[-1])
        for unit, z, p in zip(self.units, _shifted(state), points, strict=True):
            assert unit.objective is not None
            total = total + unit.objective(z) - 0.5 * squared_norm(z - p)
        return total

    def contraction(self, state: State | None = None) -> Certificate:
        """The largest of the units' bounds: the Jacobian is block diagonal up to the shift."""
        places = [None] * len(self.units) if state is None else _shifted(state)
        bounds = [unit.contraction(z) for unit, z in zip(self.units, places, strict=True)]
        return largest(bounds)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        rates = [unit.rates(pushes) for unit in self.units]
        return math.hypot(*(push for push, _ in rates)), max(pull for _, pull in rates)

    def linearize(self, state: State) -> Linearization:
        places = zip(self.units, _shifted(state), strict=True)
        return _BlockLinearization([unit.linearize(z) for unit, z in places], self._summable)


class _BlockLinearization(Linearization):
    """`J = SP` with `S = diag(J_1, …, J_L)`."""

    def __init__(self, parts: list[Linearization[Tensor]], summable: bool) -> None:
        self._parts, self._summable = parts, summable

    @property
    def image(self) -> tuple[Tensor, ...]:
        return tuple(part.image for part in self._parts)

    @property
    def symmetric(self) -> SymmetricForm | None:
        if not self._summable or len(self._parts) != 2:
            return None
        # u_1 = g_1 + J_2 u_0 leaves u_0 = g_0 + J_1 u_1, see `eliminated`; the first block of v stays zero.
        first, second = self._parts

        def on_second(product: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
            return lambda v: (torch.zeros_like(tensors_of(v)[0]), product(tensors_of(v)[1]))

        def enter(g: State) -> State:
            g_1, g_0 = tensors_of(g)
            return torch.zeros_like(g_1), g_0 + first.jvp(g_1)

        def leave(v: State, g: State) -> State:
            v_0 = tensors_of(v)[1]
            return tensors_of(g)[0] + second.jvp(v_0), v_0

        return SymmetricForm(on_second(first.jvp), enter, leave, metric=on_second(second.jvp))

    def jvp(self, tangent: State) -> tuple[Tensor, ...]:
        return tuple(part.jvp(v) for part, v in zip(self._parts, _shifted(tangent), strict=True))

    def vjp(self, cotangent: State) -> tuple[Tensor, ...]:
        first, *others = (part.vjp(u) for part, u in zip(self._parts, tensors_of(cotangent), strict=True))
        return (*others, first)

    def pullback(self, cotangent: State) -> Gradients:
        pairs = zip(self._parts, tensors_of(cotangent), strict=True)
        return tuple(gradient for part, u in pairs for gradient in part.pullback(u))


def _shifted(state: State) -> tuple[Tensor, ...]:
    """`P z̃`: what each unit receives."""
    blocks = tensors_of(state)
    return (blocks[-1], *blocks[:-1])
