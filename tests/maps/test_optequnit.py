"""The unit is the proximal operator that theory says it is."""

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opteq import (
    Anderson,
    AveragePool,
    Conv2d,
    Dense,
    EquilibriumLayer,
    Implicit,
    Nesterov,
    OptEqUnit,
    Picard,
)
from opteq.activations import Activation
from opteq.errors import ConfigError, ShapeError
from opteq.maps.optequnit import OptEqEquation
from opteq.operators.dense import BoundDense
from opteq.solvers.base import solve_fixed_point
from tests.conformance.instances import ACTIVATIONS, seeded
from tests.conformance.reference import jacobian, random

seeds = st.integers(0, 10_000)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
every_mu = pytest.mark.parametrize("mu", [1.0, 2.5])
EXACT = Anderson(tol=1e-13, max_steps=3000)


def unit(
    activation: Activation | str = "relu",
    mu: float = 1.0,
    hidden: int = 6,
    seed: int = 0,
    max_norm: float | None = None,
) -> OptEqUnit:
    """A unit with a dense `W` (4 → hidden), singular values up to `0.95 √μ`."""
    module = seeded(
        lambda: OptEqUnit(Dense(4, hidden), Dense(3, hidden), activation, mu=mu, max_norm=max_norm), seed
    )
    with torch.no_grad():
        left, _, right = torch.linalg.svd(module.W.weights[0], full_matrices=False)
        values = mu**0.5 * torch.linspace(0.95, 0.3, min(4, hidden), dtype=torch.float64)
        module.W.weights[0].copy_(left @ torch.diag(values) @ right)
        assert module.injection.bias is not None
        module.injection.bias.copy_(random(hidden, seed=seed))
    return module


def equation_of(module: OptEqUnit, batch: int = 5, seed: int = 0) -> OptEqEquation:
    return module.bind(2 * random(batch, 3, seed=seed)).detach()


def matrix(equation: OptEqEquation) -> Tensor:
    return equation.W.tensors[0]


@every_activation
@every_mu
@pytest.mark.spec("R1.1")
def test_values_are_those_of_the_formula(activation: Activation, mu: float):
    module = unit(activation, mu)
    x, z = random(5, 3), random(5, 4, seed=1)
    (W,), U, b = module.W.weights, module.injection.operator.weight, module.injection.bias
    expected = torch.stack([W.mT @ activation(W @ zi + U @ xi + b) / mu for xi, zi in zip(x, z, strict=True)])
    torch.testing.assert_close(module.bind(x)(z), expected, rtol=1e-12, atol=1e-13)


@every_activation
@every_mu
@given(seed=seeds, scale=st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=10)
@pytest.mark.spec("R1.2")
def test_firmly_nonexpansive(activation: Activation, mu: float, seed: int, scale: float):
    equation = equation_of(unit(activation, mu, seed=seed), batch=50)
    a, b = scale * random(50, 4, seed=seed + 1), scale * random(50, 4, seed=seed + 2)
    rise = equation(a) - equation(b)
    assert (rise.square().sum(1) <= (rise * (a - b)).sum(1) + 1e-12 * scale**2).all()


@every_activation
@every_mu
@pytest.mark.spec("R1.2", "R1.3")
def test_the_map_is_a_gradient(activation: Activation, mu: float):
    equation = equation_of(unit(activation, mu))
    z = random(5, 4).requires_grad_()
    psi = activation.potential(z @ matrix(equation).mT + equation.injection).sum() / mu
    torch.testing.assert_close(torch.autograd.grad(psi, z)[0], equation(z).detach(), rtol=1e-11, atol=1e-12)
    gradient = torch.autograd.grad(equation.objective(z).sum(), z)[0]
    torch.testing.assert_close(gradient, (z - equation(z)).detach(), rtol=1e-11, atol=1e-12)


@every_activation
@pytest.mark.spec("R1.3")
def test_the_energy_is_convex_with_slope_at_most_one(activation: Activation):
    equation = equation_of(unit(activation))
    hessian = jacobian(lambda z: z - equation(z), random(5, 4))
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert eigenvalues.min() >= -1e-13
    assert eigenvalues.max() <= 1 + 1e-13


