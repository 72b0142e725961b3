"""Neural ODEs against a fixed-step integrator of the test's own."""

import sys

import pytest
import torch
import torch.nn.functional as F

from opteq.errors import ConfigError, ConvergenceError
from opteq.models.baselines.ode import NeuralODE

STEPS = 200


def runge_kutta(field, z):
    """The classical method of order 4."""
    h = 1 / STEPS
    for _ in range(STEPS):
        a = field(z)
        b = field(z + h / 2 * a)
        c = field(z + h / 2 * b)
        d = field(z + h * c)
        z = z + h / 6 * (a + 2 * b + 2 * c + d)
    return z


@pytest.mark.spec("R7.8")
@pytest.mark.parametrize("adjoint", [False, True], ids=["steps", "adjoint"])
@pytest.mark.parametrize("extra", [0, 2])
def test_values_and_gradients_are_those_of_a_fixed_step_integrator(extra, adjoint):
    pytest.importorskip("torchdiffeq")
    torch.manual_seed(0)
    body = NeuralODE(3, 5, extra, tol=1e-9, adjoint=adjoint).double()
    first, _, second, _, third = body.field
    # Units that are on or off all the time: at kinks the order of both methods is lost.
    for bias in (first.bias, second.bias):
        bias.data = torch.tensor([6.0, -6.0, 6.0, 6.0, -6.0], dtype=torch.float64)

    def field(z):
        z = F.conv2d(z, first.weight, first.bias).clamp(min=0)
        z = F.conv2d(z, second.weight, second.bias, padding=1).clamp(min=0)
        return F.conv2d(z, third.weight, third.bias)

    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    expected = runge_kutta(field, torch.cat([x, torch.zeros(2, extra, 4, 5, dtype=torch.float64)], 1))
    found = body(x)
    assert (expected[:, :3] - x).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
    weight, targets = torch.randn_like(expected), (x, *body.parameters())
    pairs = zip(*(torch.autograd.grad((z * weight).sum(), targets) for z in (found, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_an_equation_that_takes_too_many_steps_is_told(monkeypatch):
    pytest.importorskip("torchdiffeq")
    monkeypatch.setattr("opteq.models.baselines.ode._MOST_STEPS", 2)
    torch.manual_seed(0)
    with pytest.raises(
        ConvergenceError, match=r"could not be solved to tol=1e-12 \(max_num_steps.*raise `tol`"
    ):
        NeuralODE(2, 4, tol=1e-12).double()(torch.randn(1, 2, 3, 3, dtype=torch.float64))


def test_bad_input_and_a_missing_package_are_told(monkeypatch):
    with pytest.raises(ConfigError, match="`extra` to be a whole number of at least 0, got -1"):
        NeuralODE(3, extra=-1)
    with pytest.raises(ConfigError, match="`tol` to be positive"):
        NeuralODE(3, tol=0.0)
    with pytest.raises(ConfigError, match="`channels` to be a whole number of at least 1, got None"):
        NeuralODE()
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ConfigError, match=r"need the package torchdiffeq: pip install 'opteq\[rivals\]'"):
        NeuralODE(3)(torch.randn(1, 3, 4, 4))
