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


def test_large_operators_keep_the_fourier_bound():
    operator = Conv2d(8, 8)
    plain = operator.norm_bound((8, 20, 20))
    with sharp_norms(operator):
        assert operator.norm_bound((8, 20, 20)) == plain


@pytest.mark.spec("R1.6")
def test_certifies_a_contraction_that_the_fourier_bound_misses():
    torch.manual_seed(0)
    unit = OptEqUnit(Conv2d(4, 6), Conv2d(3, 6)).eval()
    unit.W.weight.data.abs_().mul_(10)
    equation = unit.bind(torch.randn(2, 3, 8, 8))
    assert (equation.contraction().value > 1).all()
    with sharp_norms(unit):
        assert (equation.contraction().value < 0.97**2 + 1e-3).all()
