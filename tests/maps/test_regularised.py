"""Regularised maps against a convex solver, and regularisers that compare samples."""

import copy

import cvxpy as cp
import numpy as np
import pytest
import torch

from opteq import (
    HSIC,
    AbsoluteNorm,
    Anderson,
    Decorrelation,
    DeepOptEq,
    EquilibriumLayer,
    Implicit,
    Incay,
    Picard,
    RandomFeatureHSIC,
    Regularised,
    SquaredNorm,
    Unrolled,
    solve_log,
)
from opteq.errors import ConfigError
from tests.conformance.reference import jacobian, random
from tests.maps.problems import EXACT, STATE, conv_unit, dense_unit, equilibrium, formula, inputs, mixed_units

COUPLED = {
    "decorrelation": lambda: (Decorrelation(), 0.002),
    "hsic": lambda: (HSIC(), 0.1),
    "random-hsic": lambda: (RandomFeatureHSIC(8), 0.1),
}
every_coupled = pytest.mark.parametrize("make", COUPLED.values(), ids=COUPLED)


def minimiser(unit, x, extra):
    """`argmin_z φ(z) + extra(z)` of a ReLU unit with square `W`, a quadratic program, by a convex solver.

    With `y = W⁻ᵀz`: `φ = ½‖y‖² - ⟨c, y⟩ - ½‖Wᵀy‖²` on `y ≥ 0`.
    """
    W = unit.W.weights[0].detach().numpy()
    c = unit.injection(x).detach().numpy()
    solutions = []
    for row in c:
        y = cp.Variable(len(row), nonneg=True)
        z = W.T @ y
        curvature = np.eye(len(row)) - W @ W.T
        phi = 0.5 * cp.quad_form(y, cp.psd_wrap(curvature)) - row @ y
        problem = cp.Problem(cp.Minimize(phi + extra(z)))
        problem.solve(cp.CLARABEL, tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10)
        assert problem.status == cp.OPTIMAL
        solutions.append(W.T @ y.value)
    return torch.tensor(np.stack(solutions))


def square_unit():
    return dense_unit(seed=3, hidden=STATE, norm=[0.9, 0.8, 0.6, 0.5, 0.3])


@pytest.mark.spec("R1.3", "R4.2")
@pytest.mark.parametrize(
    ("regulariser", "form", "extra"),
    [
        (None, None, lambda z: 0),
        # Gradient form: φ + γR.
        (SquaredNorm(), "gradient", lambda z: 0.2 * cp.sum_squares(z)),
        # Prox form: φ plus the Moreau envelope of γR, here γ/(1+γ)·½‖·‖² and Huber's function.
        (SquaredNorm(), "prox", lambda z: 0.2 / 1.4 * cp.sum_squares(z)),
        (AbsoluteNorm(), "prox", lambda z: 0.5 * cp.sum(cp.huber(z, 0.4))),
    ],
    ids=["none", "gradient-square", "prox-square", "prox-absolute"],
)
def test_the_equilibrium_minimises_the_regularised_objective(regulariser, form, extra):
    unit, x = square_unit(), inputs()
    module = unit if regulariser is None else Regularised(unit, regulariser, 0.4, form)
    star = equilibrium(module, x)
    assert star.abs().max() > 0.1
    torch.testing.assert_close(star, minimiser(unit, x, extra), rtol=1e-6, atol=1e-6)


@pytest.mark.spec("R4.2")
def test_the_prox_form_does_not_minimise_the_printed_objective():
    unit, x = square_unit(), inputs()
    star = equilibrium(Regularised(unit, SquaredNorm(), 0.4, "prox"), x)
    printed = minimiser(unit, x, lambda z: 0.2 * cp.sum_squares(z))
    assert (star - printed).abs().max() > 1e-2


@pytest.mark.spec("R4.2")
@pytest.mark.parametrize(
    ("regulariser", "form", "step"),
    [
        (SquaredNorm(), "gradient", lambda z: 0.7 * z),
        (SquaredNorm(), "prox", lambda z: z / 1.3),
        (AbsoluteNorm(), "prox", lambda z: z.sign() * (z.abs() - 0.3).clamp(min=0)),
        (Incay(0.8), "gradient", lambda z: (1 + 1.2 / (z.square().sum(1, keepdim=True) + 1.6) ** 2) * z),
    ],
)
def test_values_are_those_of_the_formula(regulariser, form, step):
    unit, x, z = dense_unit(), inputs(), random(4, STATE)
    equation = Regularised(unit, regulariser, 0.3, form).bind(x)
    torch.testing.assert_close(equation(z), formula(unit, x, step(z)), rtol=1e-12, atol=1e-13)