def phi(equation: OptEqEquation, z: Tensor) -> Tensor:
    """The explicit objective (OptEq, Eq. 4) for square invertible `W`; `σ̃* = f + ½(·)²`."""
    v = torch.linalg.solve(matrix(equation).mT, z.mT).mT  # W⁻ᵀz
    conjugate = equation.activation.penalty(equation.mu * v) + 0.5 * (equation.mu * v).square()
    return conjugate.sum(1) / equation.mu - (equation.injection * v).sum(1) - 0.5 * z.square().sum(1)


@every_activation
@every_mu
@pytest.mark.spec("R1.3")
def test_both_objectives_agree_at_the_equilibrium(activation: Activation, mu: float):
    module = unit(activation, mu, hidden=4)
    equation = equation_of(module)
    star = EquilibriumLayer(module, EXACT)(2 * random(5, 3)).detach()
    assert torch.isfinite(equation.objective(star)).all()
    # Feasible for indicators only up to rounding, so a step of the hidden state makes it so exactly.
    hidden = activation(equation.preactivation(star))
    torch.testing.assert_close(
        equation.hidden_objective(hidden), equation.objective(star), rtol=1e-9, atol=1e-10
    )
    if not activation.indicator:
        torch.testing.assert_close(phi(equation, star), equation.objective(star), rtol=1e-9, atol=1e-10)


def solve(objective: cp.Expression, constraints: list[cp.Constraint]) -> None:
    cp.Problem(cp.Minimize(objective), constraints).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11
    )


@every_mu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.spec("R1.3")
def test_the_relu_equilibrium_solves_the_quadratic_program(mu: float, seed: int):
    # φ(z) = μ/2 ‖v‖² - ⟨c, v⟩ - ½‖z‖² over v = W⁻ᵀz ≥ 0.
    module = unit(mu=mu, hidden=4, seed=seed)
    equation = equation_of(module, seed=seed)
    star = EquilibriumLayer(module, EXACT)(2 * random(5, 3, seed=seed)).detach().numpy()
    inverse = np.linalg.inv(matrix(equation).numpy()).T
    quadratic = mu * inverse.T @ inverse - np.eye(4)
    assert np.linalg.eigvalsh(quadratic).min() > 0
    active = 0
    for c, expected in zip(equation.injection.numpy(), star, strict=True):
        z = cp.Variable(4)
        v = inverse @ z
        solve(0.5 * cp.quad_form(z, cp.psd_wrap(quadratic)) - c @ v, [v >= 0])
        np.testing.assert_allclose(z.value, expected, atol=1e-7)
        active += int((inverse @ expected > 1e-6).sum())
    assert 0 < active < 20  # neither all nor none of the constraints bind


@every_mu
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.spec("R1.2")
def test_the_relu_unit_is_the_proximal_operator_of_its_objective(mu: float, seed: int):
    # argmin φ(u) + ½‖u - z‖² = argmin μ/2 ‖v‖² - ⟨c, v⟩ - ⟨z, u⟩ over v = W⁻ᵀu ≥ 0.
    equation = equation_of(unit(mu=mu, hidden=4, seed=seed), seed=seed)
    inverse = np.linalg.inv(matrix(equation).numpy()).T
    points = 2 * random(5, 4, seed=seed + 1)
    for c, z, expected in zip(
        equation.injection.numpy(), points.numpy(), equation(points).numpy(), strict=True
    ):
        u = cp.Variable(4)
        v = inverse @ u
        solve(0.5 * mu * cp.sum_squares(v) - c @ v - z @ u, [v >= 0])
        np.testing.assert_allclose(u.value, expected, atol=1e-7)


@pytest.mark.spec("R1.3")
def test_a_singular_weight_has_its_energy_all_the_same():
    # Rank one, and wide: no inverse, but the equilibrium minimises Q.
    module = unit(hidden=3)
    with torch.no_grad():
        module.W.weights[0].copy_(0.3 * torch.outer(random(3), random(4, seed=1)))
    equation = equation_of(module)
    star = EquilibriumLayer(module, EXACT)(2 * random(5, 3)).detach().requires_grad_()
    assert torch.autograd.grad(equation.objective(star).sum(), star)[0].norm() < 1e-11
    for i, c in enumerate(equation.injection.numpy()):
        z, y = cp.Variable(4), cp.Variable(3)
        # -σ̃ is concave, so the minimum is looked for in the hidden form: G(y), with z = Wᵀy.
        W = matrix(equation).numpy()
        solve(
            0.5 * cp.quad_form(y, cp.psd_wrap(np.eye(3) - W @ W.T)) - c @ y,
            [y >= 0, z == W.T @ y],
        )
        np.testing.assert_allclose(z.value, star[i].detach().numpy(), atol=1e-7)


