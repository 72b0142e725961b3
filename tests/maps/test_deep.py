"""Deep, multi-block and wide OptEq."""

from itertools import pairwise

import pytest
import torch

from opteq import (
    Conv2d,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    Implicit,
    MultiBlockOptEq,
    OptEqUnit,
    Unrolled,
    WideOptEq,
    solve_log,
)
from opteq.errors import ConfigError, ShapeError
from opteq.maps.chain import ChainEquation
from opteq.operators.dense import BoundDense
from tests.conformance.reference import jacobian, random
from tests.maps.problems import EXACT, STATE, conv_unit, dense_unit, equilibrium, formula, inputs, mixed_units


@pytest.mark.spec("R2.1")
@pytest.mark.parametrize("alpha", [0.8, 1.0, [0.3, 0.9, 0.6]])
def test_values_are_those_of_the_formula(alpha):
    units = mixed_units(3)
    x, z = inputs(), random(4, STATE)
    expected = z
    for unit, a in zip(units, [alpha] * 3 if isinstance(alpha, float) else alpha, strict=True):
        expected = a * formula(unit, x, expected) + (1 - a) * expected
    torch.testing.assert_close(DeepOptEq(units, alpha).bind(x)(z), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("R2.1")
def test_learned_alphas_start_where_told_and_get_gradients():
    deep = DeepOptEq(mixed_units(3), [0.8, 0.5, 0.3], learn_alpha=True).double()
    alphas = [skip.value for skip in deep.skips]
    torch.testing.assert_close(torch.stack(alphas), torch.tensor([0.8, 0.5, 0.3]).double(), rtol=1e-6, atol=0)
    layer = EquilibriumLayer(deep, EXACT, Implicit(tol=1e-13, max_steps=500))
    layer(inputs()).square().sum().backward()
    step = 1e-5
    for skip in deep.skips:
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                skip.logit.add_(sign * step)
                values.append(layer(inputs()).square().sum().item())
                skip.logit.sub_(sign * step)
        assert skip.logit.grad.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)
        assert skip.logit.grad.abs() > 1e-6


def test_fixed_alphas_are_no_parameters():
    assert len(list(DeepOptEq(mixed_units(2)).parameters())) == 2 * 3


@pytest.mark.spec("R2.1")
def test_starting_from_the_input():
    units = [conv_unit(i) for i in range(3)]
    x = random(2, 2, 4, 5).requires_grad_()
    deep = DeepOptEq(units, 0.4, start="input")
    z = x
    for _ in range(3):
        for unit in units:
            z = 0.4 * unit.bind(x)(z) + 0.6 * z
    unrolled = EquilibriumLayer(deep, gradient=Unrolled(3))(x)
    torch.testing.assert_close(unrolled, z, rtol=1e-12, atol=1e-13)
    weight = random(*z.shape)
    ours, expected = (torch.autograd.grad((v * weight).sum(), x)[0] for v in (unrolled, z))
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
    # The equilibrium does not depend on the start, nor does its implicit gradient.
    both = []
    for start in ("zero", "input"):
        layer = EquilibriumLayer(
            DeepOptEq(units, 0.4, start=start), EXACT, Implicit(tol=1e-12, max_steps=500)
        )
        value = layer(x)
        both += [value, torch.autograd.grad((value * weight).sum(), x)[0]]
    torch.testing.assert_close(both[2:], both[:2], rtol=1e-9, atol=1e-10)


@pytest.mark.spec("R3.1", "R3.2")
@pytest.mark.parametrize("method", ["auto", "anderson", "gmres"])
@pytest.mark.parametrize("learn_alpha", [False, True])
@pytest.mark.parametrize(("count", "alpha"), [(1, 0.8), (2, 0.6), (2, 0.99), (3, 0.8), (5, 0.4)])
def test_implicit_gradients_are_unrolled_ones(count, alpha, learn_alpha, method):
    deep = DeepOptEq(mixed_units(count), alpha, learn_alpha).double()
    x = inputs().requires_grad_()
    wanted = (x, *deep.parameters())
    results = []
    for solver, gradient in ((EXACT, Implicit(1e-13, 500, method)), (None, Unrolled(800))):
        z = EquilibriumLayer(deep, solver, gradient, "raise")(x)
        results.append(torch.autograd.grad((z * random(*z.shape)).sum(), wanted))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-9)