UNCOUPLED = {
    "gradient-square": lambda inner: Regularised(inner, SquaredNorm(), 1.3),
    "prox-square": lambda inner: Regularised(inner, SquaredNorm(), 0.4, "prox"),
    "prox-absolute": lambda inner: Regularised(inner, AbsoluteNorm(), 0.1, "prox"),
    "incay": lambda inner: Regularised(inner, Incay(), 0.05),
}
INNER = {
    "unit": lambda: dense_unit(norm=0.8),
    "deep": lambda: DeepOptEq(mixed_units(3, norm=0.8), 0.7),
}


@pytest.mark.spec("R4.2", "R3.1", "R3.2")
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
@pytest.mark.parametrize("make", UNCOUPLED.values(), ids=UNCOUPLED)
@pytest.mark.parametrize("method", ["auto", "anderson", "gmres"])
def test_implicit_gradients_are_unrolled_ones(make, inner, method):
    module, x = make(inner()), inputs().requires_grad_()
    wanted, results = (x, *module.parameters()), []
    for solver, gradient in ((EXACT, Implicit(1e-13, 1000, method)), (None, Unrolled(1000))):
        z = EquilibriumLayer(module, solver, gradient, "raise")(x)
        results.append(torch.autograd.grad((z * random(*z.shape)).sum(), wanted))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-8)


@pytest.mark.spec("R4.2", "R3.1")
@pytest.mark.parametrize("make", UNCOUPLED.values(), ids=UNCOUPLED)
def test_one_regularised_unit_has_an_energy_and_a_symmetric_form(make):
    module, x = make(dense_unit(norm=0.8)), inputs()
    equation, star = module.bind(x).detach(), equilibrium(module, x)
    assert equation.objective is not None
    for seed in range(12):
        other = star + 10.0 ** -(seed % 4) * random(4, STATE, seed=seed)
        assert (equation.objective(other) >= equation.objective(star)).all()
    linearization, J = equation.linearize(star), jacobian(equation, star)
    v = random(4, STATE, seed=1)
    for product, dense in ((linearization.jvp, J), (linearization.vjp, J.mT)):
        torch.testing.assert_close(product(v), (dense @ v[..., None])[..., 0], rtol=1e-9, atol=1e-10)
    assert linearization.symmetric is not None
    assert equation.structure == "none"
    assert (torch.linalg.matrix_norm(J, 2) <= equation.contraction().value * (1 + 1e-12)).all()


@pytest.mark.spec("R4.2")
def test_the_energy_is_the_regularised_objective():
    # φ in closed form plus γR at the feasible point T(z).
    unit, x, z = square_unit(), inputs(), random(4, STATE)
    equation = Regularised(unit, SquaredNorm(), 0.4).bind(x).detach()
    point = equation(z)
    y = torch.linalg.solve(unit.W.weights[0].detach().mT, point.mT).mT
    c = unit.injection(x).detach()
    phi = 0.5 * y.square().sum(1) - (c * y).sum(1) - 0.5 * point.square().sum(1)
    expected = phi + 0.2 * point.square().sum(1)
    torch.testing.assert_close(equation.objective(z), expected, rtol=1e-10, atol=1e-11)


@every_coupled
@pytest.mark.spec("R4.1", "R4.2", "R3.1", "R3.2")
@pytest.mark.parametrize("method", ["anderson", "gmres"])
def test_coupled_implicit_gradients_are_unrolled_ones(make, method):
    regulariser, gamma = make()
    module = Regularised(DeepOptEq(mixed_units(2, norm=0.7), 0.9), regulariser, gamma)
    x = inputs().requires_grad_()
    wanted, results = (x, *module.parameters()), []
    solver = Picard(tol=1e-13, max_steps=5000)
    for solver_, gradient in ((solver, Implicit(1e-12, 1000, method)), (None, Unrolled(1500))):
        z = EquilibriumLayer(module, solver_, gradient, "raise")(x)
        results.append(torch.autograd.grad((z * random(*z.shape)).sum(), wanted))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)
    plain = EquilibriumLayer(module.map, EXACT)(x)
    assert (plain - z).abs().max() > 1e-4


@every_coupled
@pytest.mark.spec("R4.1")
def test_a_coupled_batch_is_solved_as_one_system(make):
    regulariser, gamma = make()
    module = Regularised(conv_unit(), regulariser, gamma)
    x = random(4, 2, 4, 4)
    x[0] *= 1e-3  # a sample that would stop long before the others
    layer = EquilibriumLayer(module, Anderson(tol=1e-8, max_steps=500), on_unconverged="raise")
    with solve_log(layer) as log:
        solution = layer.solve(x.requires_grad_())
        solution.value.sum().backward()
    assert len(set(solution.info.steps.tolist())) == 1
    assert solution.info.residuals.shape == (4, solution.info.evaluations)
    assert log.forward.samples == log.adjoint.samples == 4
    value = solution.value.detach()
    torch.testing.assert_close(module.bind(x).detach()(value), value, rtol=0, atol=1e-6)


