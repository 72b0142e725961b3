"""The modified units of Xie et al. 2022, Table 1, and what they do to the fixed point."""

import copy

import pytest
import torch

from opteq import (
    AffineChange,
    Anderson,
    Conv2d,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    Implicit,
    LinearMixing,
    MoreauSkip,
    MultiBlockOptEq,
    Nesterov,
    OptEqUnit,
    Regularised,
    SquaredNorm,
    Unrolled,
)
from opteq.errors import ConfigError, ShapeError
from opteq.theory.envelope import Envelope
from tests.conformance.instances import seeded
from tests.conformance.reference import jacobian, random
from tests.maps.problems import EXACT, STATE, conv_unit, dense_unit, equilibrium, formula, inputs

pytestmark = pytest.mark.spec("R1.5")


def matrix(condition: float = 5.0, size: int = STATE) -> torch.Tensor:
    left, _, right = torch.linalg.svd(random(size, size, seed=9))
    return left @ torch.diag(torch.linspace(1, condition, size).double()) @ right


def rotation(size: int = STATE) -> torch.Tensor:
    return torch.linalg.qr(random(size, size, seed=8))[0]


def mixing(hidden: int = 4, largest: float = 1.0) -> torch.Tensor:
    basis = torch.linalg.qr(random(hidden, hidden, seed=7))[0]
    return basis @ torch.diag(torch.linspace(0.2, largest, hidden).double()) @ basis.mT


def linear_unit(**options) -> LinearMixing:
    return seeded(lambda: LinearMixing(Dense(STATE, 4), Dense(3, 4), mixing(), **options))


CASES = {
    "skip": lambda: MoreauSkip(dense_unit(), 0.6),
    "skip-of-kernel": lambda: seeded(
        lambda: MoreauSkip(GaussianMap(Dense(STATE, 4), Dense(3, 4), gamma=0.3), 0.6)
    ),
    "affine": lambda: AffineChange(dense_unit(activation="tanh"), matrix(), random(STATE)),
    "affine-of-kernel": lambda: AffineChange(
        seeded(lambda: GaussianMap(Dense(STATE, 4), Dense(3, 4), gamma=0.3)), matrix(2.0)
    ),
    "rotation": lambda: AffineChange(dense_unit(), rotation(), random(STATE)),
    "mixing": linear_unit,
    "skip-of-affine-of-skip": lambda: MoreauSkip(AffineChange(MoreauSkip(dense_unit(), 0.5), matrix()), 0.7),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


@every_case
@pytest.mark.spec("R3.1", "R3.2")
@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
def test_implicit_gradients_are_unrolled_ones(make, method):
    module, x = make(), inputs().requires_grad_()
    wanted, results = (x, *module.parameters()), []
    for solver, gradient in ((EXACT, Implicit(1e-13, 1000, method)), (None, Unrolled(1500))):
        z = EquilibriumLayer(module, solver, gradient, "raise")(x)
        results.append(torch.autograd.grad((z * random(*z.shape)).sum(), wanted))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-8)


@every_case
@pytest.mark.spec("R3.1")
def test_products_with_the_jacobian_and_its_symmetry(make):
    equation = make().bind(inputs()).detach()
    z, v = random(4, STATE), random(4, STATE, seed=1)
    linearization, J = equation.linearize(z), jacobian(equation, z)
    for product, dense in ((linearization.jvp, J), (linearization.vjp, J.mT)):
        torch.testing.assert_close(product(v), (dense @ v[..., None])[..., 0], rtol=1e-10, atol=1e-11)
    assert linearization.symmetric is not None
    if equation.structure == "proximal":
        torch.testing.assert_close(J, J.mT, rtol=0, atol=1e-11)
        assert torch.linalg.eigvalsh(J).min() > -1e-11
    assert (torch.linalg.matrix_norm(J, 2) <= equation.contraction(z).value).all()


@every_case
def test_equilibria_have_the_least_energy(make):
    equation = make().bind(inputs()).detach()
    star = equilibrium(make(), inputs())
    for seed in range(20):
        other = star + 10.0 ** -(seed % 4) * random(4, STATE, seed=seed)
        assert (equation.objective(other) >= equation.objective(star)).all()