@pytest.mark.spec("R3.1")
@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_two_units_are_solved_by_conjugate_gradients_in_few_steps(alpha):
    # At α = 1 the metric is singular; the multiplied system would be as well.
    deep = DeepOptEq([conv_unit(0), conv_unit(1)], alpha)
    layer = EquilibriumLayer(deep, EXACT, Implicit(tol=1e-8, max_steps=40, method="cg"), "raise")
    x = random(3, 2, 8, 8).requires_grad_()
    with solve_log(layer) as log:
        layer(x).square().sum().backward()
    assert log.adjoint.unconverged == 0
    assert log.adjoint.steps_mean < 25


@pytest.mark.spec("R3.1")
@pytest.mark.parametrize("multiblock", [False, True])
@pytest.mark.parametrize("alpha", [0.6, 1.0])
def test_the_form_of_two_units_is_symmetric_in_its_metric(alpha, multiblock):
    deep = DeepOptEq(mixed_units(2), alpha)
    equation = (MultiBlockOptEq(deep) if multiblock else deep).bind(inputs(1)).detach()
    z = random(1, STATE * (2 if multiblock else 1))
    state = tuple(z.split(STATE, 1)) if multiblock else z
    linearization = equation.linearize(state)
    form = linearization.symmetric
    assert form is not None
    assert equation.structure == "none"

    def dense(product):
        columns = []
        for e in torch.eye(z.shape[1]).double():
            v = product(tuple(e[None].split(STATE, 1)) if multiblock else e[None])
            columns.append((torch.cat(v, 1) if multiblock else v)[0])
        return torch.stack(columns, 1)

    metric, kernel = dense(form.metric), dense(form.matvec)
    for symmetric in (metric, metric @ kernel @ metric):
        torch.testing.assert_close(symmetric, symmetric.mT, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(metric).min() > -1e-12
    J = dense(linearization.jvp)
    torch.testing.assert_close(dense(linearization.vjp), J.mT, rtol=1e-10, atol=1e-12)
    g = random(1, z.shape[1], seed=3)
    as_state = tuple(g.split(STATE, 1)) if multiblock else g
    b = form.enter(as_state)
    b = torch.cat(b, 1) if multiblock else b
    identity = torch.eye(z.shape[1]).double()
    v = torch.linalg.solve(identity - kernel @ metric, b[0])[None]
    u = form.leave(tuple(v.split(STATE, 1)) if multiblock else v, as_state)
    u = torch.cat(u, 1) if multiblock else u
    torch.testing.assert_close(u[0], torch.linalg.solve(identity - J.mT, g[0]), rtol=1e-9, atol=1e-11)


@pytest.mark.spec("R2.1", "R3.1")
def test_the_chain_rule_evaluates_each_unit_once(monkeypatch):
    calls = []

    plain = BoundDense.__call__

    def counting(bound, x):
        calls.append("W")
        return plain(bound, x)

    units = [OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=None) for _ in range(3)]
    for unit in units:
        unit.W.weight.data.mul_(0.3)
        unit.norm_checked = True
    equation = DeepOptEq(units).bind(torch.randn(2, 3)).detach()
    monkeypatch.setattr(BoundDense, "__call__", counting)
    equation.linearize(torch.randn(2, 4))
    assert len(calls) == 3


@pytest.mark.spec("R2.2")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_multi_block_form_has_the_equilibria_of_the_deep_one(count):
    deep, x = DeepOptEq(mixed_units(count), 0.7), inputs()
    multi = MultiBlockOptEq(deep)
    z = equilibrium(deep, x)
    equation = multi.bind(x)
    # One way: the blocks of a deep equilibrium are fixed ...
    blocks = deep.bind(x).blocks(z)
    for image, block in zip(equation(blocks), blocks, strict=True):
        torch.testing.assert_close(image, block, rtol=1e-11, atol=1e-11)
    # ... and the other: the last block found by solving the multi-block form is the deep equilibrium.
    solved = EquilibriumLayer(multi, EXACT, on_unconverged="raise")(x)
    torch.testing.assert_close(solved[-1].detach(), z, rtol=1e-9, atol=1e-10)
    for found, block in zip(solved, blocks, strict=True):
        torch.testing.assert_close(found, block, rtol=1e-9, atol=1e-10)


