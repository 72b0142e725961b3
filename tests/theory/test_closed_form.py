import pytest
import torch

from opteq import Anderson, Dense, EquilibriumLayer, OptEqUnit
from opteq.activations import get_activation
from opteq.theory.closed_form import closed_form_objective


@pytest.mark.spec("R1.3")
@pytest.mark.parametrize("mu", [1.0, 2.5])
def test_phi_equals_the_dual_at_equilibria_where_units_rest(mu):
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Dense(6, 6), Dense(4, 6), mu=mu).double(), Anderson(1e-13, 300))
    x = torch.randn(20, 4, dtype=torch.float64)
    z, equation = layer(x).detach(), layer.bind(x).detach()
    assert (equation.preactivation(z) < 0).any()  # where rounding may leave the cone of feasible states
    torch.testing.assert_close(
        closed_form_objective(equation, z), equation.objective(z), rtol=1e-8, atol=1e-9
    )
    (weight,) = equation.W.tensors
    outside = -torch.ones(1, 6, dtype=torch.float64) @ weight  # W⁻ᵀz = -1
    assert closed_form_objective(equation, outside.expand(20, 6)).isinf().all()


@pytest.mark.spec("R1.3")
@pytest.mark.parametrize("activation", ["elu", "tanh", "sigmoid", "softplus", "hardtanh"])
def test_phi_is_finite_where_activations_are_saturated(activation):
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Dense(6, 6), Dense(4, 6), activation).double(), Anderson(1e-13, 300))
    x = 60 * torch.randn(40, 4, dtype=torch.float64)
    z, equation = layer(x).detach(), layer.bind(x).detach()
    # So near to the ends of the range that W⁻ᵀz, rounded, lies outside of it.
    y = torch.linalg.solve(equation.W.tensors[0].mT, z.mT).mT
    low, high = get_activation(activation).limits
    assert ((y < low) | (y > high)).any()
    torch.testing.assert_close(
        closed_form_objective(equation, z), equation.objective(z), rtol=1e-8, atol=1e-8
    )