@pytest.mark.parametrize("alpha", [0.1, 0.6, 1.0])
def test_a_skip_connection_keeps_the_fixed_point(alpha):
    unit, x, z = dense_unit(), inputs(), random(4, STATE)
    skip = MoreauSkip(unit, alpha)
    expected = alpha * formula(unit, x, z) + (1 - alpha) * z
    torch.testing.assert_close(skip.bind(x)(z), expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(equilibrium(skip, x), equilibrium(unit, x), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.parametrize("alpha", [0.1, 0.6, 0.9])
def test_a_skip_connection_is_the_prox_of_the_moreau_envelope(alpha, activation):
    # p = prox_F(z) with F = αM^{1-α} means z - p = ∇F(p); ∇F is computed without the map.
    unit, z = dense_unit(activation=activation), 2 * random(4, STATE)
    p = MoreauSkip(unit, alpha).bind(inputs()).detach()(z)
    gradient = Envelope(unit.bind(inputs()), alpha).gradient(p)
    torch.testing.assert_close(gradient, z - p, rtol=1e-9, atol=1e-10)


def test_a_skip_connection_makes_the_map_strongly_monotone():
    equation = MoreauSkip(dense_unit(), 0.6).bind(inputs()).detach()
    assert torch.linalg.eigvalsh(jacobian(equation, random(4, STATE))).min() >= 0.4 - 1e-12


def test_the_gradient_of_a_learned_alpha():
    skip = MoreauSkip(dense_unit(), 0.6, learn_alpha=True).double()
    equation = skip.bind(inputs())
    z, u = random(4, STATE), random(4, STATE, seed=1)
    *_, computed = equation.detach().linearize(z).pullback(u)
    (expected,) = torch.autograd.grad((u * equation(z)).sum(), equation.tensors[-1])
    assert expected.abs() > 0.1
    torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-12)


def test_an_affine_change_moves_the_fixed_point_by_its_inverse():
    unit, x, M, s = dense_unit(), inputs(), matrix(), random(STATE)
    change = AffineChange(unit, M, s)
    expected = (equilibrium(unit, x) - s) @ torch.linalg.inv(M).mT
    torch.testing.assert_close(equilibrium(change, x), expected, rtol=1e-9, atol=1e-10)
    z = random(4, STATE)
    image = (formula(unit, x, z @ M.mT + s) - s) @ torch.linalg.inv(M).mT
    torch.testing.assert_close(change.bind(x)(z), image, rtol=1e-10, atol=1e-11)


DIAGONAL = torch.full((1, 2), 0.5**0.5, dtype=torch.float64)


def line_changed(matrix: torch.Tensor) -> AffineChange:
    """`T(z) = 0.64 v⟨v, z⟩ + …`, with `v` the direction halfway between the axes, changed by a matrix."""
    unit = OptEqUnit(Dense(2, 1), Dense(3, 1), "identity", max_norm=None).double()
    with torch.no_grad():
        unit.W.weight.copy_(0.8 * DIAGONAL)
    return AffineChange(unit, matrix)


def test_an_affine_change_contracts_by_the_condition_number_less():
    # M⁻¹JM = 0.64 (M⁻¹v)(Mv)ᵀ, whose norm is 0.64 (κ + 1/κ)/2 for M = diag(1, κ): beyond 0.64, within 0.64 κ.
    matrix = torch.diag(torch.tensor([1.0, 1.4], dtype=torch.float64))
    equation, z = line_changed(matrix).bind(inputs()).detach(), random(4, 2)
    steepest = torch.linalg.matrix_norm(jacobian(equation, z), 2)
    torch.testing.assert_close(steepest, torch.full((4,), 0.64 * (1.4 + 1 / 1.4) / 2).double())
    bounds = torch.stack([equation.contraction().value, equation.contraction(z).value])
    torch.testing.assert_close(bounds, torch.full((2, 4), 0.64 * 1.4).double())
    push, pull = equation.rates(iter([1.0]))
    assert (push, pull) == pytest.approx((0.8, 0.64 * 1.4))


@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_the_distance_bound_of_an_affine_change_is_attained_along_the_line_it_stretches_most(scale):
    # T pulls v to the fixed point by 0.64, so that Banach's bound is attained there, and M⁻¹v = v/scale.
    across = torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64)
    matrix = scale * (torch.eye(2, dtype=torch.float64) + 4 * across)
    change = line_changed(matrix)
    moves = torch.tensor([0.3, 1.0, -2.0, 1e-2], dtype=torch.float64)
    z = equilibrium(change, inputs()) + moves[:, None] * DIAGONAL
    bound = change.bind(inputs()).detach().distance_bound(z).value
    torch.testing.assert_close(bound, moves.abs(), rtol=1e-7, atol=0)


