"""`EquilibriumLayer.solve(x, trace=True)`: residual and hidden objective along a plain iteration."""

import pytest
import torch

from opteq import Anderson, Conv2d, Dense, EquilibriumLayer, GaussianMap, OptEqUnit, Patches, Unrolled
from tests.solvers.problems import TwoBranchEquation, TwoBranches


def optequnit():
    return OptEqUnit(Dense(6, 8), Dense(4, 8)), (3, 4)


def convolutional():
    return OptEqUnit(Conv2d(3, 4), Conv2d(2, 4), activation="tanh"), (2, 2, 5, 6)


def gaussian():
    return GaussianMap(Conv2d(3, 4), Conv2d(2, 4), Patches(2, 2), hidden=6), (2, 2, 4, 6)


def branches():
    return TwoBranches(), (3, 6)


@pytest.mark.parametrize("make", [optequnit, convolutional, gaussian, branches])
def test_the_trace_follows_the_plain_iteration(make):
    torch.manual_seed(0)
    equilibrium_map, shape = make()
    equilibrium_map.double()
    x = torch.randn(shape, dtype=torch.float64)
    layer = EquilibriumLayer(equilibrium_map, Anderson(max_steps=40))
    trace = layer.solve(x, trace=True).trace
    assert trace.residual.shape == trace.energy.shape == (shape[0], 41)
    assert not trace.residual.requires_grad
    assert not trace.energy.requires_grad

    def flat(state):
        return torch.cat([t.flatten(1) for t in (state if isinstance(state, tuple) else (state,))], dim=1)

    equation = layer.bind(x)
    z = equation.initial()
    for step in range(41):
        image = equation(z)
        expected = (flat(image) - flat(z)).norm(dim=1) / flat(image).norm(dim=1)
        torch.testing.assert_close(trace.residual[:, step], expected)
        torch.testing.assert_close(trace.energy[:, step], equation.objective(z))
        z = image
    assert (trace.residual[:, -1] < 1e-2 * trace.residual[:, 0]).all()


@pytest.mark.spec("R1.3")
@pytest.mark.parametrize("activation", ["relu", "softplus", "tanh", "sigmoid", "leaky_relu"])
def test_the_hidden_objective_of_an_optequnit_never_rises(activation):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(6, 8), Dense(4, 8), activation).double()
    unit.W.weight.data *= 10  # held at the ceiling
    energy = EquilibriumLayer(unit).solve(torch.randn(5, 4, dtype=torch.float64), trace=True).trace.energy
    assert (energy.diff(dim=1) <= 1e-14).all()
    assert (energy[:, -1] < energy[:, 0] - 1e-3).all()


def test_a_map_without_a_hidden_objective_has_a_residual_only(monkeypatch):
    monkeypatch.setattr(TwoBranchEquation, "objective", None)
    trace = EquilibriumLayer(TwoBranches()).solve(torch.randn(3, 6, dtype=torch.float64), trace=True).trace
    assert trace.energy is None
    assert trace.residual.shape == (3, 51)


def test_an_unrolled_layer_is_traced_over_its_steps():
    trace = EquilibriumLayer(optequnit()[0], gradient=Unrolled(7)).solve(torch.randn(3, 4), trace=True).trace
    assert trace.residual.shape == (3, 8)


def test_a_trace_does_not_change_the_solution():
    torch.manual_seed(0)
    layer, x = EquilibriumLayer(optequnit()[0]), torch.randn(3, 4)
    layer(x)  # the estimate of the norm has settled
    assert torch.equal(layer.solve(x, trace=True).value, layer.solve(x).value)
