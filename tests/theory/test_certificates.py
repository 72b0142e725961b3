import math

import numpy as np
import pytest
import torch

from opteq import (
    AffineChange,
    Anderson,
    Conv2d,
    Decorrelation,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    LinearMixing,
    Nesterov,
    OptEqUnit,
    Parallel,
    Patches,
    Regularised,
    Unrolled,
    certify,
    from_feedforward,
)
from opteq.errors import ConfigError, NonFiniteError
from opteq.maps.optequnit import OptEqEquation
from opteq.results import norm
from tests.conformance.reference import random
from tests.networks import preset_network


def optequnit():
    unit = OptEqUnit(Dense(7, 9), Dense(5, 9), max_norm=0.95)
    unit.W.weight.data *= 10
    return unit, (5,)


def convolutional_optequnit():
    unit = OptEqUnit(Conv2d(3, 4), Conv2d(2, 4), activation="softplus", mu=1.5, max_norm=1.2)
    unit.W.weight.data *= 10
    return unit, (2, 5, 6)


def gaussian():
    unit = GaussianMap(Dense(7, 9), Dense(5, 9), gamma=0.05, max_norm=0.98)
    unit.W.weight.data *= 10
    return unit, (5,)


def gaussian_with_patches():
    unit = GaussianMap(Conv2d(3, 4), Conv2d(2, 4), Patches(2, 2), hidden=6, max_norm=0.9)
    unit.W.weight.data *= 10
    return unit, (2, 4, 6)


def deep():
    units = [OptEqUnit(Dense(7, n), Dense(5, n), max_norm=0.9) for n in (4, 9, 6)]
    for unit in units:
        unit.W.weight.data *= 10
    return DeepOptEq(units), (5,)


MAPS = [optequnit, convolutional_optequnit, gaussian, gaussian_with_patches, deep]


def long_iteration(equation):
    z = equation.initial()
    for _ in range(3000):
        z = equation(z)
    return z