@every_coupled
@pytest.mark.spec("R4.1")
def test_in_eval_mode_samples_are_compared_with_the_last_training_batch(make):
    regulariser, gamma = make()
    module = Regularised(dense_unit(norm=0.7), regulariser, gamma)
    layer = EquilibriumLayer(module, Anderson(tol=1e-11, max_steps=1000), on_unconverged="raise")
    x = inputs(6)
    trained = layer(x)
    torch.testing.assert_close(regulariser.reference, trained.detach(), rtol=0, atol=1e-6)
    layer.eval()
    together = layer(x)
    # As the reference is the equilibrium itself, so is what is found against it.
    torch.testing.assert_close(together, trained, rtol=0, atol=1e-5)
    # Predictions do not depend on the other images.
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-8)
    assert len(set(layer.solve(x).info.steps.tolist())) > 1
    # The reference is saved, whatever its size.
    other = Regularised(dense_unit(norm=0.7), make()[0], gamma).eval()
    other.load_state_dict(module.state_dict())
    found = EquilibriumLayer(other, layer.solver)(x[:1])
    torch.testing.assert_close(found, together[:1], rtol=0, atol=1e-8)
    assert copy.deepcopy(other).regulariser.reference is not None


@every_coupled
@pytest.mark.spec("R4.1")
def test_coupled_regularisers_refuse_what_they_cannot_compare(make):
    regulariser, gamma = make()
    layer = EquilibriumLayer(
        Regularised(dense_unit(), regulariser, gamma), Anderson(tol=1e-14, max_steps=500)
    )
    with pytest.raises(ConfigError, match="compares the samples of a batch, and this one has one"):
        layer(inputs(1))
    layer.eval()
    # Before any training there is nothing to compare with.
    plain = EquilibriumLayer(dense_unit(), layer.solver)
    torch.testing.assert_close(layer(inputs(1)), plain(inputs(1)), rtol=0, atol=1e-12)
    regulariser.reference = random(4, STATE + 1)
    with pytest.raises(ConfigError, match=r"features of shape \(6,\) and cannot be compared with \(5,\)"):
        layer(inputs(1))


@pytest.mark.parametrize(
    ("regulariser", "gamma", "form", "constant"),
    [
        (SquaredNorm(), 0.4, "gradient", 0.6),
        (SquaredNorm(), 1.7, "gradient", 0.7),
        (SquaredNorm(), 3.0, "prox", 0.25),
        (AbsoluteNorm(), 0.1, "prox", 1.0),
        # The curvature lies between -1/ε² and 1/(4ε²).
        (Incay(0.5), 0.1, "gradient", 1.4),
    ],
)
@pytest.mark.spec("R4.2")
def test_the_step_of_a_regulariser_contracts_by_its_curvature(regulariser, gamma, form, constant):
    step, _ = Regularised(dense_unit(), regulariser, gamma, form).bind(inputs()).units
    bound = step.contraction()
    torch.testing.assert_close(bound.value, torch.full((4,), constant, dtype=torch.float64))
    assert bound.kind == "bound"


def test_the_step_of_a_regulariser_of_unknown_curvature_is_estimated():
    step, _ = Regularised(dense_unit(), HSIC(), 0.01).eval().bind(inputs()).units
    bound = step.contraction()
    assert bound.kind == "estimate"
    assert bound.assumptions == ("The curvature of HSIC(bandwidth=1.0) is not bounded and was left out.",)


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match=r"`gamma` below 2/L = 2 for SquaredNorm\(\), got 2.5"):
        Regularised(dense_unit(), SquaredNorm(), 2.5)
    with pytest.raises(ConfigError, match=r"AbsoluteNorm\(\) has no Lipschitz constant; use form='prox'"):
        Regularised(dense_unit(), AbsoluteNorm(), 0.1)
    with pytest.raises(ConfigError, match=r"Incay.*has no proximal operator; use form='gradient'"):
        Regularised(dense_unit(), Incay(), 0.1, "prox")
    with pytest.raises(ConfigError, match="Expected `form` to be one of gradient, prox, got 'proximal'"):
        Regularised(dense_unit(), SquaredNorm(), 0.1, "proximal")
    with pytest.raises(ConfigError, match="Expected `gamma` to be positive and finite, got 0"):
        Regularised(dense_unit(), SquaredNorm(), 0)
    with pytest.raises(ConfigError, match="`gamma` to be positive and finite, got inf"):
        Regularised(dense_unit(), SquaredNorm(), float("inf"), "prox")
    with pytest.raises(ConfigError, match="`gamma` to be positive and finite, got '1'"):
        Regularised(dense_unit(), SquaredNorm(), "1", "prox")
    with pytest.raises(ConfigError, match=r"`regulariser` to be one such as SquaredNorm\(\), got <class"):
        Regularised(dense_unit(), SquaredNorm, 0.1)
