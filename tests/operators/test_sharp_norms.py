"""The norm bound of operators whose products are as exact as the dtype, and of those that may be rough."""

import math

import pytest
import torch

from opteq import AveragePool, Compose, Conv2d, Dense, DepthwiseSeparableConv2d, OptEqUnit
from tests.conformance.reference import dense, spectral_norm

OPERATORS = {
    "convolution to more channels": (Conv2d(3, 5), (3, 4, 5)),
    "convolution to fewer channels": (Conv2d(5, 2), (5, 4, 4)),
    "separable": (DepthwiseSeparableConv2d(4, 6), (4, 5, 4)),
    "product": (Compose(Dense(6, 9), Dense(9, 4)), (6,)),
    "pooled": (Compose(Conv2d(2, 3), AveragePool(3, 2)), (2, 6, 4)),
}


@pytest.mark.spec("R1.6")
@pytest.mark.parametrize(("operator", "shape"), OPERATORS.values(), ids=OPERATORS.keys())
def test_a_sharp_bound_is_the_norm(operator, shape):
    exact, rough = operator.bind(shape).detach(), operator.bind(shape, error=1e-3)
    norm = spectral_norm(dense(exact)).item()
    plain = exact.quick_norm_bound().item()
    assert rough.norm_bound().item() == plain
    sharp = exact.norm_bound().item()
    assert norm <= sharp <= norm * (1 + 1e-8) < plain
    # Kept for as long as the weights stay the same, and no longer: solves make use of it too.
    assert rough.norm_bound().item() == sharp
    operator.weights[0].data *= 1.01
    assert operator.bind(shape, error=1e-3).norm_bound().item() == pytest.approx(1.01 * plain, rel=1e-5)
    assert operator.bind(shape).norm_bound().item() == pytest.approx(1.01 * sharp, rel=1e-5)


def cancelling():
    """A product near zero of factors that are not."""
    matrix = torch.randn(7, 9)
    kernel = torch.linalg.svd(matrix).Vh[7:].mT  # (9, 2)
    operator = Compose(Dense(5, 9), Dense(9, 7))
    operator.operators[0].weight.data = kernel @ torch.randn(2, 5)
    operator.operators[1].weight.data = matrix
    return operator, (5,)


def crowded():
    """Eigenvalues of the Laplacian of a long strip, of which thousands lie near the largest."""
    operator = Conv2d(1, 1)
    operator.weight.data = torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]])[None, None]
    return operator, (1, 2, 600)


@pytest.mark.spec("R1.6")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("make", "looseness"),
    [
        (lambda: (Conv2d(6, 9, 5), (6, 7, 3)), 1e-8),
        (lambda: (Conv2d(6, 4, groups=2), (6, 4, 5)), 1e-8),
        (lambda: (Compose(Dense(40, 30), Dense(30, 50)), (40,)), 1e-8),
        (lambda: (Compose(Dense(1, 1), Dense(1, 1)), (1,)), 1e-8),
        (cancelling, 10.0),
        (crowded, 1e-3),
    ],
)
def test_a_sharp_bound_is_never_below_the_norm(make, looseness, seed):
    torch.manual_seed(seed)
    operator, shape = make()
    bound = operator.bind(shape)
    norm = spectral_norm(dense(bound)).item()
    assert norm <= bound.norm_bound().item() <= norm * (1 + looseness)


def test_the_sharp_bound_of_nothing_is_zero():
    operator = Conv2d(2, 3)
    torch.nn.init.zeros_(operator.weight)
    assert operator.bind((2, 4, 4)).norm_bound() == 0


@pytest.mark.parametrize("sides", [(12, 12), (28, 28)])
def test_only_operators_on_too_many_numbers_keep_the_fourier_bound(sides):
    bound = Conv2d(8, 6).bind((8, *sides))
    # To rounding: the two are computed with a graph and without.
    kept = bound.norm_bound().item() == pytest.approx(bound.quick_norm_bound().item(), rel=1e-12)
    assert kept == (6 * math.prod(sides) > 4096)


@pytest.mark.spec("R1.6")
def test_certifies_a_contraction_that_the_fourier_bound_misses():
    torch.manual_seed(0)
    unit = OptEqUnit(Conv2d(4, 6), Conv2d(3, 6)).eval()
    unit.W.weight.data.abs_().mul_(10)
    x = torch.randn(2, 3, 8, 8)
    assert (unit.bind(x, error=1e-3).contraction().value > 1).all()
    assert (unit.bind(x).contraction().value < 0.97**2 + 1e-3).all()