def test_an_affine_change_is_a_prox_in_its_own_metric_only():
    equation = AffineChange(dense_unit(), matrix()).bind(inputs()).detach()
    z = random(4, STATE)
    J, metric = jacobian(equation, z), matrix().mT @ matrix()
    assert equation.linearize(z).symmetric is not None
    assert equation.structure == "none"
    assert (J - J.mT).abs().max() > 1e-2
    torch.testing.assert_close(metric @ J, (metric @ J).mT, rtol=0, atol=1e-10)
    assert torch.linalg.eigvalsh(metric @ J).min() > -1e-10
    with pytest.raises(ConfigError, match="use Anderson instead of Nesterov"):
        equation.reformulate(gradient=True)


def test_a_rotation_keeps_the_map_proximal():
    change = AffineChange(dense_unit(), rotation(), random(STATE))
    equation = change.bind(inputs()).detach()
    assert equation.structure == "proximal"
    z = random(4, STATE).requires_grad_()
    slope = torch.autograd.grad(equation.objective(z).sum(), z)[0]
    torch.testing.assert_close(slope, (z - equation(z)).detach(), rtol=1e-10, atol=1e-11)
    nesterov = EquilibriumLayer(change, Nesterov(tol=1e-12, max_steps=2000), on_unconverged="raise")
    torch.testing.assert_close(nesterov(inputs()), equilibrium(change, inputs()), rtol=1e-8, atol=1e-9)


def test_an_affine_change_of_images_acts_on_every_pixel():
    unit, M, s = conv_unit(), matrix(size=2), random(2)
    x, z = random(3, 2, 4, 5), random(3, 2, 4, 5, seed=1)
    image = AffineChange(unit, M, s).bind(x)(z)
    changed = torch.einsum("ij,bjhw->bihw", M, z) + s[:, None, None]
    back = unit.bind(x)(changed) - s[:, None, None]
    expected = torch.einsum("ij,bjhw->bihw", torch.linalg.inv(M), back)
    torch.testing.assert_close(image, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(3, 3), "invertible `matrix`, got one of condition number"),
        (torch.diag(torch.tensor([1.0, 1.0, 1e-9])), "condition number 1e\\+09"),
        (torch.full((2, 2), float("nan")), "condition number inf"),
        (torch.ones(2, 3), "shape \\(m, m\\), got \\(2, 3\\)"),
    ],
)
def test_affine_changes_that_cannot_be_undone_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        AffineChange(dense_unit(), wrong)
    with pytest.raises(ConfigError, match="`shift` of shape"):
        AffineChange(dense_unit(), torch.eye(3), torch.zeros(2))


def test_linear_mixing_solves_a_linear_system():
    module, x = linear_unit(mu=1.5, max_norm=None), inputs()
    with torch.no_grad():
        module.W.operators[0].weight.mul_(0.9 / module.W.operators[0].norm((STATE,)))
    W, S = module.W.operators[0].weight, mixing()
    injection = module.injection.operator[0]
    c = x @ injection.operator.weight.mT + injection.bias
    z = torch.linalg.solve(1.5 * torch.eye(STATE).double() - W.mT @ S @ W, (c @ S @ W).mT).mT
    torch.testing.assert_close(equilibrium(module, x), z.detach(), rtol=1e-9, atol=1e-10)


def test_linear_mixing_minimises_its_objective():
    # Table 1, the row of S, for square invertible W: ½ zᵀW⁻¹S⁻¹W⁻ᵀz - ⟨c, W⁻ᵀz⟩ - ½‖z‖² is stationary.
    module = seeded(lambda: LinearMixing(Dense(4, 4), Dense(3, 4), mixing(), max_norm=None))
    with torch.no_grad():
        module.W.operators[0].weight.mul_(0.9 / module.W.operators[0].norm((4,)))
    W, x = module.W.operators[0].weight.detach(), inputs()
    c = module.injection.operator[0](x).detach()
    z = equilibrium(module, x).requires_grad_()
    lifted = torch.linalg.solve(W.mT, z.mT).mT
    objective = (
        0.5 * (lifted @ torch.linalg.inv(mixing()) * lifted).sum()
        - (c * lifted).sum()
        - 0.5 * z.square().sum()
    )
    slope = torch.autograd.grad(objective, z)[0]
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-8)


def test_linear_mixing_of_images():
    module = seeded(lambda: LinearMixing(Conv2d(2, 4), Conv2d(2, 4), mixing(), max_norm=None))
    W, x, z = module.W.operators[0], random(2, 2, 4, 4), random(2, 2, 4, 4, seed=1)
    with torch.no_grad():
        W.weight.mul_(0.9 / W.norm((2, 4, 4)))
    hidden = torch.einsum("ij,bjhw->bihw", mixing(), W(z) + module.injection.operator[0](x))
    torch.testing.assert_close(module.bind(x)(z), W.bind((2, 4, 4)).adjoint(hidden), rtol=1e-10, atol=1e-11)


