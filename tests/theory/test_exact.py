from dataclasses import dataclass

import numpy as np
import pytest
import torch

from opteq import Conv2d, Dense, EquilibriumLayer, OptEqUnit, certify
from opteq.operators import bound
from opteq.operators.dense import BoundDense
from opteq.theory.exact import in_float64


@pytest.fixture
def bounded(monkeypatch):
    """The operators whose norms are bounded by their matrices meanwhile."""
    operators, dense = [], bound.dense_norm_bound

    def dense_norm_bound(operator):
        operators.append(operator)
        return dense(operator)

    monkeypatch.setattr(bound, "dense_norm_bound", dense_norm_bound)
    return operators


def norm_of(operator, domain):
    basis = torch.eye(int(np.prod(domain)), dtype=torch.float64).view(-1, *domain)
    return np.linalg.norm(operator.bind(domain)(basis).detach().flatten(1).numpy(), 2)


def test_certificates_of_the_same_weights_bound_their_norm_once(bounded):
    torch.manual_seed(0)
    layer, inputs = EquilibriumLayer(OptEqUnit(Conv2d(2, 3), Conv2d(1, 3), max_norm=0.9)), (1, 5, 5)
    first = certify(layer, torch.randn(1, *inputs))
    assert certify(layer, torch.randn(1, *inputs)).contraction.value == first.contraction.value
    assert len(bounded) == 1
    # Beside the bound of the layer as it is, which is in float32.
    layer.map.W.bind((2, 5, 5), 0.9).norm_bound()
    certify(layer, torch.randn(1, *inputs))
    assert len(bounded) == 2
    with torch.no_grad():
        layer.map.W.weight.mul_(0.1)
    assert certify(layer, torch.randn(1, *inputs)).contraction.value < 0.1 * first.contraction.value
    assert len(bounded) == 3


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 4, 7)])
def test_the_bound_is_that_of_the_weights_and_the_shape(shape):
    torch.manual_seed(0)
    operator = Conv2d(2, 3)
    for factor in (1.0, 3.0, 0.5):
        with torch.no_grad():
            operator.weight.mul_(factor)
        copied = in_float64(operator)
        found = copied.bind(shape).norm_bound().item()
        assert found == pytest.approx(norm_of(copied, shape), rel=1e-7)


@dataclass(frozen=True, eq=False)
class BoundLouder(BoundDense):
    factor: float

    def __call__(self, x):
        return self.factor * super().__call__(x)

    def adjoint(self, y):
        return self.factor * super().adjoint(y)

    def quick_norm_bound(self):
        return self.factor * super().quick_norm_bound()


class Louder(Dense):
    """Computes by more than its weights."""

    factor = 1.0

    def act(self, weights, domain, error):
        return BoundLouder(weights, domain, error, self._memo, self.factor)


def test_what_an_operator_of_others_computes_by_is_not_known_and_so_nothing_is_kept_of_it():
    torch.manual_seed(0)
    operator = Louder(4, 6)
    once = in_float64(operator).bind((4,)).norm_bound().item()
    operator.factor = 3.0
    copied = in_float64(operator)
    assert copied.bind((4,)).norm_bound().item() == pytest.approx(3 * once, rel=1e-7)
    assert norm_of(copied, (4,)) == pytest.approx(3 * once, rel=1e-7)
