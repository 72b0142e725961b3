"""The plain iteration that conjugate gradients leave behind at no product."""

import pytest
import torch

from opteq import Dense, Implicit, OptEqUnit
from tests.conformance.reference import random


@pytest.mark.spec("R3.1")
def test_the_adjoint_after_one_product_is_one_plain_iteration_ahead_of_conjugate_gradients():
    torch.manual_seed(0)
    unit = OptEqUnit(
        Dense(5, 10), Dense(3, 10), max_norm=0.9
    ).double()  # in its state, not its hidden variable
    equation = unit.bind(random(4, 3)).detach()
    z, g = random(4, 5, seed=1), random(4, 5, seed=2)
    gradients = Implicit(tol=1e-14, max_steps=1).pullback(equation, z, g, lambda info: None)

    jacobian = equation.linearize(z).jvp
    step = g.square().sum(1) / (g * (g - jacobian(g))).sum(1)  # the first of conjugate gradients, from 0
    v = step[:, None] * g
    expected = equation.linearize(z).pullback(g + jacobian(v))
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
