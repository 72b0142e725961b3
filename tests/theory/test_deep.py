"""What deep OptEq optimises, against convex solvers and maps for which it must not hold."""

from dataclasses import dataclass

import cvxpy as cp
import numpy as np
import pytest
import torch

from opteq import Conv2d, DeepOptEq, EquilibriumLayer, MultiBlockOptEq, OptEqUnit, Regularised, SquaredNorm
from opteq.errors import ConfigError, ShapeError
from opteq.maps.chain import ChainEquation
from opteq.maps.multiblock import MultiBlockEquation
from opteq.maps.optequnit import OptEqEquation
from opteq.maps.skip import SkipEquation
from opteq.theory.closed_form import closed_form_objective
from opteq.theory.envelope import Envelope
from opteq.theory.theorem2 import corollary1_objective, theorem2_residual
from tests.conformance.reference import random
from tests.maps.problems import EXACT, STATE, dense_unit, equilibrium, inputs, mixed_units


@pytest.mark.spec("R2.3")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.8, 1.0])
def test_the_residual_vanishes_at_equilibria_and_only_there(count, alpha):
    deep, x = DeepOptEq(mixed_units(count), alpha), inputs()
    z = equilibrium(deep, x)
    equation = deep.bind(x)
    assert theorem2_residual(equation, z).max() < 1e-9
    blocks = equation.blocks(z)
    assert theorem2_residual(MultiBlockEquation(equation.units), blocks).max() < 1e-9
    assert theorem2_residual(equation, z + 0.1 * random(4, STATE)).min() > 1e-4
    # One block off suffices.
    assert theorem2_residual(equation, (*blocks[:-1], blocks[-1] + 0.1)).min() > 1e-4


@dataclass(frozen=True, eq=False)
class NoProx(OptEqEquation):
    """`Aσ(W z + c)` with `A ≠ Wᵀ`: no gradient of anything, though the energy of the unit is still there."""

    def pool(self, hidden):
        return super().pool(hidden.roll(1, dims=1))


@pytest.mark.spec("R2.3")
@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_the_residual_is_large_for_a_map_that_is_no_prox(alpha):
    units = []
    for unit in mixed_units(3, norm=0.7):
        e = unit.bind(inputs()).detach()
        units.append(SkipEquation(NoProx(e.injection, e.W, e.activation, e.mu), alpha))
    equation = ChainEquation(tuple(units))
    z = equation.initial()
    for _ in range(4000):
        z = equation(z)
    torch.testing.assert_close(equation(z), z, rtol=1e-12, atol=1e-13)
    assert theorem2_residual(equation, z).min() > 1e-2


def relu_prox(unit, x, z, weight):
    """`prox_{t φ}(z)` of a ReLU unit with square `W`, a quadratic program, by a convex solver."""
    W, c = unit.W.weights[0].detach().numpy(), unit.injection(x).detach().numpy()
    rows = []
    for row, target in zip(c, z.numpy(), strict=True):
        y = cp.Variable(len(row), nonneg=True)
        p = W.T @ y
        # t φ(p) + ½‖p - z‖², its quadratic part ½yᵀ(t I + (1-t) WWᵀ)y.
        quadratic = weight * np.eye(len(row)) + (1 - weight) * W @ W.T
        objective = 0.5 * cp.quad_form(y, cp.psd_wrap(quadratic)) - weight * row @ y - target @ p
        cp.Problem(cp.Minimize(objective)).solve(
            cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10
        )
        rows.append(torch.tensor(W.T @ y.value))
    return torch.stack(rows)


