"""The rounding error that products may have: that of the solve they are for, none for a certificate."""

import pytest
import torch
from torch import nn

from opteq import (
    AffineChange,
    Anderson,
    Compose,
    Conv2d,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    HeritageDiversity,
    Implicit,
    KernelMap,
    KernelMOptEq,
    MOptEq,
    MoreauSkip,
    MultiBlockOptEq,
    Nesterov,
    OneStep,
    OptEqUnit,
    Parallel,
    Phantom,
    Regularised,
    SimilarityMap,
    SquaredNorm,
    Unrolled,
    WideOptEq,
    certify,
)
from opteq.maps.optequnit import OptEqEquation
from opteq.operators.base import LinearOperator
from opteq.theory.lipschitz import equilibrium_lipschitz


def unit() -> OptEqUnit:
    return OptEqUnit(Dense(4, 9), Dense(3, 9), max_norm=0.7)


def kernel(n: int = 5) -> KernelMap:
    return KernelMap(Dense(n, 4), Dense(3, n), "sigmoid", max_norm=0.7)


MAPS = {
    "unit": unit,
    "gaussian": lambda: GaussianMap(Dense(4, 5), Dense(3, 5), gamma=0.5),
    "kernel": kernel,
    "own": lambda: SimilarityMap(lambda y, c: (y * c).sum(1), Dense(3, 4), 4),
    "skip": lambda: MoreauSkip(unit()),
    "affine": lambda: AffineChange(unit(), torch.eye(4) + 0.1 * torch.ones(4, 4).triu()),
    "deep": lambda: DeepOptEq([unit(), unit()]),
    "blocks": lambda: MultiBlockOptEq(DeepOptEq([unit(), unit()])),
    "wide": lambda: WideOptEq([unit(), unit()]),
    "regularised": lambda: Regularised(unit(), SquaredNorm(), 0.1),
    "parallel": lambda: Parallel([unit(), kernel()]),
    "branches": lambda: MOptEq([unit(), unit()], HeritageDiversity(0.05)),
    "coupled kernels": lambda: KernelMOptEq([kernel(), kernel(6)], HeritageDiversity(0.05)),
}
every_map = pytest.mark.parametrize("make", MAPS.values(), ids=MAPS)


@pytest.fixture
def errors(monkeypatch):
    """The errors that operators are bound or applied with."""
    seen, plain = [], LinearOperator._bound

    def observed(operator, domain, ceiling, error):
        seen.append(error)
        return plain(operator, domain, ceiling, error)

    monkeypatch.setattr(LinearOperator, "_bound", observed)
    return seen


@every_map
@pytest.mark.parametrize(
    ("solver", "gradient", "expected"),
    [
        (Anderson(1e-3), Implicit(1e-2), 1e-3),
        (Anderson(1e-2, 200), Implicit(1e-3), 1e-3),
        (Anderson(1e-3), Phantom(), 1e-3),
        (Anderson(1e-3), OneStep(), 1e-3),
    ],
    ids=repr,
)
def test_a_layer_binds_with_the_tolerance_of_its_solves(make, solver, gradient, expected, errors):
    torch.manual_seed(0)
    layer = EquilibriumLayer(make(), solver, gradient, "count")
    layer(torch.randn(2, 3))
    # Operators of one's own are called by oneself.
    assert set(errors) == {expected}
    assert len(errors) >= sum(isinstance(m, LinearOperator) for m in layer.modules())


@every_map
def test_what_is_not_solved_to_a_tolerance_is_exact(make, errors):
    torch.manual_seed(0)
    layer, x = EquilibriumLayer(make(), on_unconverged="count"), torch.randn(2, 3)
    layer.bind(x)
    EquilibriumLayer(layer.map, gradient=Unrolled(3))(x)
    assert set(errors) == {0.0}


@every_map
def test_certificates_are_exact(make, errors):
    torch.manual_seed(0)
    layer = EquilibriumLayer(make(), Anderson(1e-3), on_unconverged="count").eval()
    x = torch.randn(2, 3)
    solve = layer.solve

    def unseen(x, trace=False):
        """The solve that is certified, which may be rough."""
        kept = list(errors)
        solution = solve(x, trace)
        errors[:] = kept
        return solution

    layer.solve = unseen
    certify(layer, x)
    if not isinstance(layer.map, SimilarityMap | KernelMOptEq):
        equilibrium_lipschitz(layer.map, x)
    assert set(errors) == {0.0}


def test_what_is_bound_carries_its_error():
    torch.manual_seed(0)
    operator = Compose(Conv2d(3, 4), Compose(Conv2d(4, 5), Conv2d(5, 4)))
    bound = operator.bind((3, 4, 4), 0.9, error=1e-3)
    assert bound.error == 1e-3
    assert [factor.error for factor in bound.factors] == [1e-3, 1e-3]
    assert bound.factors[1].factors[0].error == 1e-3
    assert bound.detach().error == 1e-3
    assert operator.bind((3, 4, 4)).error == 0
    equation = OptEqUnit(Conv2d(3, 4), Conv2d(2, 4)).bind(torch.randn(1, 2, 4, 4), 1e-2)
    assert equation.W.error == equation.detach().W.error == 1e-2


class Own(nn.Module):
    """A `U` of a user, whose opteq operator is the user's to call."""

    def __init__(self):
        super().__init__()
        self.inner = Dense(3, 9)

    def forward(self, x):
        return self.inner(x).tanh()


def test_modules_of_others_are_called_as_they_are(errors):
    torch.manual_seed(0)
    stem, x = nn.Sequential(Own(), nn.Identity()), torch.randn(2, 3)
    EquilibriumLayer(OptEqUnit(Dense(4, 9), stem), Anderson(1e-3), Implicit(1e-3))(x)
    assert sorted(set(errors)) == [0.0, 1e-3]
    assert errors.count(0.0) == 1
    with pytest.raises(TypeError, match="error"):
        stem(x, error=1e-3)


@pytest.mark.parametrize("solver", [Anderson(tol=1e-3), Nesterov(tol=1e-3)])
def test_a_solve_starts_as_roughly_as_it_goes_on(solver, monkeypatch):
    first, seen = OptEqEquation.first_iterate, []

    def observed(equation):
        seen.append(equation.W.error)
        return first(equation)

    monkeypatch.setattr(OptEqEquation, "first_iterate", observed)
    # So many hidden units are solved in the state, whose first iterate it takes.
    EquilibriumLayer(OptEqUnit(Dense(3, 9), Dense(4, 9)), solver, Implicit(1e-3))(torch.randn(2, 4))
    assert seen == [1e-3]