@pytest.mark.spec("R2.2")
def test_the_printed_multi_block_form_has_other_equilibria():
    # Without the shift inside σ the deep equilibrium is no fixed point.
    deep, x = DeepOptEq(mixed_units(3), 0.7), inputs()
    blocks = deep.bind(x).blocks(equilibrium(deep, x))
    previous = (blocks[-1], *blocks[:-1])
    printed = [0.7 * formula(u, x, z) + 0.3 * p for u, z, p in zip(deep.units, blocks, previous, strict=True)]
    assert max((p - z).abs().max() for p, z in zip(printed, blocks, strict=True)) > 1e-3


@pytest.mark.spec("R2.2", "R3.1", "R3.2")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_multi_block_gradients_are_those_of_the_deep_form(count):
    deep = DeepOptEq(mixed_units(count), 0.7, learn_alpha=True).double()
    x = inputs().requires_grad_()
    wanted = (x, *deep.parameters())
    weight = random(4, STATE)
    z = EquilibriumLayer(deep, gradient=Unrolled(800))(x)
    expected = torch.autograd.grad((z * weight).sum(), wanted)
    for gradient in (
        Implicit(1e-13, 2000),
        Implicit(1e-13, 2000, "gmres"),
        Implicit(1e-13, 2000, "anderson"),
    ):
        z = EquilibriumLayer(MultiBlockOptEq(deep), EXACT, gradient, "raise")(x)[-1]
        computed = torch.autograd.grad((z * weight).sum(), wanted)
        torch.testing.assert_close(computed, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.spec("R2.5")
def test_wide_values_energy_and_jacobian():
    units = mixed_units(3)
    wide, x, z = WideOptEq(units), inputs(), random(4, STATE)
    equation = wide.bind(x).detach()
    expected = sum(formula(u, x, z) for u in units) / 3
    torch.testing.assert_close(equation(z), expected, rtol=1e-12, atol=1e-13)
    z.requires_grad_()
    energy = equation.objective(z)
    each = sum(u.bind(x).objective(z) for u in units)
    torch.testing.assert_close(3 * energy, each, rtol=1e-12, atol=1e-12)
    slope = torch.autograd.grad(energy.sum(), z)[0]
    torch.testing.assert_close(slope, z.detach() - expected, rtol=1e-10, atol=1e-11)
    J = jacobian(equation, z)
    torch.testing.assert_close(J, J.mT, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(J).min() > -1e-12
    assert torch.linalg.eigvalsh(J).max() <= equation.contraction().value.max()


@pytest.mark.spec("R2.5", "R3.1", "R3.2")
def test_wide_implicit_gradients_are_unrolled_ones():
    wide, x = WideOptEq(mixed_units(3)), inputs().requires_grad_()
    wanted, results = (x, *wide.parameters()), []
    for solver, gradient in ((EXACT, Implicit(1e-13, 500, "cg")), (None, Unrolled(800))):
        z = EquilibriumLayer(wide, solver, gradient, "raise")(x)
        results.append(torch.autograd.grad((z * random(*z.shape)).sum(), wanted))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-9)


@pytest.mark.spec("R2.5")
def test_as_alpha_falls_tenfold_so_does_the_distance_to_the_wide_equilibrium():
    units, x = mixed_units(4), inputs()
    wide = equilibrium(WideOptEq(units), x)
    distances = [
        (equilibrium(DeepOptEq(units, a), x) - wide).norm() / wide.norm() for a in (1e-1, 1e-2, 1e-3, 1e-4)
    ]
    assert distances[0] > 1e-3
    for larger, smaller in pairwise(distances):
        assert 8 < larger / smaller < 12.5


@pytest.mark.spec("R2.5")
def test_the_wide_limit_minimises_the_sum_of_energies():
    units, x = mixed_units(3), inputs()
    wide = WideOptEq(units).bind(x).detach()
    z = random(4, STATE).requires_grad_()
    optimizer = torch.optim.LBFGS([z], max_iter=2000, tolerance_grad=1e-13, tolerance_change=0)

    def closure():
        optimizer.zero_grad()
        loss = sum(u.bind(x).objective(z).sum() for u in units)
        loss.backward()
        return loss

    optimizer.step(closure)
    star = equilibrium(WideOptEq(units), x)
    torch.testing.assert_close(z.detach(), star, rtol=1e-5, atol=1e-5)
    assert (wide.objective(star) <= wide.objective(z.detach()) + 1e-12).all()


def test_contraction_of_a_chain_bounds_its_jacobian():
    equation = DeepOptEq(mixed_units(3), 0.7).bind(inputs()).detach()
    bound = equation.contraction()
    assert bound.kind == "bound"
    for seed in range(5):
        norms = torch.linalg.matrix_norm(jacobian(equation, random(4, STATE, seed=seed)), 2)
        assert (norms <= bound.value).all()


@pytest.mark.parametrize("alpha", [0, -0.1, 1.1, float("nan"), [0.5, 2.0]])
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"Expected `alpha` to be in \(0, 1\], got"):
        DeepOptEq(mixed_units(2), alpha)


