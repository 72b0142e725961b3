"""A solve that misses its tolerance is never silent; `solve_log` counts every solve."""

import warnings

import pytest
import torch
from torch import nn

from opteq import Anderson, Dense, EquilibriumLayer, Implicit, OneStep, OptEqUnit, Phantom, Unrolled
from opteq.errors import ConvergenceError, OpteqError
from opteq.layer import solve_log

HOPELESS = Anderson(tol=1e-5, max_steps=2)


def layer_with(solver=None, gradient=None, on_unconverged="warn"):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(6, 8), Dense(4, 8), activation="softplus")
    return EquilibriumLayer(unit, solver, gradient, on_unconverged)


def test_forward_warning_says_what_which_and_what_to_do():
    layer = EquilibriumLayer(OptEqUnit(Dense(6, 8), Dense(4, 8)), HOPELESS)
    x = torch.randn(4, 4)
    x[1] = 0  # its equilibrium is 0, where the solve starts
    pattern = (
        r"^The equilibrium solve did not reach its tolerance for 3 of 4 samples \(indices 0, 2, 3\) after 2"
        r" evaluations; largest relative residual 0\.\d+\. Raise `max_steps`, loosen `tol`, or lower the norm"
    )
    with pytest.warns(RuntimeWarning, match=pattern):
        layer(x)


def test_adjoint_warning_says_what_and_what_to_do():
    z = layer_with(gradient=Implicit(tol=1e-5, max_steps=1))(torch.randn(3, 4))
    pattern = (
        r"^The adjoint solve of the backward pass did not reach its tolerance for 3 of 3 samples .*"
        r" Raise `max_steps` or loosen `tol` of Implicit\(\), or switch to gradient=Unrolled\(steps\)\.$"
    )
    with pytest.warns(RuntimeWarning, match=pattern):
        z.sum().backward()


def test_a_long_list_of_samples_is_cut_short():
    with pytest.warns(RuntimeWarning, match=r"for 20 of 20 samples \(indices 0, 1, 2, 3, 4, 5, 6, 7, …\)"):
        layer_with(HOPELESS)(torch.randn(20, 4))


def test_raise_makes_an_error_of_it():
    with pytest.raises(ConvergenceError, match="The equilibrium solve did not reach its tolerance"):
        layer_with(HOPELESS, on_unconverged="raise")(torch.randn(3, 4))
    z = layer_with(gradient=Implicit(tol=1e-5, max_steps=1), on_unconverged="raise")(torch.randn(3, 4))
    with pytest.raises(ConvergenceError, match="The adjoint solve"):
        z.sum().backward()
    assert issubclass(ConvergenceError, OpteqError)


def test_count_is_quiet_and_counts():
    layer = layer_with(HOPELESS, Implicit(tol=1e-5, max_steps=1), "count")
    with warnings.catch_warnings(), solve_log(layer) as log:
        warnings.simplefilter("error")
        layer(torch.randn(3, 4)).sum().backward()
    assert (log.forward.unconverged, log.adjoint.unconverged) == (3, 3)


@pytest.mark.parametrize("policy", ["count", "warn", "raise"])
def test_a_converged_solve_says_nothing(policy):
    layer = layer_with(on_unconverged=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(torch.randn(3, 4)).sum().backward()


@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
def test_a_cotangent_that_is_not_finite_is_reported_and_not_hidden(method):
    layer = layer_with(gradient=Implicit(method=method), on_unconverged="count")
    for bad in (torch.nan, torch.inf):
        layer.zero_grad()
        cotangent = torch.ones(3, 6)
        cotangent[1, 2] = bad
        with solve_log(layer) as log:
            layer(torch.randn(3, 4)).backward(cotangent)
        assert log.adjoint.unconverged == 1
        assert not torch.isfinite(layer.map.W.weight.grad).all()


def test_the_log_adds_up_every_solve():
    layer = layer_with()
    x, y = torch.randn(3, 4), torch.randn(5, 4)
    infos = [layer.solve(x).info, layer.solve(y).info]
    with solve_log(layer) as log:
        loss = layer(x).sum() + layer(y).sum()
        assert log.adjoint.samples == 0
        loss.backward()
    forward = log.forward
    assert forward.samples == 8
    assert forward.steps == sum(int(info.steps.sum()) for info in infos)
    assert forward.evaluations == sum(info.evaluations for info in infos)
    assert forward.residual_max == max(float(info.residual.max()) for info in infos)
    assert forward.unconverged == 0
    assert forward.steps_mean == forward.steps / 8
    assert log.adjoint.samples == 8
    assert 0 < log.adjoint.residual_max <= layer.gradient.tol
    assert log.adjoint.steps >= log.adjoint.samples
    assert log.adjoint.evaluations >= 2


def test_an_empty_log_has_no_mean():
    with solve_log(layer_with()) as log:
        pass
    assert (log.forward.samples, log.forward.steps_mean) == (0, 0.0)


def test_the_log_covers_all_layers_of_a_module_once():
    shared = layer_with()
    model = nn.Sequential(shared, nn.Linear(6, 4), shared, nn.Linear(6, 4), layer_with())
    with solve_log(model) as log:
        model(torch.randn(3, 4))
    assert log.forward.samples == 3 * 3


def test_logs_may_nest_and_end_with_their_block():
    layer = layer_with()
    x = torch.randn(3, 4)
    with solve_log(layer) as outer:
        layer(x)
        with solve_log(layer) as inner:
            layer(x)
        layer(x)
    layer(x)
    assert (outer.forward.samples, inner.forward.samples) == (9, 3)


def test_a_log_ends_with_an_error_too():
    layer = layer_with()

    def interrupted():
        with solve_log(layer):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with solve_log(layer) as log:
        layer(torch.randn(3, 4))
    assert log.forward.samples == 3
    assert layer._logs == []


def test_methods_without_an_adjoint_solve_log_none():
    for gradient in (Phantom(), OneStep(), Unrolled(7)):
        layer = layer_with(gradient=gradient)
        with solve_log(layer) as log:
            layer(torch.randn(3, 4)).sum().backward()
        assert log.forward.samples == 3
        assert log.adjoint.samples == 0
    assert (log.forward.evaluations, log.forward.steps) == (7, 21)
