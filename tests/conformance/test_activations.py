"""Every activation is the proximal operator of its penalty and the derivative of its potential."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize_scalar

from opteq.activations import Activation
from tests.conformance.instances import ACTIVATIONS
from tests.conformance.reference import random

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
# Kinks, where autograd's choice matters, and both sides of thresholds inside the implementations.
NOTABLE = torch.tensor(
    [-45, -40, -20.5, -3, -1, -0.7, -0.1, 0, 0.1, 0.7, 1, 2.9, 3, 3.1, 19.5, 20.5, 40.5, 50],
    dtype=torch.float64,
)
# Where σ tells its argument apart in float64, also for those that saturate.
MODERATE = torch.tensor([-6, -2.5, -1, -0.7, -0.3, 0, 0.05, 0.4, 1, 1.8, 6], dtype=torch.float64)


def at(function, value: float) -> float:
    return function(torch.tensor(value, dtype=torch.float64)).item()


@every_activation
@pytest.mark.spec("R1.1")
def test_derivative_is_that_of_autograd(activation: Activation):
    a = torch.cat([NOTABLE, 3 * random(200)]).requires_grad_()
    expected = torch.autograd.grad(activation(a).sum(), a)[0]
    torch.testing.assert_close(activation.derivative(a), expected, rtol=1e-13, atol=1e-14)


@every_activation
def test_slopes_are_multiplied_with(activation: Activation):
    a, t = torch.cat([NOTABLE, 3 * random(200)]), random(len(NOTABLE) + 200, seed=1)
    expected = activation.derivative(a)
    slopes = activation.slopes(a)
    activation.overwrite(a)
    assert torch.equal(slopes.times(t), expected * t)
    assert torch.equal(slopes.sqrt().times(t), expected.sqrt() * t)
    product = t.clone()
    assert slopes.times_(product) is product
    assert torch.equal(product, expected * t)


@every_activation
@given(a=st.floats(-50, 50), b=st.floats(-50, 50))
@settings(max_examples=50)
@pytest.mark.spec("R1.1")
def test_slopes_lie_between_zero_and_the_lipschitz_constant(activation: Activation, a: float, b: float):
    rise = (at(activation, a) - at(activation, b)) * np.sign(a - b)
    assert -1e-14 <= rise <= activation.lipschitz * abs(a - b) + 1e-13


@every_activation
def test_the_lipschitz_constant_is_attained(activation: Activation):
    slopes = activation.derivative(torch.linspace(-40, 40, 8001, dtype=torch.float64))
    assert slopes.max().item() == pytest.approx(activation.lipschitz, abs=1e-12)
    assert slopes.min() >= 0


@every_activation
@pytest.mark.spec("R1.2")
def test_potential_is_the_integral(activation: Activation):
    kinks = [-1.0, -0.7, -0.1, 0.1, 0.7, 1.0]
    for a in NOTABLE.tolist():
        points = [k for k in kinks if min(a, 0) < k < max(a, 0)] or None
        value, error = quad(
            lambda t: at(activation, t), 0, a, points=points, epsabs=1e-12, epsrel=1e-12, limit=200
        )
        assert error < 1e-9
        assert at(activation.potential, a) == pytest.approx(value, rel=1e-12, abs=1e-11)


@every_activation
@pytest.mark.spec("R1.2")
def test_gradient_of_the_potential(activation: Activation):
    a = torch.cat([NOTABLE, 3 * random(200)]).requires_grad_()
    gradient = torch.autograd.grad(activation.potential(a).sum(), a)[0]
    torch.testing.assert_close(gradient, activation(a).detach(), rtol=1e-12, atol=1e-13)


@every_activation
@pytest.mark.spec("R1.2")
def test_penalty_is_the_conjugate_of_the_potential(activation: Activation):
    # f(v) + ½v² = sup_a (a v - σ̃(a)), for v in the range of σ.
    for v in activation(MODERATE).tolist():
        best = minimize_scalar(
            lambda a, v=v: at(activation.potential, a) - a * v,
            bounds=(-60, 60),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert at(activation.penalty, v) + 0.5 * v * v == pytest.approx(-best.fun, rel=1e-9, abs=1e-9)


@every_activation
@pytest.mark.spec("R1.2")
def test_the_proximal_operator_of_the_penalty_is_the_activation(activation: Activation):
    low, high = at(activation, -60.0), at(activation, 60.0)
    for a in MODERATE.tolist():
        best = minimize_scalar(
            lambda v, a=a: at(activation.penalty, v) + 0.5 * (v - a) ** 2,
            bounds=(low, high),
            method="bounded",
            options={"xatol": 1e-11},
        )
        assert best.x == pytest.approx(at(activation, a), abs=2e-6)


@every_activation
@given(a=st.floats(-30, 30))
@settings(max_examples=50)
@pytest.mark.spec("R1.4")
def test_the_equality_of_fenchel(activation: Activation, a: float):
    v = at(activation, a)
    expected = a * v - at(activation.potential, a) - 0.5 * v * v
    assert at(activation.penalty, v) == pytest.approx(expected, rel=1e-11, abs=1e-10)


@every_activation
def test_penalty_is_infinite_outside_the_range(activation: Activation):
    low, high = activation(torch.tensor([-1e6, 1e6], dtype=torch.float64)).tolist()
    beyond = [v for v in (low - 0.1, high + 0.1) if abs(v) < 1e3]
    penalties = activation.penalty(torch.tensor(beyond, dtype=torch.float64))
    assert torch.isposinf(penalties).all()


@every_activation
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_everything_is_finite_for_large_arguments(activation: Activation, dtype: torch.dtype):
    a = torch.tensor([[-1e4, -90, -20, 0], [1e-30, 20, 90, 1e4]], dtype=dtype)
    for value in (
        activation(a),
        activation.derivative(a),
        activation.potential(a),
        activation.penalty(activation(a)),
    ):
        assert value.dtype == dtype
        assert value.shape == a.shape
        assert torch.isfinite(value).all()


@every_activation
def test_float32_agrees_with_float64(activation: Activation):
    a = 5 * random(500)
    for function in (activation, activation.derivative, activation.potential):
        torch.testing.assert_close(function(a.float()).double(), function(a), rtol=1e-5, atol=1e-6)


@every_activation
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # PyTorch's own
def test_slopes_can_be_mapped_over_and_differentiated_forwards(activation: Activation):
    a, t = random(5), random(3, 5, seed=1)
    expected = activation.derivative(a) * t

    def times(row: torch.Tensor) -> torch.Tensor:
        return activation.slopes(a).times_(row.clone())

    torch.testing.assert_close(torch.vmap(times)(t), expected)
    torch.testing.assert_close(torch.func.jvp(times, (t[0],), (t[1],))[1], expected[1])