def test_other_bad_options_are_refused():
    with pytest.raises(ConfigError, match="at least one unit"):
        DeepOptEq([])
    with pytest.raises(ConfigError, match="Expected a list of units, got OptEqUnit"):
        DeepOptEq(dense_unit())
    with pytest.raises(ConfigError, match="Expected `learn_alpha` to be True or False, got 'x'"):
        DeepOptEq(mixed_units(1), learn_alpha="x")
    with pytest.raises(ConfigError, match="Expected one `alpha`, or 2 for as many units, got 3"):
        DeepOptEq(mixed_units(2), [0.1, 0.2, 0.3])
    with pytest.raises(ConfigError, match="starts inside"):
        DeepOptEq(mixed_units(1), 1.0, learn_alpha=True)
    with pytest.raises(ConfigError, match="Expected `start` to be one of zero, input, got 'random'"):
        DeepOptEq(mixed_units(1), start="random")
    with pytest.raises(ConfigError, match=r"units on one state, got `W` with \[5, 4\] input channels"):
        DeepOptEq([dense_unit(), dense_unit(state=4)])
    with pytest.raises(ConfigError, match="Expected units such as OptEqUnit"):
        WideOptEq([torch.nn.Linear(2, 2)])
    with pytest.raises(ShapeError, match="with the state's 5 channels for start='input', got"):
        DeepOptEq(mixed_units(1), start="input").bind(inputs())


def test_a_norm_above_one_is_reported_once():
    unit = OptEqUnit(Conv2d(2, 3), Conv2d(2, 3), max_norm=None)
    with torch.no_grad():
        unit.W.weight.mul_(3 / unit.W.norm((2, 4, 4)))
    x = torch.randn(2, 2, 4, 4)
    with pytest.warns(RuntimeWarning, match=r"‖W‖₂ = 3 exceeds √\(μ/L_σ\) = 1: the unit is no proximal"):
        unit.bind(x)
    unit.bind(x)
    with pytest.warns(RuntimeWarning):
        assert unit.check_norm((2, 4, 4)) == pytest.approx(3, rel=1e-4)
    # A ceiling, or a larger μ, makes it one.
    OptEqUnit(unit.W, unit.injection.operator).bind(x)
    OptEqUnit(unit.W, unit.injection.operator, mu=9.1, max_norm=None).bind(x)


def test_a_chain_is_a_gradient_step_where_it_is_one_map():
    unit = dense_unit(hidden=3).bind(inputs(40)).detach()
    # Of few hidden numbers: a solve goes about it in them, unless it has to take gradient steps.
    alone = ChainEquation((unit,))
    assert alone.reformulate().initial.shape == (40, 3)
    assert alone.reformulate(gradient=True).initial.shape == (40, STATE)
    for units in ((unit, unit), (unit, unit, unit)):
        with pytest.raises(ConfigError, match="ChainEquation is no gradient step; use Anderson instead"):
            ChainEquation(units).reformulate(gradient=True)
    elsewhere = ChainEquation((unit,), random(40, STATE))
    assert torch.equal(elsewhere.reformulate(gradient=True).initial, elsewhere.start)
