"""What perturbations of the features do to the hidden objective."""

import pytest
import torch
from torch import nn

from opteq import (
    Anderson,
    Conv2d,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    HeritageDiversity,
    MOptEq,
    OptEqUnit,
    Parallel,
)
from opteq.errors import ConfigError
from opteq.theory.perturbations import binomial, reconstructed, reconstruction_bound, uniform
from tests.conformance.instances import seeded
from tests.conformance.reference import random
from tests.maps.branches import branch_units

EXACT = Anderson(tol=1e-12, max_steps=2000)


def layer_of(seed: int, image: bool, activation: str = "relu") -> EquilibriumLayer:
    """A unit with `‖W‖` and `‖U‖` at 0.9 and 1."""
    build = (lambda: (Conv2d(2, 4), Conv2d(3, 4))) if image else (lambda: (Dense(5, 7), Dense(6, 7)))
    unit = seeded(lambda: OptEqUnit(*build(), activation, max_norm=0.9), seed)
    domain = (3, 4, 4) if image else (6,)
    with torch.no_grad():
        unit.W.weights[0].mul_(5)
        U = unit.injection.operator
        U.weights[0].div_(U.eval().norm(domain))
        unit.injection.bias.copy_(random(len(unit.injection.bias), seed=seed))
    return EquilibriumLayer(unit.eval(), EXACT, on_unconverged="raise")


def inputs(image: bool, batch: int, seed: int) -> torch.Tensor:
    return random(batch, *((3, 4, 4) if image else (6,)), seed=seed) * 10 ** (seed % 3 - 1)


def hidden(layer: EquilibriumLayer, x: torch.Tensor) -> torch.Tensor:
    equation = layer.map.bind(x)
    return equation.activation(equation.preactivation(layer(x))).detach()


def slope(layer: EquilibriumLayer, x: torch.Tensor) -> torch.Tensor:
    """`Uᵀy` at the equilibrium."""
    return layer.map.injection.operator.bind(tuple(x.shape[1:])).adjoint(hidden(layer, x))


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.spec("R5.4")
def test_the_reconstruction_is_the_sign_of_the_adjoint(image: bool):
    layer, x = layer_of(0, image), inputs(image, 4, 1)
    expected = slope(layer, x).sign()
    torch.testing.assert_close(reconstructed(layer, x, 0.2), 0.2 * expected, rtol=0, atol=0)


@pytest.mark.spec("R5.4")
def test_the_reconstruction_of_branches_adds_their_adjoints():
    units = branch_units((4, 2), 3, (3, 4))
    layer, x = EquilibriumLayer(Parallel(units), EXACT), random(2, 3, 4, 4)
    alone = [EquilibriumLayer(unit, EXACT) for unit in units]
    total = sum(slope(a, x) for a in alone)
    torch.testing.assert_close(reconstructed(layer, x, 0.2), 0.2 * total.sign())


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.spec("R5.4", "R5.7")
def test_no_direction_raises_the_objective_more(coupled: bool):
    units = branch_units((4, 2), 3, (3, 4), "softplus")
    module = MOptEq(units, HeritageDiversity(0.1, tau=0.1)) if coupled else units[0]
    layer, x, size = EquilibriumLayer(module.eval(), EXACT), random(3, 3, 4, 4), 1e-3

    def rise(delta):
        with torch.no_grad():
            values = [module.bind(x - d).objective(layer(x - d)) for d in (delta, 0 * delta)]
        return values[0] - values[1]

    best = rise(reconstructed(layer, x, size))
    assert (best > 0).all()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        for other in (uniform(x, size, generator), binomial(x, size, generator)):
            assert (rise(other) < 0.7 * best).all()


@pytest.mark.spec("R5.4")
def test_proposition_2_holds_for_a_thousand_instances():
    positive = 0
    for seed in range(40):
        image, activation = seed % 2 == 0, ("relu", "tanh", "softplus", "elu")[seed // 2 % 4]
        layer, x = layer_of(seed, image, activation), inputs(image, 25, seed)
        size = 10.0 ** -(seed % 4)
        bound = reconstruction_bound(layer, x, size)
        moved = x - reconstructed(layer, x, size)
        with torch.no_grad():
            star, other = layer(x), layer(moved)
            rise = layer.map.bind(moved).objective(other) - layer.map.bind(x).objective(star)
        shift = x[0].numel() ** 0.5 * size * (other - star).flatten(1).norm(dim=1)
        assert (torch.maximum(rise, shift) >= bound - 1e-9).all()
        # The formula, with the adjoint of the operator itself.
        adjoint = slope(layer, x).flatten(1)
        expected = 0.5 * (size * adjoint.abs().sum(1) - adjoint.shape[1] * size**2)
        torch.testing.assert_close(bound, expected.detach(), rtol=1e-9, atol=1e-11)
        positive += int((bound > 0).sum())
    assert positive > 500  # elsewhere it says nothing


def test_random_perturbations():
    x = random(4, 3, 50, 50)
    for function in (uniform, binomial):
        delta = function(x, 0.3, torch.Generator().manual_seed(1))
        assert delta.shape == x.shape
        assert delta.dtype == x.dtype
        assert delta.abs().max() <= 0.3
        assert abs(delta.mean()) < 0.01
        assert torch.equal(delta, function(x, 0.3, torch.Generator().manual_seed(1)))
    assert set(binomial(x, 0.5).unique().tolist()) == {-0.5, 0.5}
    assert uniform(x, 0.3).std().item() == pytest.approx(0.3 / 3**0.5, rel=0.02)


def test_what_has_no_bound_says_so():
    x = inputs(False, 2, 0)
    steep = layer_of(0, False)
    with torch.no_grad():
        steep.map.injection.operator.weights[0].mul_(2)
    other = EquilibriumLayer(OptEqUnit(Dense(5, 7), nn.Linear(6, 7)).double())
    for layer, message in [
        (steep, r"‖U‖ ≤ 1, got 2; scale `U` down"),
        (other, "opteq operator as `U`"),
        (EquilibriumLayer(OptEqUnit(Dense(5, 7), Dense(6, 7), mu=2).double()), "OptEqUnit with mu=1"),
        (EquilibriumLayer(Parallel([steep.map])), "OptEqUnit with mu=1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            reconstruction_bound(layer, x, 0.1)
    units = [OptEqUnit(Dense(5, 7), Dense(6, 7)).double() for _ in range(3)]
    with pytest.raises(ConfigError, match="DeepOptEq has no scalar objective"):
        reconstructed(EquilibriumLayer(DeepOptEq(units)), x, 0.1)
