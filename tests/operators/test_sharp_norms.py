import math

import pytest
import torch

from opteq import AveragePool, Compose, Conv2d, Dense, DepthwiseSeparableConv2d, OptEqUnit
from opteq.operators.base import sharp_norms

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
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    weights = tuple(w.detach().double() for w in operator.weights)
    norm = torch.linalg.matrix_norm(operator.matvec(weights, basis).flatten(1), 2).item()
    plain = operator.norm_bound(shape).item()
    with sharp_norms(operator):
        sharp = operator.norm_bound(shape).item()
    assert norm <= sharp <= norm * (1 + 1e-8) < plain
    # Kept for as long as the weights stay the same, and no longer.
    assert operator.norm_bound(shape).item() == sharp
    operator.weights[0].data *= 1.01
    assert operator.norm_bound(shape).item() == pytest.approx(1.01 * plain, rel=1e-5)


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
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    weights = tuple(w.detach().double() for w in operator.weights)
    norm = torch.linalg.matrix_norm(operator.matvec(weights, basis).flatten(1), 2).item()
    with sharp_norms(operator):
        assert norm <= operator.norm_bound(shape).item() <= norm * (1 + looseness)


def test_the_sharp_bound_of_nothing_is_zero():
    operator = Conv2d(2, 3)
    torch.nn.init.zeros_(operator.weight)
    with sharp_norms(operator):
        assert operator.norm_bound((2, 4, 4)) == 0


@pytest.mark.parametrize("sides", [(12, 12), (28, 28)])
def test_only_operators_on_too_many_numbers_keep_the_fourier_bound(sides):
    operator = Conv2d(8, 6)
    shape = (8, *sides)
    plain = operator.norm_bound(shape)
    with sharp_norms(operator):
        assert (operator.norm_bound(shape) == plain) == (6 * math.prod(sides) > 4096)


@pytest.mark.spec("R1.6")
def test_certifies_a_contraction_that_the_fourier_bound_misses():
    torch.manual_seed(0)
    unit = OptEqUnit(Conv2d(4, 6), Conv2d(3, 6)).eval()
    unit.W.weight.data.abs_().mul_(10)
    equation = unit.bind(torch.randn(2, 3, 8, 8))
    assert (equation.contraction().value > 1).all()
    with sharp_norms(unit):
        assert (equation.contraction().value < 0.97**2 + 1e-3).all()
