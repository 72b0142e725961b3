"""A map of one's own that gives something else than its state, by itself and within other maps."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from opteq import (
    AffineChange,
    Anderson,
    EquilibriumLayer,
    MoreauSkip,
    Parallel,
    Regularised,
    SquaredNorm,
    certify,
)
from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap
from opteq.results import Certificate
from opteq.theory.lipschitz import equilibrium_lipschitz
from tests.conformance.reference import random


@dataclasses.dataclass(frozen=True, eq=False)
class HalvedEquation(Equation[Tensor]):
    """`z = ½z + c`, hence `z* = 2c`, of which `5z` is read out."""

    c: Tensor

    def initial(self) -> Tensor:
        return torch.zeros_like(self.c)

    def __call__(self, state: Tensor) -> Tensor:
        return 0.5 * state + self.c

    def readout(self, state: Tensor) -> Tensor:
        return 5 * state

    def contraction(self, state: Tensor | None = None) -> Certificate:
        return Certificate(torch.full((len(self.c),), 0.5, dtype=torch.float64), "bound")

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        return next(pushes), 0.5


class Halved(EquilibriumMap):
    injections = (nn.Identity(),)

    def bind(self, x, error: float = 0.0) -> HalvedEquation:
        return HalvedEquation(x)


def value(map: EquilibriumMap, x: Tensor):
    return EquilibriumLayer(map, Anderson(tol=1e-12))(x)


def test_what_wraps_a_map_reads_out_what_it_does():
    x = random(2, 3)
    torch.testing.assert_close(value(Halved(), x), 10 * x)
    torch.testing.assert_close(value(MoreauSkip(Halved(), 0.4), x), 10 * x)
    torch.testing.assert_close(value(Parallel([Halved()]), x)[0], 10 * x)
    # z = ½·½z + c
    torch.testing.assert_close(value(Regularised(Halved(), SquaredNorm(), 0.5), x), 5 * 4 / 3 * x)


@pytest.mark.spec("R1.5")
def test_what_is_read_out_is_nothing_that_an_affine_change_is_of():
    with pytest.raises(ConfigError, match="HalvedEquation reads out something else than its state"):
        value(AffineChange(Halved(), torch.eye(3).double()), random(2, 3))


@pytest.mark.spec("R1.1")
def test_bounds_of_the_state_are_not_taken_for_those_of_what_is_read_out():
    x = random(2, 3)
    for map in (
        Halved(),
        MoreauSkip(Halved(), 0.4),
        Regularised(Halved(), SquaredNorm(), 0.5),
        Parallel([Halved()]),
    ):
        # ‖z*‖ = 2‖x‖, but 10‖x‖ is given.
        with pytest.raises(ConfigError, match="give it an `equilibrium_lipschitz`"):
            equilibrium_lipschitz(map, x)
        with pytest.raises(ConfigError, match="give it a `distance_bound`"):
            certify(EquilibriumLayer(map), x)
