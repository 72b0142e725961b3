"""The hidden variable of OptEq units as what is read from their equilibrium."""

from __future__ import annotations

from torch import nn

from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import DeepOptEq
from opteq.maps.hiddenvariable import HiddenReadoutEquation, with_hidden
from opteq.maps.multibranch import MOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.parallel import Parallel
from opteq.maps.regularised import Regularised
from opteq.results import State


class HiddenReadout(EquilibriumMap):
    """The equilibrium of an OptEq unit, read out as `y* = σ(W z* + U x + b)`, of which `z* = (1/μ) Wᵀ y*`.

    The two are the same equilibrium: `y*` solves `y = σ((1/μ) W Wᵀ y + U x + b)`, and is stationary for
    `OptEqEquation.hidden_objective` (Li et al. 2023, Eq. 4). But `z` is what `Wᵀ` leaves of it, and where few
    singular values of `W` stand out, what a classifier reads from `z` is little else than their directions.

    Of a deep map it is the `y` of the last unit, `σ(W_L z_{L-1} + U_L x + b_L)`, the last hidden layer of
    the feed-forward network that the units correspond to (Xie et al. 2022, §7); of branches the
    `y_i = σ(W_i h_i(z*) + U_i x + b_i)`, in which their hidden objective is written (Li et al. 2022, Eq. 5).

    State: that of the map. Readout: `y`, of shape `(batch, W.out_channels, ...)`, one for each branch.

    Args:
        map: an OptEq unit or a map of some: `DeepOptEq`, `Parallel`, `MOptEq`, or a `Regularised` one.

    Raises:
        ConfigError: for any other map.
    """

    def __init__(self, map: EquilibriumMap) -> None:
        super().__init__()
        _expect_units(map)
        self.map = map

    @property
    def title(self) -> str:
        return f"{self.map.title}, hidden variable"

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return self.map.injections

    def bind(self, x: State, error: float = 0.0) -> HiddenReadoutEquation:
        return HiddenReadoutEquation(with_hidden(self.map.bind(x, error)))


def _expect_units(map: object) -> None:
    if not isinstance(map, OptEqUnit | DeepOptEq | MOptEq | Parallel | Regularised):
        raise ConfigError(
            "Only OptEq units have a hidden variable to read, alone, deep, parallel, coupled or regularised;"
            f" got {type(map).__name__}."
        )
    if isinstance(map, Regularised):
        _expect_units(map.map)
    if isinstance(map, Parallel):
        for branch in map.maps:
            _expect_units(branch)