@pytest.mark.spec("R1.1", "R1.3", "R6.4")
@pytest.mark.parametrize("make", MAPS)
@pytest.mark.parametrize("options", [{"solver": Anderson(tol=1e-2)}, {"gradient": Unrolled(3)}])
def test_the_distance_bound_holds_and_is_not_idle(make, options):
    torch.manual_seed(0)
    equilibrium_map, shape = make()
    x = torch.randn(6, *shape)
    layer = EquilibriumLayer(equilibrium_map, **options).eval()
    certificate = certify(layer, x)
    assert torch.equal(certificate.state, layer(x))

    # Everything once more in float64.
    z = certificate.state.double()
    equation = equilibrium_map.double().bind(x.double()).detach()
    equilibrium = long_iteration(equation)
    distance = (z - equilibrium).flatten(1).norm(dim=1)
    image = equation(z)
    residual = (image - z).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)

    torch.testing.assert_close(certificate.residual, residual, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(certificate.distance_to_reference.value, distance, rtol=1e-4, atol=1e-9)
    assert (certificate.contraction.value < 1).all()
    assert certificate.distance.kind == "bound"
    assert certificate.distance_to_reference.kind == "estimate"
    assert certificate.distance_to_reference.assumptions == ("The reference is the equilibrium.",)
    assert (distance <= certificate.distance.value).all()
    assert (certificate.distance.value <= 60 * distance).all()
    if make is deep:
        assert certificate.objective is None
    else:
        torch.testing.assert_close(certificate.objective, equation.objective(z), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(certificate.objective_at_reference, equation.objective(equilibrium))
        assert (certificate.objective >= certificate.objective_at_reference - 1e-12).all()


@pytest.mark.spec("R1.3", "R1.6")
@pytest.mark.parametrize(("steps", "seed"), [(0, 4), (8, 6)])
def test_the_equilibria_of_a_preset_with_3072_numbers_are_certified(steps, seed):
    torch.manual_seed(seed)
    network = preset_network("cifar10-small")
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    (layer,) = network.eval().equilibrium_layers
    features = network.stem(images[:3])
    # So near to 1 that the Fourier bound of W is above it.
    unit = layer.map
    assert unit.W.bind((48, 8, 8), unit.max_norm).quick_norm_bound() > 1
    certificate = certify(layer, features)
    assert certificate.contraction.value.max().item() == pytest.approx(0.97**2, rel=1e-4)
    distance = certificate.distance_to_reference.value
    # Not found exactly, but for rounding.
    assert (distance > 1e-5 * norm(certificate.state)).all()
    assert (distance <= certificate.distance.value).all()
    assert (certificate.distance.value <= 60 * distance).all()


@pytest.mark.spec("R1.1")
@pytest.mark.parametrize("seed", range(3))
def test_the_distance_has_the_rounding_of_the_injection_and_of_the_scale_in_it(seed):
    torch.manual_seed(seed)
    unit = OptEqUnit(Dense(2000, 40), Dense(2000, 40), "tanh")
    x = 10 * torch.randn(4, 2000)
    certificate = certify(EquilibriumLayer(unit, Anderson(tol=2.4e-6, max_steps=500)), x)
    W, U, b = (
        t.detach().double().numpy()
        for t in (unit.W.weight, unit.injection.operator.weight, unit.injection.bias)
    )
    W = W * min(1.0, 0.97 / np.linalg.norm(W, 2))
    c, z = x.double().numpy() @ U.T + b, np.zeros((4, 2000))
    for _ in range(1000):
        z = np.tanh(z @ W.T + c) @ W
    distance = np.linalg.norm(certificate.state.double().numpy() - z, axis=1)
    assert (distance <= certificate.distance.value.numpy()).all()
    # So near that the rounding of float32, at 2000 inputs, is what is left.
    assert (distance < 1e-5 * np.linalg.norm(z, axis=1)).all()


@pytest.mark.spec("R6.4")
def test_kernel_maps_are_certified_beyond_contraction():
    torch.manual_seed(0)
    unit = GaussianMap(Dense(7, 9), Dense(5, 9), gamma=0.5, max_norm=1.4)
    unit.W.weight.data *= 10
    x = torch.randn(6, 5)
    layer = EquilibriumLayer(unit, Nesterov(tol=1e-2, max_steps=300))
    certificate = certify(layer, x)
    assert (certificate.contraction.value > 1.9).all()
    distance = certificate.distance_to_reference.value
    assert (distance > 1e-6).any()
    assert (distance <= certificate.distance.value).all()
    assert torch.isfinite(certificate.distance.value).all()


@pytest.mark.spec("R6.4")
@pytest.mark.parametrize(
    ("s", "activation", "factor"),
    # 1 + s/(1 - 2e^{-3/2}s), or 1/(1 - L_σ s) where that is less.
    [
        (0.9, "relu", 1 + 0.9 / (1 - 1.8 * math.exp(-1.5))),
        (1.5, "relu", 1 + 1.5 / (1 - 3 * math.exp(-1.5))),
        (1.5, "sigmoid", 1 / (1 - 1.5 / 4)),
    ],
)
def test_the_distance_bound_of_a_kernel_map_by_hand(s, activation, factor):
    U = Dense(2, 3)
    unit = GaussianMap(Dense(3, 3), U, gamma=0.4, activation=activation, max_norm=None).double()
    with torch.no_grad():
        unit.W.weight.copy_(s**0.5 * torch.eye(3))
    equation = unit.bind(random(4, 2)).detach()
    y = random(4, 3, seed=1)
    expected = factor * (equation(y) - y).norm(dim=1)
    torch.testing.assert_close(equation.distance_bound(y).value, expected, rtol=1e-6, atol=0)


@pytest.mark.spec("R6.4")
def test_no_distance_bound_of_a_kernel_map_beyond_its_limit():
    # s = 2.25 is above e^{3/2}/2 = 2.2408.
    unit = GaussianMap(Dense(3, 3), Dense(2, 3), gamma=0.4, max_norm=None).double()
    y = random(4, 3, seed=1)
    with torch.no_grad():
        unit.W.weight.copy_(2.25**0.5 * torch.eye(3))
    assert torch.isinf(unit.bind(random(4, 2)).distance_bound(y).value).all()


@pytest.mark.spec("R6.4")
@pytest.mark.parametrize("make", [gaussian, gaussian_with_patches, optequnit, convolutional_optequnit])
def test_contraction_bounds_against_the_jacobian(make):
    torch.manual_seed(0)
    equilibrium_map, shape = make()
    x = torch.randn(1, *shape)
    certificate = certify(EquilibriumLayer(equilibrium_map, Anderson(tol=1e-4)), x)
    equation = equilibrium_map.double().bind(x.double())
    z = certificate.state.double()
    jacobian = torch.func.jacrev(equation)(z).reshape(z.numel(), z.numel())
    norm = torch.linalg.matrix_norm(jacobian, 2)
    assert norm <= certificate.local_contraction.value * (1 + 1e-6)
    assert (certificate.local_contraction.value <= certificate.contraction.value).all()


def test_a_network_around_the_layer_is_refused():
    network = torch.nn.Sequential(EquilibriumLayer(optequnit()[0]))
    with pytest.raises(ConfigError, match="Expected an EquilibriumLayer, got Sequential"):
        certify(network, torch.randn(2, 5))


def test_no_bound_where_nothing_contracts():
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 4), Dense(3, 4), max_norm=None)
    unit.W.weight.data *= 3
    unit.norm_checked = True
    certificate = certify(EquilibriumLayer(unit, on_unconverged="count"), torch.randn(5, 3))
    assert (certificate.contraction.value > 1).all()
    assert torch.isinf(certificate.distance.value).all()
    # Nor a reference: every sample diverges.
    assert certificate.distance_to_reference.value.isnan().all()
    assert certificate.objective.isfinite().all()
    assert certificate.objective_at_reference.isnan().all()