@every_activation
@every_mu
@pytest.mark.spec("R1.4")
def test_the_reformulated_unit(activation: Activation, mu: float):
    module = unit(activation, mu)
    equation = equation_of(module)
    W, c = matrix(equation), equation.injection
    # Its own plain iteration, on y.
    y = torch.zeros(5, 6, dtype=torch.float64)
    for _ in range(3000):
        y = activation(y @ (W @ W.mT) / mu + c)
    star = EquilibriumLayer(module, EXACT)(2 * random(5, 3)).detach()
    torch.testing.assert_close(y @ W / mu, star, rtol=1e-9, atol=1e-10)

    # Least at y* among feasible points (values of σ), and equal to the energy of z*.
    energy = equation.hidden_objective(y)
    terms = activation.penalty(y) + 0.5 * y.square() - c * y
    by_hand = (terms.sum(1) - (y @ W).square().sum(1) / (2 * mu)) / mu
    torch.testing.assert_close(energy, by_hand, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(energy, equation.objective(star), rtol=1e-9, atol=1e-10)
    for seed in range(30):
        step = 10.0 ** (-(seed % 3)) * random(5, 6, seed=seed)
        other = activation(y @ (W @ W.mT) / mu + c + step)
        different = (other - y).norm(dim=1) > 1e-3
        assert (equation.hidden_objective(other) > energy)[different].all()


@pytest.mark.parametrize("activation", ["softplus", "strongly_monotone", "tanh", "elu"])
@every_mu
@pytest.mark.spec("R1.4")
def test_the_reformulated_unit_is_stationary(activation: str, mu: float):
    module = unit(activation, mu)
    equation = equation_of(module)
    star = EquilibriumLayer(module, EXACT)(2 * random(5, 3)).detach()
    y = equation.activation(equation.preactivation(star)).requires_grad_()
    gradient = torch.autograd.grad(equation.hidden_objective(y).sum(), y)[0]
    assert gradient.abs().max() < 1e-9


@every_activation
@pytest.mark.spec("R1.2")
def test_the_energy_falls_along_the_plain_iteration(activation: Activation):
    solution = EquilibriumLayer(
        unit(activation), Picard(tol=1e-6, max_steps=40), on_unconverged="count"
    ).solve(2 * random(5, 3), trace=True)
    assert solution.trace is not None
    energy = solution.trace.energy
    assert energy is not None
    assert (energy.diff(dim=1) <= 1e-13).all()
    assert (energy[:, 0] - energy[:, -1] > 1e-3).all()


@given(seed=seeds)
@settings(max_examples=20)
@pytest.mark.spec("R1.1")
def test_the_certificate_is_sharp_for_a_linear_unit(seed: int):
    equation = equation_of(unit("identity", mu=1.7, seed=seed))
    true = torch.linalg.matrix_norm(jacobian(equation, random(5, 4)), 2)
    torch.testing.assert_close(equation.contraction().value, true, rtol=1e-10, atol=0)


def kept_unit(activation: Activation | str = "relu", mu: float = 1.0, hidden: int = 6) -> OptEqUnit:
    """A unit whose norm is kept where Theorem 1 asks for it, by a ceiling that its weights are below."""
    return unit(activation, mu, hidden, max_norm=0.97 * mu**0.5)


@every_activation
@every_mu
@pytest.mark.parametrize("hidden", [3, 6])
def test_the_hidden_variable_has_the_same_equilibrium(activation: Activation, mu: float, hidden: int):
    module = kept_unit(activation, mu, hidden)
    equation = equation_of(module, 40)
    form = equation.reformulate()
    assert form.recover is not None
    assert form.scale == pytest.approx(1, rel=1e-12)
    W = matrix(equation)
    torch.testing.assert_close(form.first, form.function(form.initial), rtol=0, atol=0)
    z = random(40, 4, seed=3)
    # F(W z) = W T(z), and the recovered state is T(z).
    torch.testing.assert_close(form.function(z @ W.mT), equation(z) @ W.mT, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(form.recover(z @ W.mT), equation(z), rtol=1e-12, atol=1e-13)
    exact, _ = solve_fixed_point(equation, equation.initial(), EXACT)
    found = EquilibriumLayer(module, EXACT)(2 * random(40, 3))
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


@every_activation
@every_mu
@pytest.mark.parametrize("hidden", [3, 6])
def test_the_adjoint_in_the_hidden_variable_gives_the_same_gradients(
    activation: Activation, mu: float, hidden: int
):
    equation = equation_of(kept_unit(activation, mu, hidden), 40)
    assert equation.gram is not None
    z, g = random(40, 4, seed=3), random(40, 4, seed=4)
    J = jacobian(equation, z)
    u = torch.linalg.solve(torch.eye(4) - J.mT, g[:, :, None])[:, :, 0]
    expected = equation.linearize(z).pullback(u)
    method = Implicit(tol=1e-13, max_steps=200)
    infos = []
    torch.testing.assert_close(method.pullback(equation, z, g, infos.append), expected, rtol=1e-9, atol=1e-10)
    assert infos[0].converged.all()
    form = equation.linearize(z).symmetric
    assert form is not None
    D = equation.activation.derivative(equation.preactivation(z))
    q = (D / mu).sqrt() * (u @ matrix(equation).mT)
    torch.testing.assert_close(form.enter(g) + form.matvec(q), q, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(form.leave(q, g), u, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
def test_a_residual_of_the_hidden_variable_bounds_that_of_the_state(tol: float):
    module = kept_unit()
    x = 2 * random(200, 3)
    assert module.bind(x).detach().reformulate().recover is not None
    solution = EquilibriumLayer(module, Anderson(tol=tol)).solve(x)
    image = module.bind(x)(solution.state)
    residual = (image - solution.state).norm(dim=1) / image.norm(dim=1)
    assert solution.info.converged.all()
    rounding = 1e-15
    assert (residual <= solution.info.residual * (1 + tol) + rounding).all()
    assert residual.max() > 1e-3 * tol


def test_gradient_steps_do_without_the_gram_matrix(monkeypatch):
    monkeypatch.setattr(BoundDense, "gram", lambda *_: pytest.fail("no one uses it"))
    value = EquilibriumLayer(kept_unit(), Nesterov(), Implicit(method="gmres"))(2 * random(40, 3))
    value.sum().backward()


def test_the_gram_matrix_belongs_to_its_weights_and_to_full_precision():
    equation, y = equation_of(kept_unit(), 40), random(40, 6, seed=3)
    W = matrix(equation)
    assert equation.gram is not None
    torch.testing.assert_close(equation.gram(y), y @ W @ W.mT, rtol=1e-12, atol=1e-13)
    # Other weights have a matrix of their own.
    injection, weight = equation.tensors
    other = equation.with_tensors((injection, 0.5 * weight))
    assert other.gram is not None
    torch.testing.assert_close(other.gram(y), y @ W @ W.mT / 4, rtol=1e-12, atol=1e-13)
    with torch.autocast("cpu"):
        assert equation_of(kept_unit(), 40).gram is None
    # A hidden variable twice as large as the state saves nothing, and a sample or two of many numbers little.
    assert equation_of(kept_unit(hidden=9), 40).gram is None
    bound = Dense(64, 64).bind((64,))
    assert bound.gram(products=64) is None
    assert bound.gram(products=65) is not None


@pytest.mark.parametrize("norm", [0.9, 1.3])
@pytest.mark.parametrize(
    "options", [{"max_norm": None}, {"max_norm": 1.31}, {"activation": "softplus", "mu": 0.9}]
)
def test_where_a_norm_is_only_trusted_in_the_residual_is_measured(norm: float, options: dict):
    # That of u may be the smaller one where L_σ‖W‖² exceeds μ.
    module, x = unit(**options), 2 * random(40, 3)
    module.norm_checked = True
    with torch.no_grad():
        module.W.weight.mul_(norm / torch.linalg.matrix_norm(module.W.weight, 2))
    form = module.bind(x).detach().reformulate()
    assert form.recover is not None
    assert form.measured
    for tol in (1e-3, 1e-9):
        layer = EquilibriumLayer(module, Anderson(tol=tol, max_steps=300), on_unconverged="count")
        solution = layer.solve(x)
        image = module.bind(x)(solution.state)
        residual = (image - solution.state).norm(dim=1) / image.norm(dim=1)
        torch.testing.assert_close(solution.info.residual, residual, rtol=1e-6, atol=1e-13)
        assert (solution.info.converged <= (residual <= tol)).all()
        if norm < 1:
            assert solution.info.converged.all()
    assert not equation_of(kept_unit(), 40).reformulate().measured


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: OptEqUnit(torch.nn.Conv2d(2, 2, 3), Conv2d(2, 2)),
            r"opteq operator .*for `W`, got torch\.nn.*Conv2d",
        ),
        (lambda: OptEqUnit(Conv2d(2, 3), Conv2d(2, 4)), "produce the 3 channels that `W` produces, got 4"),
        (lambda: OptEqUnit(Dense(2, 3), Dense(2, 3), mu=0.0), "`mu` to be positive and finite, got 0"),
        (lambda: OptEqUnit(Dense(2, 3), Dense(2, 3), mu="1"), "`mu` to be positive and finite, got '1'"),
        (lambda: OptEqUnit(Dense(2, 3), Dense(2, 3), max_norm=-1.0), "`max_norm` to be positive or None"),
        (lambda: OptEqUnit(Dense(2, 3), Dense(2, 3), "swish"), "`activation` to be one of identity, relu"),
        (lambda: OptEqUnit(Dense(2, 3), "U"), "Expected `U` to be an opteq operator or a torch module"),
        (
            lambda: OptEqUnit(Dense(2, 3), Dense(2, 3), bias="x"),
            "Expected `bias` to be True or False, got 'x'",
        ),
    ],
)
def test_impossible_units_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_operator_that_changes_the_size_is_refused():
    module = OptEqUnit(AveragePool(2, 2), Conv2d(2, 2))
    with pytest.raises(ShapeError, match=r"Expected `W` to produce \(2, 4, 4\) as `U` does, got \(2, 2, 2\)"):
        module.bind(torch.zeros(1, 2, 4, 4))


def test_an_injection_without_the_sides_of_the_state_is_refused():
    module = OptEqUnit(Conv2d(2, 3), Dense(4, 3))
    with pytest.raises(ShapeError, match=r"`U` to give \(batch, 3, H, W\) as `W` does, got \(1, 3\)"):
        module.bind(torch.zeros(1, 4))


def test_an_injection_of_several_tensors_is_refused():
    module = OptEqUnit(Dense(2, 3), torch.nn.LSTM(4, 3))
    with pytest.raises(ShapeError, match="Expected `U` to give one tensor, got tuple"):
        module.bind(torch.zeros(1, 4))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_injections_of_images_have_their_channels_last(layout):
    # In that layout convolutions on a processor run fastest, and states are made like the injection.
    equation = OptEqUnit(Conv2d(2, 3), Conv2d(2, 3)).bind(
        torch.randn(2, 2, 4, 5).contiguous(memory_format=layout)
    )
    for t in (equation.injection, equation.initial(), equation.first_iterate()):
        assert t.is_contiguous(memory_format=torch.channels_last)


def test_any_module_may_inject():
    stem = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, stride=2, padding=1), torch.nn.BatchNorm2d(4))
    layer = EquilibriumLayer(OptEqUnit(Conv2d(3, 4), stem, bias=False))
    z = layer(torch.randn(2, 1, 8, 8))
    z.sum().backward()
    assert z.shape == (2, 3, 4, 4)
    assert all(p.grad is not None and p.grad.any() for p in stem.parameters())
    with pytest.raises(ShapeError, match=r"Expected `U` to give \(batch, 4, ...\), got \(2, 5"):
        OptEqUnit(Conv2d(3, 4), torch.nn.Conv2d(1, 5, 3)).bind(torch.randn(2, 1, 8, 8))


def test_certificates_speak_of_a_size_where_there_is_one():
    images = OptEqUnit(Conv2d(2, 3), Conv2d(2, 3)).bind(torch.zeros(1, 2, 4, 4))
    assert unit().bind(torch.zeros(1, 3, dtype=torch.float64)).contraction().assumptions == (
        "The norm of W is bounded.",
    )
    assert "height and width" in images.contraction().assumptions[0]
