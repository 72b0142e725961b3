"""Maps around dense units are solved in the hidden variable of these, and give what T itself gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from opteq import (
    AffineChange,
    Anderson,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    Implicit,
    MoreauSkip,
    OptEqUnit,
    Parallel,
    Picard,
    Unrolled,
)
from opteq.equation import Equation
from opteq.maps.base import EquilibriumMap
from opteq.results import State, distance, norm, tensors_of
from opteq.solvers.base import solve_fixed_point
from tests.conformance.instances import seeded
from tests.conformance.reference import random

# So many samples that the Gram matrix pays.
BATCH = 50


def unit(
    activation: str = "relu", mu: float = 1.0, hidden: int = 6, share: float = 0.97, seed: int = 0
) -> OptEqUnit:
    """A dense unit at a ceiling of this share of what Theorem 1 asks for."""
    module = seeded(
        lambda: OptEqUnit(Dense(4, hidden), Dense(3, hidden), activation, mu=mu, max_norm=share * mu**0.5),
        seed,
    )
    with torch.no_grad():
        module.W.weight.mul_(10)
        module.injection.bias.copy_(random(hidden, seed=seed))
    return module


def matrix(condition: float) -> Tensor:
    left, _, right = torch.linalg.svd(random(4, 4, seed=9))
    return left @ torch.diag(torch.linspace(1, condition, 4).double()) @ right


def inputs() -> Tensor:
    return 2 * random(BATCH, 3)


CASES: dict[str, Callable[[], EquilibriumMap]] = {
    "unit": unit,
    "skip": lambda: MoreauSkip(unit("tanh"), 0.4),
    "learned skip": lambda: MoreauSkip(unit(), 0.4, learn_alpha=True).double(),
    "skip of a skip": lambda: MoreauSkip(MoreauSkip(unit("softplus", mu=2.0), 0.5), 0.6),
    "rotation": lambda: AffineChange(unit("elu"), matrix(1.0)),
    "affine": lambda: AffineChange(unit("tanh"), matrix(4.0)),
    "affine of a skip": lambda: AffineChange(MoreauSkip(unit(), 0.5), matrix(3.0)),
    "skip of a rotation": lambda: MoreauSkip(AffineChange(unit(), matrix(1.0)), 0.6),
    "deep of one": lambda: DeepOptEq([unit("tanh")], 0.7),
    "parallel": lambda: Parallel([unit(), unit("tanh", hidden=5, seed=1), unit("softplus", seed=2)]),
    "parallel of wrappers": lambda: Parallel(
        [MoreauSkip(unit(), 0.5), AffineChange(unit("tanh", seed=1), matrix(3.0)), unit(seed=2)]
    ),
    "parallel of other scales": lambda: Parallel([unit(mu=9.0), unit(mu=0.01, seed=1), unit("sigmoid")]),
}
every_case = pytest.mark.parametrize("make", CASES.values(), ids=CASES)


def plain(equation: Equation) -> State:
    """The equilibrium by the iteration of the map itself."""
    z, info = solve_fixed_point(equation, equation.initial(), Picard(tol=1e-13, max_steps=20_000))
    assert info.converged.all()
    return z


def residuals(equation: Equation, state: State) -> Tensor:
    """`‖T(z) - z‖ / ‖z‖`."""
    return distance(equation(state), state) / norm(state)


@every_case
@pytest.mark.spec("R1.4", "R1.5")
def test_the_equilibrium_is_that_of_the_map(make):
    module, x = make(), inputs()
    equation = module.bind(x).detach()
    form = equation.reformulate()
    assert form.recover is not None
    torch.testing.assert_close(form.first, form.function(form.initial), rtol=1e-13, atol=1e-14)
    found = EquilibriumLayer(module, Anderson(tol=1e-14, max_steps=20_000), on_unconverged="count")(x)
    for a, b in zip(tensors_of(found), tensors_of(plain(equation)), strict=True):
        assert b.any()
        torch.testing.assert_close(a.detach(), b, rtol=1e-10, atol=1e-10)


@every_case
@pytest.mark.spec("R3.1", "R3.2")
def test_gradients_are_those_of_the_iteration_of_the_map(make):
    module, x, results = make(), inputs().requires_grad_(), []
    wanted = (x, *module.parameters())
    exact = Anderson(tol=1e-14, max_steps=20_000)
    for solver, gradient in ((exact, Implicit(1e-13, 1000)), (None, Unrolled(1500))):
        z = EquilibriumLayer(module.eval(), solver, gradient, "count")(x)
        value = sum((t * random(*t.shape, seed=i)).sum() for i, t in enumerate(tensors_of(z)))
        results.append(torch.autograd.grad(value, wanted))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@every_case
@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
@pytest.mark.spec("R1.4", "R1.5")
def test_the_residual_that_is_reported_bounds_that_of_the_readout(make, tol):
    module, x = make(), inputs()
    solution = EquilibriumLayer(module, Anderson(tol=tol, max_steps=2000)).solve(x)
    assert solution.info.converged.all()
    found = residuals(module.bind(x).detach(), solution.state)
    assert (found <= solution.info.residual * (1 + tol) + 1e-15).all()
    assert (found <= tol * (1 + tol)).all()
    # Nor is it solved much further than was asked for.
    assert found.max() > 1e-4 * tol


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
def test_wrappers_cost_no_evaluations(tol):
    x, solver = inputs(), Anderson(tol=tol, max_steps=500)

    def evaluations(module: EquilibriumMap, solver: Anderson = solver) -> int:
        return EquilibriumLayer(module, solver).solve(x).info.evaluations

    bare = evaluations(unit())
    assert evaluations(MoreauSkip(unit(), 0.2)) <= bare
    assert evaluations(AffineChange(unit(), matrix(1.0))) <= bare
    assert evaluations(DeepOptEq([unit()], 0.2)) <= bare
    assert evaluations(Parallel([unit(), unit()])) <= bare
    # A change of condition number κ has to be solved to tol/κ.
    finer = Anderson(tol=tol / 4, max_steps=500)
    assert evaluations(AffineChange(unit(), matrix(4.0))) <= evaluations(unit(), finer)
    # The iteration of a skip itself takes many times as many.
    equation = MoreauSkip(unit(), 0.2).bind(x).detach()
    assert solve_fixed_point(equation, equation.initial(), solver)[1].evaluations > bare


WRAPPERS: dict[str, Callable[[EquilibriumMap], EquilibriumMap]] = {
    "unit": lambda inner: inner,
    "skip": lambda inner: MoreauSkip(inner, 0.4),
    "rotation": lambda inner: AffineChange(inner, matrix(1.0)),
    "affine": lambda inner: AffineChange(inner, matrix(3.0)),
    "deep": lambda inner: DeepOptEq([inner], 0.4),
    "parallel": lambda inner: Parallel([inner, unit()]),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("max_norm", [None, 1.01])
def test_residuals_are_measured_where_the_norm_may_be_too_large(wrap, max_norm, monkeypatch):
    # There the residual of the hidden variable may be smaller than that of the state.
    trusted = unit()
    trusted.max_norm, trusted.norm_checked = max_norm, True
    monkeypatch.setattr(OptEqUnit, "check_norm", lambda *_: 0.0)
    with torch.no_grad():
        trusted.W.weight.mul_(0.9 / torch.linalg.matrix_norm(trusted.W.weight, 2))
    module, x = wrap(trusted), inputs()
    equation = module.bind(x).detach()
    assert equation.reformulate().measured
    solution = EquilibriumLayer(module, Anderson(tol=1e-4, max_steps=2000)).solve(x)
    z, image = (torch.cat(tensors_of(part), 1) for part in (solution.state, equation(solution.state)))
    residual = (image - z).norm(dim=1) / image.norm(dim=1)
    rounding = 1e-14
    assert (residual <= solution.info.residual * (1 + 1e-3) + rounding).all()
    found = EquilibriumLayer(module, Anderson(tol=1e-13, max_steps=2000))(x)
    for a, b in zip(tensors_of(found), tensors_of(plain(equation)), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-10, atol=1e-10)


def test_a_shift_and_branches_that_keep_their_state_are_solved_as_they_are():
    x = inputs()
    shifted = AffineChange(unit(), matrix(2.0), torch.ones(4, dtype=torch.float64)).bind(x).detach()
    assert shifted.reformulate().function is shifted
    gaussian = seeded(lambda: GaussianMap(Dense(4, 5), Dense(3, 5)))
    mixed = Parallel([unit(), gaussian]).bind(x).detach()
    assert mixed.reformulate().function is mixed
    # A map that is no proximal operator may need its skip connection to converge, and be left by a step.
    for wrapper in (MoreauSkip(gaussian, 0.5), AffineChange(gaussian, matrix(2.0))):
        equation = wrapper.bind(x).detach()
        assert equation.reformulate().function is equation