@pytest.mark.spec("R5.1", "R6.6")
def test_branches_are_certified_where_each_of_them_is():
    torch.manual_seed(0)
    steep = GaussianMap(Dense(7, 9), Dense(5, 9), gamma=0.5, max_norm=1.4)
    unit = OptEqUnit(Dense(7, 9), Dense(5, 9), max_norm=0.95)
    for branch in (steep, unit):
        branch.W.weight.data *= 10
    layer = EquilibriumLayer(Parallel([steep, unit]), Anderson(tol=1e-2, max_steps=300))
    certificate = certify(layer, torch.randn(6, 5))
    # No contraction as a whole, since the first branch is none.
    assert (certificate.contraction.value > 1.9).all()
    distance = certificate.distance_to_reference.value
    assert (distance > 1e-6).any()
    assert (distance <= certificate.distance.value).all()
    assert torch.isfinite(certificate.distance.value).all()


def test_an_exact_fixed_point_without_a_contraction_has_no_bound_either():
    network = torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 6), torch.nn.ReLU()
    )
    converted = from_feedforward(network.double())
    certificate = certify(converted.equilibrium, torch.randn(3, 5).double())
    assert (certificate.residual == 0).all()
    assert (certificate.contraction.value > 1).all()
    assert torch.isinf(certificate.distance.value).all()


def affine():
    unit, shape = optequnit()
    change = AffineChange(unit, torch.randn(7, 7), torch.randn(7))
    assert torch.linalg.cond(change.matrix) > 10  # no contraction, save in a metric of its own
    return change, shape


def decorrelated():
    unit, shape = optequnit()
    return Regularised(unit, Decorrelation(), 1e-3), shape


def mixed():
    matrix = torch.randn(9, 9)
    return LinearMixing(Dense(7, 9), Dense(5, 9), matrix @ matrix.mT + torch.eye(9)), (5,)


