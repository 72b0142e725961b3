import numpy as np
import pytest
import torch
from torch import nn

from opteq.errors import ConfigError
from opteq.gradients.unrolled import Unrolled
from opteq.layer import EquilibriumLayer
from opteq.maps.optequnit import OptEqUnit
from opteq.operators.dense import Dense
from opteq.show.iteration import KEPT_STEPS, iterate, logits_along
from opteq.solvers.picard import Picard


def network_with(solver=None, gradient=None, max_norm=0.9):
    torch.manual_seed(1)
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=max_norm)
    layer = EquilibriumLayer(unit, solver, gradient, on_unconverged="count")
    return nn.Sequential(layer, nn.Linear(4, 2)).double().eval()


def by_hand(network, x, steps):
    """States, residuals and objectives of the plain iteration, in NumPy."""
    unit = network[0].map
    W = dense(unit)
    c = unit.injection(x)[0].detach().numpy()
    z, states, residuals, objectives = np.zeros(4), [], [], []
    for _ in range(steps):
        following = W.T @ np.maximum(W @ z + c, 0)
        states.append(z)
        residuals.append(np.linalg.norm(following - z) / np.linalg.norm(following))
        objectives.append(0.5 * z @ z - 0.5 * (np.maximum(W @ z + c, 0) ** 2).sum())
        z = following
    return states, residuals, objectives


def dense(unit):
    """`W` as it acts, column by column."""
    bound = unit.W.bind((4,), unit.max_norm)
    return bound(torch.eye(4, dtype=torch.float64)).T.detach().numpy()


class TestIterate:
    def test_states_residuals_and_objective_are_those_of_the_plain_iteration(self):
        network, x = network_with(Picard(tol=1e-6, max_steps=500)), torch.ones(1, 3).double()
        found = iterate(network, x)
        states, residuals, objectives = by_hand(network, x, len(found.residual))
        assert found.residual == pytest.approx(residuals, rel=1e-9)
        assert found.objective == pytest.approx(objectives, rel=1e-9)
        *_, at_end = by_hand(network, x, 200)[2]
        assert found.lowest == pytest.approx(at_end, rel=1e-12)
        assert all(b <= a + 1e-12 for a, b in zip(found.objective, found.objective[1:], strict=False))
        for k, state in zip(found.steps, found.states, strict=True):
            np.testing.assert_allclose(state[0].numpy(), states[k], atol=1e-6)
        np.testing.assert_allclose(found.equilibrium[0].detach().numpy(), states[-1], atol=1e-4)

    def test_it_ends_a_decade_below_the_tolerance(self):
        found = iterate(network_with(Picard(tol=1e-3, max_steps=500)), torch.ones(1, 3).double())
        assert found.tolerance == 1e-3
        assert found.residual[-1] <= 1e-4 < found.residual[-2]

    def test_a_long_way_is_kept_in_part(self):
        network = network_with(Picard(tol=1e-9, max_steps=500), max_norm=0.9999)
        unit = network[0].map
        # All units stay active, so that z^k = c(1 + q + … + q^k) with q = 0.9998.
        unit.W.weight.data = torch.eye(6, 4).double()
        unit.injection.operator.weight.data.zero_()
        unit.injection.bias.data.fill_(1)
        found = iterate(network, torch.ones(1, 3).double())
        assert len(found.residual) == 301
        assert found.steps[:4] == [0, 1, 2, 3]
        assert found.steps[-1] == 300
        assert len(found.steps) <= KEPT_STEPS + 1

    def test_an_unrolled_layer_has_no_tolerance(self):
        found = iterate(network_with(gradient=Unrolled(4)), torch.ones(1, 3).double())
        assert found.tolerance is None

    def test_a_network_without_equilibrium_is_refused(self):
        with pytest.raises(ConfigError, match="no equilibrium layer"):
            iterate(nn.Linear(3, 2), torch.ones(1, 3))


def test_each_prediction_is_what_the_rest_of_the_network_makes_of_the_state():
    network, x = network_with(Picard(tol=1e-3, max_steps=500)), torch.ones(1, 3).double()
    found = iterate(network, x)
    before = network(x)
    logits = logits_along(network, x, found)
    head = network[1]
    for state, got in zip(found.states, logits[:-1], strict=True):
        expected = state[0].double() @ head.weight.T + head.bias
        torch.testing.assert_close(got[0], expected)
    torch.testing.assert_close(logits[-1], before)
    torch.testing.assert_close(network(x), before, msg="the layer answers for itself again")