@pytest.mark.spec("R2.3")
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
def test_the_prox_of_an_envelope_is_that_of_a_convex_solver(alpha):
    unit, x, z = dense_unit(hidden=STATE, norm=[0.9, 0.8, 0.6, 0.5, 0.3]), inputs(), random(4, STATE)
    envelope = Envelope(unit.bind(x), alpha)
    p = relu_prox(unit, x, z, 1 - alpha)
    torch.testing.assert_close(envelope.prox(z), p, rtol=1e-5, atol=1e-6)
    phi = closed_form_objective(unit.bind(x).detach(), envelope.prox(z) + 1e-12)
    expected = alpha * (phi + (z - p).square().sum(1) / (2 * (1 - alpha)))
    finite = torch.isfinite(phi)
    torch.testing.assert_close(envelope.value(z)[finite], expected[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus", "soft_threshold", "identity"])
@pytest.mark.parametrize("alpha", [0.01, 0.5, 0.99])
@pytest.mark.spec("R2.3")
def test_an_envelope_and_its_gradient_agree(activation, alpha):
    envelope = Envelope(dense_unit(activation=activation).bind(inputs()), alpha)
    z, direction, step = 3 * random(4, STATE), random(4, STATE, seed=1), 1e-5
    difference = (envelope.value(z + step * direction) - envelope.value(z - step * direction)) / (2 * step)
    slope = (envelope.gradient(z) * direction).sum(1)
    torch.testing.assert_close(difference, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.spec("R2.4")
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_two_units_minimise_the_objective_of_corollary_1(alpha):
    deep, x = DeepOptEq(mixed_units(2), alpha), inputs()
    equation = deep.bind(x).detach()
    star = equation.blocks(equilibrium(deep, x))
    least = corollary1_objective(equation, star)
    for seed in range(12):
        size = 10.0 ** -(seed % 4)
        other = tuple(b + size * random(4, STATE, seed=seed + i) for i, b in enumerate(star))
        assert (corollary1_objective(equation, other) > least).all()
    # The energies of the deep and of the multi-block form are that objective at a feasible point.
    torch.testing.assert_close(equation.objective(star[-1]), least, rtol=1e-9, atol=1e-10)
    blocks = MultiBlockEquation(equation.units)
    torch.testing.assert_close(blocks.objective(star), least, rtol=1e-9, atol=1e-10)
    other = random(4, STATE)
    feasible = blocks((random(4, STATE, seed=1), other))
    expected = corollary1_objective(equation, feasible)
    torch.testing.assert_close(
        blocks.objective((random(4, STATE, seed=1), other)), expected, rtol=1e-8, atol=1e-9
    )
    p = equation(other)
    first = equation.units[0](p)
    expected = corollary1_objective(equation, (first, p))
    torch.testing.assert_close(equation.objective(other), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.spec("R2.4")
def test_two_relu_units_solve_one_quadratic_program():
    # With α = 1 and square W_i: φ_1(z_1) + φ_2(z_0) + ½‖z_1 - z_0‖², by a convex solver.
    units = [dense_unit(i, STATE, norm=[0.9, 0.8, 0.7, 0.6, 0.5]) for i in (1, 2)]
    deep, x = DeepOptEq(units, 1.0), inputs()
    star = equilibrium(deep, x)
    blocks = deep.bind(x).detach().blocks(star)
    for i in range(len(x)):
        y = [cp.Variable(STATE, nonneg=True) for _ in units]
        W = [u.W.weights[0].detach().numpy() for u in units]
        c = [u.injection(x)[i].detach().numpy() for u in units]
        linear = sum(c[k] @ y[k] for k in range(2))
        # The concave -½‖z‖² of both are part of ½‖z_1 - z_0‖²: what is left is jointly convex.
        identity, cross = np.eye(STATE), -W[0] @ W[1].T
        joint = cp.hstack(y)
        matrix = np.block([[identity, cross], [cross.T, identity]])
        quadratic = 0.5 * cp.quad_form(joint, cp.psd_wrap(matrix))
        cp.Problem(cp.Minimize(quadratic - linear)).solve(
            cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10
        )
        for k, block in enumerate(blocks):
            expected = torch.tensor(W[k].T @ y[k].value)
            torch.testing.assert_close(block[i], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.spec("R2.4")
def test_three_units_have_no_objective_and_say_so():
    deep, x = DeepOptEq(mixed_units(3), 0.8), inputs()
    equation = deep.bind(x)
    assert equation.objective is None
    assert MultiBlockEquation(equation.units).objective is None
    for of_three in (equation, MultiBlockEquation(equation.units)):
        with pytest.raises(
            ConfigError, match=r"fixed points, .*; see opteq\.theory\.theorem2 for deep models"
        ):
            of_three.curvature()
    with pytest.raises(ConfigError, match="Corollary 1 is about two units, got 3"):
        corollary1_objective(equation, random(4, STATE))
    solution = EquilibriumLayer(deep, EXACT).solve(x, trace=True)
    assert solution.trace is not None
    assert solution.trace.energy is None


@pytest.mark.spec("R2.4")
def test_the_shift_of_three_blocks_is_no_gradient():
    # z ↦ (I - P) z has a potential only if it is symmetric.
    def shift(count):
        return torch.eye(count) - torch.eye(count).roll(1, dims=0)

    assert torch.equal(shift(2), shift(2).mT)
    assert not torch.equal(shift(3), shift(3).mT)


@pytest.mark.spec("R1.3")
@pytest.mark.parametrize("mu", [1.0, 2.0])
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus", "elu"])
def test_the_map_is_the_prox_of_the_closed_form(activation, mu):
    unit = dense_unit(hidden=STATE, activation=activation, norm=[0.9, 0.8, 0.6, 0.5, 0.3], mu=mu)
    equation, z = unit.bind(inputs()).detach(), random(4, STATE)
    p = equation(z)

    def objective(u):
        return closed_form_objective(equation, u) + 0.5 * (u - z).square().sum(1)

    # y = σ(·) may lie on the border of the domain, where rounding decides; a step inwards decides nothing.
    W = unit.W.weights[0].detach()
    inward = equation.activation(torch.ones(4, STATE).double()) @ W * 1e-9
    least = objective(p + (inward if activation == "relu" else 0))
    assert torch.isfinite(least).all()
    for seed in range(30):
        other = p + 10.0 ** -(seed % 4) * random(4, STATE, seed=seed)
        assert (objective(other) >= least - 1e-7).all()
    star = equilibrium(unit, inputs())
    value = closed_form_objective(equation, star + (inward if activation == "relu" else 0))
    torch.testing.assert_close(value, equation.objective(star), rtol=1e-6, atol=1e-7)


def test_what_the_functions_are_not_about_is_refused():
    x, z = inputs(), random(4, STATE)
    with pytest.raises(ConfigError, match="needs a square invertible `W`, got one of shape"):
        closed_form_objective(dense_unit().bind(x), z)
    images = OptEqUnit(Conv2d(2, 2), Conv2d(2, 2)).bind(torch.randn(1, 2, 3, 3))
    with pytest.raises(ConfigError, match="needs a dense `W`; use `objective`"):
        closed_form_objective(images, torch.randn(1, 2, 3, 3))
    for alpha in (0.0, 1.0):
        with pytest.raises(ConfigError, match=r"Expected `alpha` to be in \(0, 1\), at whose end 1 .*, got"):
            Envelope(dense_unit().bind(x), alpha)
    deep = DeepOptEq(mixed_units(3))
    with pytest.raises(ConfigError, match="Expected a proximal equation, got ChainEquation"):
        Envelope(deep.bind(x), 0.5)
    with pytest.raises(ConfigError, match="Expected the units of a deep OptEq, got StepEquation"):
        theorem2_residual(Regularised(deep, SquaredNorm(), 0.1).bind(x), z)
    with pytest.raises(ConfigError, match="equation of a DeepOptEq or MultiBlockOptEq, got a OptEqEquation"):
        theorem2_residual(dense_unit().bind(x), z)
    with pytest.raises(ShapeError, match=r"Expected 3 blocks of shape \(4, 5\).*got \(3, 5\)"):
        theorem2_residual(deep.bind(x), z[:3])
    with pytest.raises(ShapeError, match=r"Expected 3 blocks of shape \(4, 5\).*got \(4, 5\)\."):
        theorem2_residual(MultiBlockOptEq(deep).bind(x), z)
