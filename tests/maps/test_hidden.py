"""The hidden variable of a unit as its readout."""

import numpy as np
import pytest
import torch

from opteq import (
    Anderson,
    Conv2d,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    HiddenReadout,
    Implicit,
    MOptEq,
    OptEqUnit,
    ShiftIsometry,
    certify,
)
from opteq.errors import ConfigError
from opteq.models.bodies import Unit
from opteq.theory.lipschitz import lipschitz_bound


def layer_of(unit: OptEqUnit, tol: float = 1e-12) -> EquilibriumLayer:
    return EquilibriumLayer(HiddenReadout(unit), Anderson(tol=tol, max_steps=500), Implicit(tol=tol)).double()


def dense_unit(**options) -> OptEqUnit:
    torch.manual_seed(0)
    return OptEqUnit(Dense(4, 6), Dense(3, 6), **options)


@pytest.mark.parametrize("mu", [1.0, 1.7])
@pytest.mark.spec("R1.4")
def test_it_solves_the_equation_of_the_hidden_variable(mu: float):
    unit = dense_unit(mu=mu)
    layer, x = layer_of(unit), torch.randn(5, 3, dtype=torch.float64)
    equation = unit.bind(x)
    W, c = equation.W.tensors[0].detach().numpy(), equation.injection.detach().numpy()
    y = np.zeros_like(c)
    for _ in range(3000):
        y = np.maximum(y @ W @ W.T / mu + c, 0)
    assert np.abs(y).max() > 0.1
    solution = layer.solve(x)
    np.testing.assert_allclose(solution.value.detach().numpy(), y, atol=1e-10)
    np.testing.assert_allclose(solution.state.detach().numpy(), y @ W / mu, atol=1e-10)


def test_its_gradient_is_that_of_two_thousand_iterations():
    unit = OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), "tanh")
    layer = layer_of(unit)
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    equation = unit.bind(x)
    z = equation.initial()
    for _ in range(2000):
        z = equation(z)
    leaves = [x, *unit.parameters()]
    unrolled = torch.autograd.grad((weights * torch.tanh(equation.preactivation(z))).sum(), leaves)
    implicit = torch.autograd.grad((weights * layer(x)).sum(), leaves)
    for ours, theirs in zip(implicit, unrolled, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


def test_its_distance_is_bounded_and_the_bound_is_not_that_of_the_state():
    layer, x = layer_of(dense_unit(), tol=1e-2), torch.randn(50, 3, dtype=torch.float64)
    rough = layer.solve(x)
    exact = layer_of(dense_unit()).solve(x).value
    moved = (rough.value - exact).norm(dim=1)
    certificate = certify(layer, x)
    assert moved.max() > 1e-5
    assert (moved <= certificate.distance.value).all()
    torch.testing.assert_close(certificate.distance_to_reference.value, moved.detach(), atol=1e-9, rtol=1e-6)
    of_state = EquilibriumLayer(dense_unit().double()).bind(x).distance_bound(rough.state)
    norm = torch.linalg.matrix_norm(layer.map.unit.bind(x).W.tensors[0], 2).detach()
    torch.testing.assert_close(certificate.distance.value, norm * of_state.value, rtol=1e-3, atol=0)


def test_its_lipschitz_bound_is_attained_where_all_units_are_active():
    torch.manual_seed(0)
    u, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    values = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    unit = OptEqUnit(Dense(3, 3), Dense(3, 3), max_norm=None).double()
    unit.W.weight.data = u @ values.diag() @ v
    unit.injection.operator.weight.data = 2 * u @ u.mT
    unit.injection.bias.data.fill_(50.0)
    layer = layer_of(unit)
    x = torch.randn(1, 3, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(layer, x).view(3, 3)
    bound = lipschitz_bound(layer, x).value.item()
    assert torch.linalg.matrix_norm(jacobian, 2).item() == pytest.approx(bound, rel=1e-3)
    assert bound == pytest.approx(2 / (1 - 0.81), rel=1e-3)


@pytest.mark.parametrize(("inputs", "alone"), [(6, True), (3, False)])
def test_a_square_shift_isometry_leaves_every_hidden_number_inside_an_image_to_itself(inputs, alone):
    torch.manual_seed(0)
    W = Conv2d(inputs, 6, norm=ShiftIsometry())
    layer = layer_of(OptEqUnit(W, Conv2d(2, 6), max_norm=0.9))
    x = torch.randn(2, 2, 7, 7, dtype=torch.float64)
    y = layer(x)
    c = layer.map.unit.injection(x)
    # One step of the kernel to the border, there and back.
    inside = (slice(None), slice(None), slice(2, -2), slice(2, -2))
    expected = torch.relu(c) / (1 - 0.9**2)
    assert torch.allclose(y[inside], expected[inside], rtol=1e-5) == alone


def test_one_per_branch():
    torch.manual_seed(0)
    body = Unit(4, [6, 6], readout="hidden", solver=Anderson(tol=1e-5))
    images = torch.randn(2, 4, 5, 5)
    first, second = body(images)
    assert first.shape == second.shape == (2, 6, 5, 5)
    alone = EquilibriumLayer(body.map.maps[1], Anderson(tol=1e-5))
    torch.testing.assert_close(second, alone(images), atol=1e-4, rtol=1e-4)


def test_maps_of_units_do_not_take_it_for_one():
    hidden = HiddenReadout(dense_unit())
    with pytest.raises(ConfigError, match="HiddenReadout"):
        DeepOptEq([hidden])
    with pytest.raises(ConfigError, match="HiddenReadout"):
        MOptEq([hidden, hidden])
    with pytest.raises(ConfigError, match=r"unit such as OptEqUnit\(W, U\)"):
        HiddenReadout(DeepOptEq([dense_unit()]))
    with pytest.raises(ConfigError, match="readout"):
        Unit(4, 6, readout="Hidden")