def test_the_condition_on_the_mixing_is_watched():
    module = seeded(lambda: LinearMixing(Dense(STATE, 4), Dense(3, 4), mixing(largest=30.0), max_norm=None))
    with pytest.warns(RuntimeWarning, match="exceeds"):
        module.bind(inputs())
    imposed = seeded(lambda: LinearMixing(Dense(STATE, 4), Dense(3, 4), mixing(largest=30.0)))
    J = jacobian(imposed.eval().bind(inputs()).detach(), random(4, STATE))
    assert torch.linalg.matrix_norm(J, 2).max() <= 0.97**2 * (1 + 1e-6)


@pytest.mark.parametrize(
    "wrong",
    [torch.eye(4) - 2 * torch.diag(torch.tensor([1.0, 0, 0, 0])), torch.eye(4) + torch.ones(4, 4).triu(1)],
)
def test_a_mixing_that_is_not_positive_definite_is_refused(wrong):
    with pytest.raises(ConfigError, match="symmetric positive-definite `mixing`"):
        LinearMixing(Dense(5, 4), Dense(3, 4), wrong)
    with pytest.raises(ConfigError, match=r"Expected `mixing` to be a tensor, got \["):
        LinearMixing(Dense(5, 4), Dense(3, 4), [[1.0]])
    with pytest.raises(ConfigError, match=r"`mixing` of shape \(4, 4\), got \(3, 3\)"):
        LinearMixing(Dense(5, 4), Dense(3, 4), torch.eye(3))
    with pytest.raises(ConfigError, match=r"opteq operator .* for `W`, got torch\.nn.*Linear"):
        LinearMixing(torch.nn.Linear(5, 4), Dense(3, 4), torch.eye(4))


@pytest.mark.parametrize("alpha", [0, 1.5, -1, True, "0.5", None, [0.5]])
def test_alpha_of_a_skip_outside_its_range_is_refused(alpha):
    with pytest.raises(ConfigError, match=r"Expected `alpha` to be in \(0, 1\]"):
        MoreauSkip(dense_unit(), alpha)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (torch.eye(STATE, dtype=torch.long), "tensor of floating-point numbers, got torch.int64"),
        ([[1.0]], r"tensor of floating-point numbers, got \[\[1\.0\]\]"),
        (torch.zeros(STATE, STATE), "invertible"),
    ],
)
def test_what_is_no_invertible_matrix_is_refused(matrix, message):
    with pytest.raises(ConfigError, match=message):
        AffineChange(dense_unit(), matrix)


def test_what_does_not_fit_a_change_of_the_state_is_refused():
    with pytest.raises(ConfigError, match=r"finite `shift` of shape \(5,\), got \(5,\): \[nan"):
        AffineChange(dense_unit(), torch.eye(STATE), torch.full((STATE,), torch.nan))
    with pytest.raises(ShapeError, match=r"`matrix` of shape \(5, 5\), got \(4, 4\)"):
        AffineChange(dense_unit(), torch.eye(4)).bind(inputs())
    blocks = MultiBlockOptEq(DeepOptEq([dense_unit(), dense_unit()]))
    wrappers = (
        MoreauSkip,
        lambda inner: AffineChange(inner, torch.eye(STATE)),
        lambda inner: Regularised(inner, SquaredNorm(), 0.1),
    )
    for wrap in wrappers:
        with pytest.raises(
            ConfigError, match="one tensor, got a MultiBlockOptEq, whose state has 2 branches"
        ):
            wrap(blocks).bind(inputs())
        with pytest.raises(ConfigError, match=r"`map` to be an equilibrium map such as .*, got ReLU"):
            wrap(torch.nn.ReLU())
    with pytest.raises(ConfigError, match="Expected `deep` to be a DeepOptEq, got OptEqUnit"):
        MultiBlockOptEq(dense_unit())


@pytest.mark.spec("R1.5")
def test_an_affine_change_serves_layers_of_every_dtype():
    torch.manual_seed(0)
    unit, matrix = OptEqUnit(Dense(STATE, 8), Dense(3, 8)), torch.randn(STATE, STATE)
    changed = EquilibriumLayer(AffineChange(unit, matrix), Anderson(tol=0.2))
    x = torch.randn(4, 3)
    assert changed(x).dtype == torch.float32
    assert copy.deepcopy(changed).bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert copy.deepcopy(changed).double()(x.double()).dtype == torch.float64
