"""`W · min(1, ζ/‖W‖)`, how `Ceiling` binds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq import Conv2d, Dense
from opteq.errors import NonFiniteError
from opteq.operators.bound import BoundOperator
from tests.conformance.instances import OPERATORS, OperatorCase
from tests.conformance.reference import dense, random, spectral_norm

with_weights = pytest.mark.parametrize(
    "case",
    [c for n, c in OPERATORS.items() if "pool" not in n],
    ids=[n for n in OPERATORS if "pool" not in n],
)


def norm_of(bound: BoundOperator) -> float:
    return spectral_norm(dense(bound)).item()


@with_weights
@given(seed=st.integers(0, 10_000), ceiling=st.floats(0.05, 3))
@settings(max_examples=5)
@pytest.mark.spec("R1.6")
def test_the_norm_does_not_exceed_the_ceiling(case: OperatorCase, seed: int, ceiling: float):
    operator = case.operator(seed).eval()
    before = norm_of(operator.bind(case.domain))
    after = norm_of(operator.bind(case.domain, ceiling))
    assert after == pytest.approx(min(before, ceiling), rel=1e-5)


@with_weights
@pytest.mark.spec("R1.6")
def test_weights_below_the_ceiling_stay_as_they_are(case: OperatorCase):
    operator = case.operator()
    for ceiling in (None, 1.01 * norm_of(operator.bind(case.domain))):
        bound = operator.bind(case.domain, ceiling)
        assert all(a is b for a, b in zip(bound.tensors, operator.weights, strict=True))


@with_weights
def test_stored_weights_stay_untouched(case: OperatorCase):
    operator = case.operator()
    before = [w.clone() for w in operator.weights]
    operator.bind(case.domain, 0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, operator.weights, strict=True))


def test_the_norm_of_a_convolution_is_not_that_of_its_reshaped_kernel():
    # All ones: the reshaped 1 × 9 kernel has norm 3, the operator on a large image almost 9.
    operator = Conv2d(1, 1, 3).double()
    torch.nn.init.ones_(operator.weight)
    assert norm_of(operator.bind((1, 12, 12), 1.0)) == pytest.approx(1.0, rel=1e-6)


@with_weights
@pytest.mark.spec("R1.6")
def test_the_gradient_passes_through_the_scale(case: OperatorCase):
    operator = case.operator().eval()
    plain = operator.bind(case.domain)
    ceiling = 0.5 * norm_of(plain)
    index = len(operator.weights) - 1
    weight = operator.weights[index].detach().clone()
    cotangents = [random(*w.shape, seed=1) for w in operator.weights]
    direction = random(*weight.shape, seed=2)

    bound = operator.bind(case.domain, ceiling)
    value = sum((c * w).sum() for c, w in zip(cotangents, bound.tensors, strict=True))
    gradient = torch.autograd.grad(value, operator.weights)[index]  # type: ignore[arg-type]

    def by_singular_values(moved: torch.Tensor) -> float:
        weights = [*operator.weights]
        weights[index] = moved
        scale = min(1.0, ceiling / norm_of(plain.with_tensors(tuple(weights))))
        weights[0] = weights[0] * scale
        return sum((c * w).sum().item() for c, w in zip(cotangents, weights, strict=True))

    step = 1e-6
    change = by_singular_values(weight + step * direction) - by_singular_values(weight - step * direction)
    assert (gradient * direction).sum().item() == pytest.approx(change / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_without_a_finite_norm_are_reported(value: float):
    operator = Dense(3, 4)
    torch.nn.init.constant_(operator.weight, value)
    with pytest.raises(NonFiniteError, match="near overflow, as when a training diverges"):
        operator.bind((3,), 0.97)