@pytest.mark.spec("R1.5", "R4.2")
@pytest.mark.parametrize("make", [affine, decorrelated, mixed])
def test_modified_maps_in_float32_are_certified_in_float64(make):
    torch.manual_seed(0)
    equilibrium_map, shape = make()
    layer, x = EquilibriumLayer(equilibrium_map, Anderson(tol=1e-3)), torch.randn(6, *shape)
    layer(x)  # in training mode, for a reference to compare with
    certificate = certify(layer.eval(), x)
    distance = certificate.distance_to_reference.value
    assert (distance > 1e-7).all()
    assert (distance <= certificate.distance.value).all()
    assert torch.isfinite(certificate.distance.value).all()


def test_an_exact_fixed_point_of_an_expansive_map_has_no_bound():
    unit = OptEqUnit(Dense(4, 4), Dense(3, 4), bias=False, max_norm=None)
    unit.W.weight.data = 3 * torch.eye(4)
    unit.norm_checked = True
    certificate = certify(EquilibriumLayer(unit), torch.zeros(2, 3))
    assert (certificate.residual == 0).all()
    assert torch.isinf(certificate.distance.value).all()


def test_refuses_a_map_that_is_random():
    U = torch.nn.Sequential(torch.nn.Dropout(0.5), Dense(8, 6))
    layer, x = EquilibriumLayer(OptEqUnit(Dense(4, 6), U)), torch.randn(5, 8)
    torch.manual_seed(0)
    with pytest.raises(
        ConfigError, match=r"another one each time that it reads the input.*call eval\(\) first"
    ):
        certify(layer, x)
    assert certify(layer.eval(), x).distance.value.isfinite().all()


@pytest.mark.parametrize("tracked", [True, False])
def test_refuses_a_batch_norm_that_goes_by_the_batch(tracked):
    norm = torch.nn.BatchNorm1d(6, track_running_stats=tracked)
    layer = EquilibriumLayer(OptEqUnit(Dense(4, 6), torch.nn.Sequential(Dense(8, 6), norm)))
    x = torch.randn(5, 8)
    with pytest.raises(ConfigError, match=r"^map\.injection\.operator\.1 normalises .*call eval\(\) first"):
        certify(layer, x)
    layer.eval()
    if tracked:
        # Nor has it taken note of the batch.
        assert not norm.running_mean.any()
        assert certify(layer, x).distance.value.isfinite().all()
    else:
        with pytest.raises(ConfigError, match="give it track_running_stats=True"):
            certify(layer, x)


def test_refuses_what_has_no_certificate_sample_by_sample():
    layer, x = EquilibriumLayer(decorrelated()[0]), torch.randn(4, 5)
    with pytest.raises(ConfigError, match=r"one system of the batch.*call eval\(\) first"):
        certify(layer, x)
    with pytest.raises(ConfigError, match="Expected an EquilibriumLayer, got OptEqUnit"):
        certify(optequnit()[0], x)


def test_refuses_weights_that_are_not_finite():
    unit = OptEqUnit(Dense(4, 4), Dense(3, 4), max_norm=None)
    unit.W.weight.data[0, 0] = torch.nan
    unit.norm_checked = True
    with pytest.raises(NonFiniteError, match="Weights of EquilibriumLayer are NaN or infinite"):
        certify(EquilibriumLayer(unit), torch.randn(2, 3))


class Doubled(OptEqUnit):
    """Its equation reads out another tensor than its state."""

    def bind(self, x, error=0.0):
        e = super().bind(x, error)
        return DoubledEquation(e.injection, e.W, e.activation, e.mu)


class DoubledEquation(OptEqEquation):
    def readout(self, state):
        return 2 * state


def test_refuses_a_readout_of_which_it_knows_nothing():
    layer = EquilibriumLayer(Doubled(Dense(3, 4), Dense(2, 4)))
    with pytest.raises(ConfigError, match="DoubledEquation reads out something else than its state: give it"):
        certify(layer, torch.randn(2, 2))
