"""The hidden variable of an OptEq unit as what is read from its equilibrium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from opteq.equation import Equation, Linearization, Reformulation, room
from opteq.maps.base import EquilibriumMap
from opteq.maps.optequnit import OptEqEquation, OptEqUnit
from opteq.options import check_kind
from opteq.results import Certificate, State


class HiddenReadout(EquilibriumMap):
    """The equilibrium of an OptEq unit, read out as `y* = σ(W z* + U x + b)`, of which `z* = (1/μ) Wᵀ y*`.

    The two are the same equilibrium: `y*` solves `y = σ((1/μ) W Wᵀ y + U x + b)`, and is stationary for
    `OptEqEquation.hidden_objective` (Li et al. 2023, Eq. 4). But `z` is what `Wᵀ` leaves of it, and where few
    singular values of `W` stand out, what a classifier reads from `z` is little else than their directions.

    State: `z`, of shape `(batch, W.in_channels, ...)`. Readout: `y`, of shape `(batch, W.out_channels, ...)`.

    Args:
        unit: the unit.

    Raises:
        ConfigError: if `unit` is no OptEq unit.
    """

    def __init__(self, unit: OptEqUnit) -> None:
        super().__init__()
        self.unit = check_kind(OptEqUnit, "unit", unit, "a unit such as OptEqUnit(W, U)")

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return self.unit.injections

    def bind(self, x: State, error: float = 0.0) -> HiddenReadoutEquation:
        return HiddenReadoutEquation(self.unit.bind(x, error))


@dataclass(frozen=True, eq=False)
class HiddenReadoutEquation(Equation[Tensor]):
    """`z = (1/μ) Wᵀ σ(W z + c)`, read out as `y = σ(W z + c)`."""

    inner: OptEqEquation

    @property
    def structure(self) -> str:
        return self.inner.structure

    def initial(self) -> Tensor:
        return self.inner.initial()

    def first_iterate(self) -> Tensor:
        return self.inner.first_iterate()

    def __call__(self, state: Tensor) -> Tensor:
        return self.inner(state)

    def readout(self, state: Tensor) -> Tensor:
        """`σ(W z + c)`."""
        return self.inner.hidden(state)

    def reformulate(self, gradient: bool = False) -> Reformulation[Tensor]:
        return self.inner.reformulate(gradient)

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        return self.inner.linearize(state)

    @property
    def objective(self) -> Callable[[Tensor], Tensor]:
        return self.inner.objective

    def contraction(self, state: Tensor | None = None) -> Certificate:
        return self.inner.contraction(state)

    def distance_bound(self, state: Tensor) -> Certificate:
        """`L_σ‖W‖` times that of `z`, since `‖y - y*‖ ≤ L_σ‖W (z - z*)‖`."""
        of_state, steepness = self.inner.distance_bound(state), self.inner.activation.lipschitz
        return replace(of_state, value=steepness * self.inner.W.norm_bound() * of_state.value)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        return self.inner.rates(pushes)

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        """`L_σ‖U‖ / (1 - L_σ‖W‖²/μ)`.

        With slopes `D` and `G = (1/μ) W Wᵀ` differentiating the equilibrium gives
        `dy = D^½ (I - D^½ G D^½)⁻¹ D^½ dc`.
        """
        push = next(pushes)
        pull = self.inner.rates(iter((push,)))[1]
        return self.inner.activation.lipschitz * push / room(pull)
