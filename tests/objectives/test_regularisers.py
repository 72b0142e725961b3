"""Regularisers against autograd, minimisation, and their definitions written out."""

import math
from itertools import pairwise

import cvxpy as cp
import pytest
import torch

from opteq import HSIC, AbsoluteNorm, Decorrelation, Incay, RandomFeatureHSIC, SquaredNorm
from opteq.errors import ConfigError
from tests.conformance.reference import random

REGULARISERS = {
    "square": SquaredNorm(),
    "absolute": AbsoluteNorm(),
    "incay": Incay(),
    "incay-small": Incay(0.3),
    "decorrelation": Decorrelation(),
    "hsic": HSIC(),
    "hsic-wide": HSIC(2.5),
    "random-hsic": RandomFeatureHSIC(7, 1.4),
    "random-hsic-many": RandomFeatureHSIC(32),
}
COUPLED = {name: r for name, r in REGULARISERS.items() if r.batch_coupled}
shapes = pytest.mark.parametrize("shape", [(5, 4), (4, 3, 2, 3), (30, 2)], ids=str)
pytestmark = pytest.mark.spec("R4.1")


@pytest.mark.parametrize("regulariser", REGULARISERS.values(), ids=REGULARISERS)
@shapes
def test_the_gradient_is_that_of_the_value(regulariser, shape):
    z = random(*shape).requires_grad_()
    (expected,) = torch.autograd.grad(regulariser.value(z).sum(), z)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(regulariser.gradient(z), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("regulariser", REGULARISERS.values(), ids=REGULARISERS)
def test_the_gradient_can_be_differentiated(regulariser):
    z = random(5, 4).requires_grad_()
    assert torch.autograd.gradcheck(regulariser.gradient, z, atol=1e-7)


@pytest.mark.parametrize("name", ["square", "absolute", "incay"])
def test_values_are_per_sample(name):
    z = random(5, 3, 2, 2)
    values = REGULARISERS[name].value(z)
    formulas = {
        "square": lambda v: 0.5 * (v * v).sum(),
        "absolute": lambda v: v.abs().sum(),
        "incay": lambda v: 2 / ((v * v).sum() + 2),
    }
    torch.testing.assert_close(values, torch.stack([formulas[name](v) for v in z]), rtol=1e-13, atol=0)


@pytest.mark.parametrize("gamma", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", ["square", "absolute"])
def test_the_prox_solves_its_problem(name, gamma):
    z = 2 * random(3, 4)
    penalty = {"square": lambda u: 0.5 * cp.sum_squares(u), "absolute": lambda u: cp.norm1(u)}[name]
    for row, found in zip(z, REGULARISERS[name].prox(z, gamma), strict=True):
        u = cp.Variable(4)
        problem = cp.Problem(cp.Minimize(gamma * penalty(u) + 0.5 * cp.sum_squares(u - row.numpy())))
        problem.solve(cp.CLARABEL)
        torch.testing.assert_close(found, torch.tensor(u.value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("regulariser", [Incay(), *COUPLED.values()])
def test_a_prox_that_does_not_exist_is_refused(regulariser):
    with pytest.raises(ConfigError, match="has no proximal operator; use form='gradient'"):
        regulariser.prox(random(2, 3), 0.1)


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_the_step_of_incay_expands_by_the_stated_factor(epsilon):
    z, gamma = random(5, 4), 0.2
    step = z - gamma * Incay(epsilon).gradient(z)
    factor = 1 + 4 * gamma / (z.square().sum(1) + 2 * epsilon) ** 2
    torch.testing.assert_close(step, factor[:, None] * z, rtol=1e-13, atol=0)
    assert (step.norm(dim=1) > z.norm(dim=1)).all()


@pytest.mark.parametrize("regulariser", [SquaredNorm(), Incay(), Incay(0.3)], ids=repr)
def test_the_curvature_lies_within_its_bounds_and_reaches_them(regulariser):
    low, high = regulariser.curvature
    found = []
    direction = random(3)
    for length in [0.0, *torch.logspace(-2, 1, 400).tolist()]:
        z = length * direction / direction.norm()
        found.append(
            torch.linalg.eigvalsh(
                torch.autograd.functional.hessian(lambda v: regulariser.value(v[None])[0], z)
            )
        )
    found = torch.stack(found)
    assert low - 1e-9 <= found.min() <= low + 0.01 * abs(low)
    assert high + 1e-9 >= found.max() >= high - 0.01 * abs(high)
    assert regulariser.lipschitz == pytest.approx(max(abs(low), abs(high)))


def test_what_is_convex_and_smooth():
    assert [r.convex for r in (SquaredNorm(), AbsoluteNorm(), Incay(), HSIC())] == [True, True, False, False]
    assert [r.lipschitz for r in (SquaredNorm(), AbsoluteNorm(), Incay(0.5), HSIC())] == [1, None, 4, None]


def test_decorrelation_is_its_definition():
    z = random(6, 4)
    Z = z.mT  # (m, B), features in rows
    D = torch.diag(1 / Z.norm(dim=1))
    expected = 0.5 * (D @ Z @ Z.mT @ D - torch.eye(4).double()).square().sum()
    torch.testing.assert_close(Decorrelation().value(z), expected, rtol=1e-12, atol=0)
    # The corrected gradient, row by row: 2(I - Proj_i) Σ_{j≠i} Proj_j z_i / ‖z_i‖².
    rows = []
    for i in range(4):
        projections = [torch.outer(v, v) / (v @ v) for v in Z]
        others = sum(projections[j] @ Z[i] for j in range(4) if j != i)
        rows.append(2 * (torch.eye(6).double() - projections[i]) @ others / (Z[i] @ Z[i]))
    torch.testing.assert_close(Decorrelation().gradient(z), torch.stack(rows).mT, rtol=1e-11, atol=1e-13)


def test_decorrelation_passes_over_features_that_are_zero():
    z = random(6, 4)
    z[:, 2] = 0
    without = z[:, [0, 1, 3]]
    regulariser = Decorrelation()
    torch.testing.assert_close(regulariser.value(z), regulariser.value(without), rtol=1e-12, atol=0)
    gradient = regulariser.gradient(z)
    assert not gradient[:, 2].any()
    torch.testing.assert_close(gradient[:, [0, 1, 3]], regulariser.gradient(without), rtol=1e-11, atol=1e-13)
    z.requires_grad_()
    assert torch.isfinite(torch.autograd.grad(regulariser.gradient(z).sum(), z)[0]).all()


def hsic(z, bandwidth):
    """The sum over pairs of features, one at a time."""
    B, m = z.shape[:2]
    kernels = []
    for i in range(m):
        v = z[:, i].reshape(B, -1)
        squares = (v[:, None] - v[None]).square().sum(2)
        kernels.append(torch.exp(-squares / (2 * bandwidth**2 * v.shape[1])))
    H = torch.eye(B).double() - 1 / B
    pairs = [kernels[i] @ H @ kernels[j] @ H for i in range(m) for j in range(i + 1, m)]
    return sum(p.trace() for p in pairs) / (B - 1) ** 2


@shapes
@pytest.mark.parametrize("bandwidth", [0.7, 1.0])
def test_hsic_is_its_definition(shape, bandwidth):
    z = random(*shape)
    torch.testing.assert_close(HSIC(bandwidth).value(z), hsic(z, bandwidth), rtol=1e-11, atol=1e-15)


def test_hsic_tells_dependence_from_independence():
    a, b = random(400), random(400, seed=1)
    independent, nonlinear = torch.stack((a, b), 1), torch.stack((a, a.square()), 1)
    assert HSIC().value(nonlinear) > 20 * HSIC().value(independent)
    # Decorrelation does not see that the second feature is a function of the first.
    centred = nonlinear - nonlinear.mean(0)
    assert Decorrelation().value(centred) < 0.1


@pytest.mark.parametrize("shape", [(10, 4), (6, 3, 2, 2), (200, 2)], ids=str)
def test_random_features_tend_to_the_exact_criterion(shape):
    z = random(*shape)
    exact = HSIC().value(z)
    errors = []
    for features in (16, 256, 4096):
        values = torch.stack([RandomFeatureHSIC(features, seed=s).value(z) for s in range(8)])
        errors.append(((values - exact).square().mean().sqrt() / exact).item())
    assert errors[2] < 0.1
    # Sixteen times as many features, a quarter of the error.
    assert all(2 < a / b < 9 for a, b in pairwise(errors))


@pytest.mark.parametrize("regulariser", COUPLED.values(), ids=COUPLED)
@shapes
def test_against_the_batch_itself_the_running_form_is_the_gradient(regulariser, shape):
    z = random(*shape)
    against = regulariser.gradient_against(z.clone(), z)
    torch.testing.assert_close(against, regulariser.gradient(z), rtol=1e-9, atol=1e-13)
    one = regulariser.gradient_against(z[:1], z)
    torch.testing.assert_close(one, against[:1], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", [n for n in COUPLED if "hsic" in n])
def test_the_running_form_is_the_gradient_of_one_more_sample_in_a_large_batch(name):
    reference, z = random(1000, 3), random(1, 3, seed=1).requires_grad_()
    regulariser = COUPLED[name]
    joined = regulariser.value(torch.cat((reference, z)))
    (expected,) = torch.autograd.grad(joined, z)
    found = regulariser.gradient_against(z.detach(), reference)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="`epsilon` of Incay to be positive, got 0"):
        Incay(0)
    with pytest.raises(ConfigError, match="Incay has no option 'eps'; it has epsilon"):
        Incay(eps=0.1)
    for make in (HSIC, lambda **o: RandomFeatureHSIC(4, **o)):
        with pytest.raises(ConfigError, match="Expected `bandwidth` to be positive, got -1"):
            make(bandwidth=-1)
    with pytest.raises(ConfigError, match="`features` to be a whole number of at least 1, got 0"):
        RandomFeatureHSIC(0)
    assert math.isinf(AbsoluteNorm().curvature[1])
