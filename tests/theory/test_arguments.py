"""Questions about the wrong things are answered with a sentence that says what is wrong."""

import math

import pytest
import torch
from torch import nn

from opteq import Dense, EquilibriumLayer, OptEqUnit, certify, robust_radius
from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.theory.lipschitz import equilibrium_lipschitz, lipschitz_bound, published_lipschitz
from opteq.theory.minimisers import equilibrium_kind
from opteq.theory.perturbations import binomial, reconstructed, reconstruction_bound, uniform
from opteq.theory.proximal import check_proximal
from tests.conformance.reference import random


def layer() -> EquilibriumLayer:
    return EquilibriumLayer(OptEqUnit(Dense(4, 6), Dense(3, 6)).double()).eval()


OF_LAYERS = {
    "certify": certify,
    "equilibrium_kind": equilibrium_kind,
    "published_lipschitz": published_lipschitz,
    "reconstructed": lambda layer, x: reconstructed(layer, x, 0.1),
    "reconstruction_bound": lambda layer, x: reconstruction_bound(layer, x, 0.1),
}


@pytest.mark.parametrize("ask", OF_LAYERS.values(), ids=OF_LAYERS)
def test_what_is_asked_of_a_layer_is_asked_of_nothing_else(ask):
    for other, name in ((layer().map, "OptEqUnit"), (nn.Linear(3, 4), "Linear"), (None, "NoneType")):
        with pytest.raises(ConfigError, match=f"Expected an EquilibriumLayer, got {name}; ask about a layer"):
            ask(other, random(2, 3))


def test_the_images_of_a_network_are_not_what_a_layer_inside_it_reads():
    said = r"Expected `x` of shape .*\(2, 5\)\. A layer inside a network takes what enters it there"
    with pytest.raises(ShapeError, match=said):
        certify(layer(), random(2, 5))


def test_what_is_asked_of_a_map_is_asked_of_nothing_else():
    for other in (layer(), nn.Linear(3, 4), None):
        with pytest.raises(ConfigError, match="Expected `map` to be an equilibrium map such as OptEqUnit"):
            equilibrium_lipschitz(other, random(2, 3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="No Lipschitz constant is known for OptEqUnit"):
        robust_radius(layer().map, random(2, 3))


def test_a_bound_needs_nothing_but_the_shape_of_an_input():
    module, x = layer(), random(2, 3)
    expected = lipschitz_bound(module, x).value
    for same in (x.float(), x.half(), (x > 0), x.long(), x[:0]):
        assert lipschitz_bound(module, same).value == expected
        assert equilibrium_lipschitz(module.map, same).value == expected


def test_inputs_of_bounds_are_batches_that_fit():
    module = layer()
    for x, got in ((None, "NoneType"), ("x", "str"), (torch.tensor(1.0), r"\(\)"), ((), "tuple")):
        for ask in (lambda x: lipschitz_bound(module, x), lambda x: equilibrium_lipschitz(module.map, x)):
            with pytest.raises(ShapeError, match=rf"`x` to be a tensor of shape \(batch, ...\), got {got}"):
                ask(x)
    for x, got in (
        (random(2, 5), r"\(1, 5\)"),
        (random(2, 3, 4, 4), r"\(1, 3, 4, 4\)"),
        ((random(2, 3),) * 2, "tuple"),
    ):
        with pytest.raises(ShapeError, match=rf"Expected `x` of shape \(batch, 3\), got {got}"):
            equilibrium_lipschitz(module.map, x)


def test_inputs_that_are_not_finite_have_no_radius():
    # The logits are ±∞, and nothing finite would change which is larger.
    classifier = nn.Sequential(nn.Linear(1, 2, bias=False))
    classifier[0].weight.data.copy_(torch.tensor([[1.0], [-1.0]]))
    for value in (math.inf, math.nan):
        with pytest.raises(NonFiniteError, match="Expected finite inputs"):
            robust_radius(classifier, torch.tensor([[1.0], [value]]))


def test_an_empty_batch_has_no_equilibria():
    assert (
        str(equilibrium_kind(layer(), random(0, 3))) == "The batch is empty, and so there are no equilibria."
    )


@pytest.mark.parametrize("size", [-0.1, math.nan, math.inf, "much", None])
def test_perturbations_have_a_size(size):
    module, x = layer(), random(2, 3)
    for ask in (uniform, binomial, lambda x, size: reconstructed(module, x, size)):
        with pytest.raises(ConfigError, match="Expected `size` to be at least 0 and finite"):
            ask(x, size)
    with pytest.raises(ConfigError, match="Expected `size` to be at least 0 and finite"):
        reconstruction_bound(module, x, size)


@pytest.mark.spec("R2.7")
def test_a_constant_map_is_a_proximal_operator():
    # That of the indicator of a point.
    assert check_proximal(lambda z: torch.ones_like(z), random(2, 3)).is_proximal.all()


@pytest.mark.spec("R2.7")
def test_points_of_the_checker_are_floating_point_batches():
    for points in (random(3), torch.arange(6).view(2, 3)):
        with pytest.raises(ShapeError, match="in floating-point numbers"):
            check_proximal(lambda z: z, points)
    with pytest.raises(ConfigError, match="Expected `points` to be a tensor"):
        check_proximal(lambda z: z, [[1.0]])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"keeps the shape .* got tuple"):
        check_proximal(lambda z: (z, z), random(2, 3))  # type: ignore[arg-type, return-value]
    with pytest.raises(NonFiniteError, match="Jacobian of the map has NaN"):
        check_proximal(lambda z: z * math.nan, random(2, 3))
