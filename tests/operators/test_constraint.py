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


def meeting(gap: float, dtype: torch.dtype) -> Dense:
    """A matrix with `σ_2 = (1 - gap) σ_1`, `σ_1 = 2`."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 9, dtype=torch.float64))[0] for n in (12, 9))
    values = torch.linspace(2, 0.1, 9, dtype=torch.float64)
    values[1] = 2 * (1 - gap)
    operator = Dense(9, 12).to(dtype)
    operator.weight.data.copy_((left * values) @ right.mT)
    return operator


@pytest.mark.spec("R1.6")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_where_two_singular_values_meet_the_gradient_is_a_subgradient(gap, training, dtype):
    operator, eps = meeting(gap, dtype).train(training), torch.finfo(dtype).eps
    for _ in range(3):  # in training the singular vector follows the weights
        W = operator.weight.detach().double()
        left, values, right = torch.linalg.svd(W)
        (gradient,) = (g.double() for g in torch.autograd.grad(operator.norm((9,)), operator.weight))
        # `G` is one for ‖·‖₂ at `W` if its nuclear norm is at most 1 and ⟨G, W⟩ = ‖W‖₂.
        assert torch.linalg.matrix_norm(gradient, "nuc") <= 1 + 20 * eps
        assert (gradient * W).sum() >= values[0] * (1 - 20 * eps)
        if gap > 1e4 * eps:
            exact = torch.outer(left[:, 0], right[0])
            assert (gradient - exact).norm() < 100 * eps / gap
        # That of the scaled weight, to a loss linear in it, follows: bounded by twice the scale.
        (acting,) = operator.bind((9,), 0.97).tensors
        loss = random(12, 9).to(dtype)
        (through,) = torch.autograd.grad((acting * loss).sum(), operator.weight)
        expected = 0.97 / values[0] * (loss - (loss * W).sum() / values[0] * gradient)
        torch.testing.assert_close(through.double(), expected, rtol=1e-4, atol=100 * eps)
        operator.weight.data.add_(1e-3 * random(12, 9, seed=2).to(dtype) * gap)


@pytest.mark.spec("R1.6")
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-10, 3e9, 1e12, 1e18, 3e19, 1e25, 1e36])
def test_the_ceiling_knows_no_large_and_no_small_weights(size):
    # In float32, where the square of 2e19 is not finite.
    operator = meeting(0.1, torch.float32)
    operator.weight.data.mul_(size / 2)
    exact = operator.weight.detach().double().requires_grad_()
    norm = torch.linalg.matrix_norm(exact, 2)
    assert operator.norm((9,)).item() == pytest.approx(norm.item(), rel=1e-5)
    loss = random(12, 9)
    (acting,) = operator.bind((9,), 0.97).tensors
    expected = exact * (0.97 / norm).clamp(max=1)
    torch.testing.assert_close(acting.double(), expected, rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad((acting * loss.float()).sum(), operator.weight)
    (wanted,) = torch.autograd.grad((expected * loss).sum(), exact)
    assert (gradient.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_the_gradient_is_finite_as_far_as_norms_are():
    operator = meeting(0.1, torch.float32)
    operator.weight.data.mul_(1e37)
    (acting,) = operator.bind((9,), 0.97).tensors
    assert norm_of(operator.double().bind((9,), 0.97)) == pytest.approx(0.97, rel=1e-6)
    assert spectral_norm(acting.detach().double()).item() == pytest.approx(0.97, rel=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_weights_without_a_finite_norm_are_reported(value: float):
    operator = Dense(3, 4)
    torch.nn.init.constant_(operator.weight, value)
    with pytest.raises(NonFiniteError, match="near overflow, as when a training diverges"):
        operator.bind((3,), 0.97)
