"""Wide OptEq: several units side by side on one state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm, symmetric_psd
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import check_units
from opteq.maps.optequnit import OptEqEquation, OptEqLinearization, OptEqUnit
from opteq.results import Certificate, State, combined


class WideOptEq(EquilibriumMap):
    """`T(z) = (1/L) Σ W_iᵀσ(W_i z + U_i x + b_i)` (Xie et al. 2022, Theorem 3).

    Its equilibrium is the limit for `α → 0` of that of the `DeepOptEq` with the same units, and
    minimises `Σ M¹_{φ_i}(z) = Σ Q_i(z)`. State and readout: `z`.

    Args:
        units: the units; their `W` have the same input channels.

    Raises:
        ConfigError: for no units, or units of different state channels.
    """

    def __init__(self, units: Sequence[OptEqUnit]) -> None:
        super().__init__()
        check_units(units)
        # A ModuleList does not say what it holds.
        self.units: list[OptEqUnit] = nn.ModuleList(units)  # type: ignore[assignment]

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return tuple(operator for unit in self.units for operator in unit.injections)

    def bind(self, x: State, error: float = 0.0) -> MeanEquation:
        return MeanEquation(tuple(unit.bind(x, error) for unit in self.units))


@dataclass(frozen=True, eq=False)
class MeanEquation(Equation[Tensor]):
    """`z = (1/L) Σ T_i(z)` for proximal operators `T_i`; so is their mean."""

    units: tuple[OptEqEquation, ...]

    @property
    def structure(self) -> str:
        return "proximal"

    def initial(self) -> Tensor:
        return self.units[0].initial()

    def first_iterate(self) -> Tensor:
        return _mean([unit.first_iterate() for unit in self.units])

    def __call__(self, state: Tensor) -> Tensor:
        return _mean([unit(state) for unit in self.units])

    @property
    def objective(self) -> Callable[[Tensor], Tensor]:
        """`(1/L) Σ Q_i(z)`, the objective of Theorem 3 divided by `L`; its gradient is `z - T(z)`."""
        return lambda state: _mean([unit.objective(state) for unit in self.units])

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """The mean of the units' bounds."""
        bounds = [unit.contraction(state) for unit in self.units]
        return combined(bounds, _mean([bound.value for bound in bounds]))

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        """The means of the units' rates."""
        rows = [unit.rates(pushes) for unit in self.units]
        pushed, pulled = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        return pushed, pulled

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        return _MeanLinearization([unit.linearize(state) for unit in self.units])


class _MeanLinearization(Linearization[Tensor]):
    """`J = (1/L) Σ J_i`: symmetric, positive semidefinite."""

    def __init__(self, parts: list[OptEqLinearization]) -> None:
        self._parts = parts

    @property
    def image(self) -> Tensor:
        return _mean([part.image for part in self._parts])

    @property
    def symmetric(self) -> SymmetricForm[Tensor] | None:
        return symmetric_psd(self.jvp)

    def jvp(self, tangent: Tensor) -> Tensor:
        return _mean([part.jvp(tangent) for part in self._parts])

    def vjp(self, cotangent: Tensor) -> Tensor:
        return self.jvp(cotangent)

    def pullback(self, cotangent: Tensor) -> Gradients:
        share = cotangent / len(self._parts)
        return tuple(gradient for part in self._parts for gradient in part.pullback(share))


def _mean(states: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, states) / len(states)
