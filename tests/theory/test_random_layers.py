"""Some of the layers of `random_layers`, and whether it would see a bound that does not hold."""

from dataclasses import replace

import pytest

from opteq.equation import Equation
from opteq.maps.optequnit import OptEqEquation
from opteq.theory import robustness
from tests.theory.random_layers import attack, drawn


@pytest.mark.spec("R1.1", "R1.5", "R2.1", "R5.5", "R6.4")
def test_nothing_that_is_certified_of_random_layers_is_broken():
    outcomes, violations = attack(12, seed=0)
    assert violations == []
    assert {"distance", "lipschitz", "radius"} <= set(outcomes)


def plain_units(count):
    """Seeds of units with a linear activation and nothing done to them, whose bounds are nearly attained."""
    wanted = (
        s
        for s in range(10_000)
        if drawn(s)[2] == ("unit", "bare") and repr(drawn(s)[1].activation) == "Identity()"
    )
    return [next(wanted) for _ in range(count)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bounds_that_are_too_small_are_seen(monkeypatch):
    seeds = plain_units(3)
    distance, lipschitz, radius = (
        Equation.distance_bound,
        OptEqEquation.equilibrium_lipschitz,
        robustness.lipschitz_bound,
    )

    def shrunk(bound, factor):
        return replace(bound, value=bound.value * factor)

    monkeypatch.setattr(Equation, "distance_bound", lambda e, z: shrunk(distance(e, z), 0.02))
    monkeypatch.setattr(OptEqEquation, "equilibrium_lipschitz", lambda e, pushes: 0.02 * lipschitz(e, pushes))
    monkeypatch.setattr(robustness, "lipschitz_bound", lambda *args: shrunk(radius(*args), 0.02))
    seen = " ".join(text for seed in seeds for text in attack(1, seed)[1])
    for part in ("distance of torch.float", "Lipschitz bound", "inside the robust radius"):
        assert part in seen
