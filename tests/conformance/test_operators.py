"""Every linear operator keeps the promises of `LinearOperator`."""

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq import check_operator
from opteq.errors import ShapeError
from tests.conformance.instances import OPERATORS, OperatorCase
from tests.conformance.reference import dense, matrix_of, random, spectral_norm

seeds = st.integers(0, 10_000)
every_operator = pytest.mark.parametrize("case", OPERATORS.values(), ids=OPERATORS)
with_weights = pytest.mark.parametrize(
    "case",
    [c for n, c in OPERATORS.items() if "pool" not in n],
    ids=[n for n in OPERATORS if "pool" not in n],
)


@every_operator
@given(seed=seeds)
@settings(max_examples=5)
@pytest.mark.spec("R2.7")
def test_the_checker_passes_every_operator(case: OperatorCase, seed: int):
    operator = case.operator(seed)
    true = spectral_norm(matrix_of(operator, case.domain)).item()
    report = check_operator(operator, case.domain)
    assert report.error <= 1e-12
    assert report.norm == pytest.approx(true, rel=1e-6)
    assert report.quick_bound >= report.bound >= true


@every_operator
def test_forward_and_adjoint_are_one_matrix_and_its_transpose(case: OperatorCase):
    operator, bound = case.operator(), case.bound()
    matrix = matrix_of(operator, case.domain)
    assert matrix.shape[0] == math.prod(bound.codomain)
    x, y = random(3, *case.domain), random(3, *bound.codomain, seed=1)
    for product in (operator(x), bound(x)):
        torch.testing.assert_close(product.flatten(1), x.flatten(1) @ matrix.mT, rtol=1e-12, atol=1e-12)
        assert product.shape == (3, *bound.codomain)
    torch.testing.assert_close(bound.adjoint(y).flatten(1), y.flatten(1) @ matrix, rtol=1e-12, atol=1e-12)
    assert bound.adjoint(y).shape == x.shape


@every_operator
def test_the_gram_matrix_is_the_product_of_both(case: OperatorCase):
    bound = case.bound().detach()
    y = random(3, *bound.codomain)
    assert bound.gram(products=0) is None
    gram = bound.gram(products=10**6)
    if gram is not None:
        torch.testing.assert_close(gram(y), bound(bound.adjoint(y)), rtol=1e-12, atol=1e-12)


@every_operator
def test_products_share_no_memory_with_their_arguments(case: OperatorCase):
    bound = case.bound()
    x = random(3, *case.domain)
    y = random(3, *bound.codomain, seed=1)
    kept_x, kept_y = x.clone(), y.clone()
    bound(x).mul_(2)
    bound.adjoint(y).mul_(2)
    assert torch.equal(x, kept_x)
    assert torch.equal(y, kept_y)
    for gradient in bound.weight_gradient((x, y)):
        gradient.mul_(2)
    assert torch.equal(x, kept_x)
    assert torch.equal(y, kept_y)


@every_operator
def test_a_bound_operator_takes_other_weights(case: OperatorCase):
    bound, other = case.bound(0), case.bound(1)
    x = random(2, *case.domain)
    before, moved = bound(x), bound.with_tensors(other.tensors)
    assert all(a is b for a, b in zip(moved.tensors, other.tensors, strict=True))
    torch.testing.assert_close(moved(x), other(x))
    y = other(x)
    torch.testing.assert_close(moved.adjoint(y), other.adjoint(y))
    torch.testing.assert_close(moved.norm_bound(), other.norm_bound())
    torch.testing.assert_close(bound(x), before, rtol=0, atol=0)


@every_operator
def test_a_detached_operator_is_the_same_without_a_graph(case: OperatorCase):
    bound, x = case.bound(), random(2, *case.domain)
    assert bound(x).requires_grad is bool(bound.tensors)
    detached = bound.detach()
    assert not detached(x).requires_grad
    torch.testing.assert_close(detached(x), bound(x).detach(), rtol=0, atol=0)


@every_operator
def test_weight_gradient_is_that_of_autograd(case: OperatorCase):
    bound = case.bound()
    x = random(3, *case.domain)
    y = random(3, *bound.codomain, seed=1)
    computed = bound.weight_gradient((x, y))
    value = (y * bound(x)).sum()
    expected = torch.autograd.grad(value, bound.tensors) if bound.tensors else ()
    assert len(computed) == len(expected)
    for c, e in zip(computed, expected, strict=True):
        torch.testing.assert_close(c, e, rtol=1e-11, atol=1e-12)
    others = bound.weight_gradient((2 * x, y))
    summed = bound.weight_gradient((x, y), (2 * x, y), (x, y))
    for total, once, twice in zip(summed, computed, others, strict=True):
        torch.testing.assert_close(total, 2 * once + twice, rtol=1e-12, atol=1e-13)


@every_operator
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.spec("R1.6")
def test_the_first_norm_estimate_is_the_largest_singular_value(case: OperatorCase, training: bool):
    operator = case.operator().train(training)
    true = spectral_norm(matrix_of(operator, case.domain)).item()
    estimate = operator.norm(case.domain).item()
    # Operators without weights work in float32.
    rounding = 1e-12 if operator.weights else 1e-6
    assert true * (1 - 1e-5) <= estimate <= true * (1 + rounding)


@every_operator
@given(seed=seeds)
@settings(max_examples=5)
@pytest.mark.spec("R1.6")
def test_the_bounds_are_never_below_the_norm(case: OperatorCase, seed: int):
    bound = case.bound(seed)
    true = spectral_norm(matrix_of(bound, case.domain))
    for value in (bound.quick_norm_bound(), bound.norm_bound()):
        assert value >= true
        assert value.dtype == torch.float64


@with_weights
def test_the_bounds_of_float32_weights_hold_for_these_very_weights(case: OperatorCase):
    operator = case.operator().float()
    bound = operator.bind(case.domain)
    true = spectral_norm(dense(bound))
    assert bound.quick_norm_bound() >= true
    assert bound.norm_bound() >= true


@with_weights
@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_the_bound_follows_the_weights_and_the_shape(case: OperatorCase, error: float):
    operator = case.operator()
    bound = operator.bind(case.domain, error=error)
    first = bound.norm_bound()
    assert bound.norm_bound() is first  # not computed again
    assert operator.bind(case.domain, error=error).norm_bound() is first  # nor for another solve
    scaled = bound.with_tensors((3 * bound.tensors[0], *bound.tensors[1:]))
    torch.testing.assert_close(scaled.norm_bound(), 3 * first)
    with torch.no_grad():
        operator.weights[0].mul_(2)
    torch.testing.assert_close(operator.bind(case.domain, error=error).norm_bound(), 2 * first)
    if len(case.domain) > 1:
        larger = (case.domain[0], *(2 * n for n in case.domain[1:]))
        other = operator.bind(larger, error=error)
        assert other.norm_bound() >= spectral_norm(dense(other))


@with_weights
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_unchanged_weights_give_the_same_estimate(case: OperatorCase, training: bool):
    operator = case.operator()
    operator.train().norm(case.domain)
    with torch.no_grad():
        operator.weights[0].add_(0.01 * random(*operator.weights[0].shape))
    operator.train(training)
    first = operator.norm(case.domain)
    assert all(torch.equal(operator.norm(case.domain), first) for _ in range(3))


@with_weights
@pytest.mark.spec("R1.6")
def test_the_estimate_follows_weights_in_training(case: OperatorCase):
    operator = case.operator().train()
    for step in range(30):
        with torch.no_grad():
            for weight in operator.weights:
                weight.add_(0.002 * random(*weight.shape, seed=step))
        true = spectral_norm(matrix_of(operator, case.domain)).item()
        # What the default ceiling of 0.97 needs to keep the norm below 1.
        assert 0.97 * true <= operator.norm(case.domain).item() <= true * (1 + 1e-12)


@with_weights
def test_the_norm_has_the_derivative_of_the_largest_singular_value(case: OperatorCase):
    operator = case.operator().eval()
    gradients = torch.autograd.grad(operator.norm(case.domain), operator.weights)
    step = 1e-5
    for weight, gradient in zip(operator.weights, gradients, strict=True):
        direction = random(*weight.shape)
        norms = []
        for sign in (1, -1):
            other = copy.deepcopy(operator)
            index = next(i for i, w in enumerate(operator.weights) if w is weight)
            with torch.no_grad():
                other.weights[index].add_(sign * step * direction)
            norms.append(spectral_norm(matrix_of(other, case.domain)))
        expected = (norms[0] - norms[1]) / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-6)


@with_weights
def test_second_derivatives_of_the_norm_are_refused(case: OperatorCase):
    operator = case.operator()
    gradients = torch.autograd.grad(operator.norm(case.domain), operator.weights, create_graph=True)
    with pytest.raises(NotImplementedError, match="max_norm=None"):
        sum(g.sum() for g in gradients).backward()  # type: ignore[union-attr]


@every_operator
def test_copies(case: OperatorCase):
    operator = case.operator().eval()
    x, norm = random(2, *case.domain), operator.norm(case.domain)
    operator.bind(case.domain).norm_bound()
    loaded = case.operator(seed=1)
    loaded.norm(case.domain)  # must not survive the loading
    loaded.load_state_dict(operator.state_dict())
    loaded.eval()
    pickled = pickle.loads(pickle.dumps(operator))
    for other in (copy.deepcopy(operator), pickled, loaded):
        torch.testing.assert_close(other(x), operator(x), rtol=0, atol=0)
        torch.testing.assert_close(other.norm(case.domain), norm, rtol=0, atol=0)
    assert set(operator.state_dict()) == {name for name, _ in operator.named_parameters()}


@with_weights
def test_a_saved_operator_loads_without_executing_code(case: OperatorCase):
    operator, buffer = case.operator(), io.BytesIO()
    operator.norm(case.domain)
    torch.save(operator.state_dict(), buffer)
    buffer.seek(0)
    other = case.operator(seed=1)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for a, b in zip(other.weights, operator.weights, strict=True):
        assert torch.equal(a, b)


@with_weights
def test_autocast_does_not_touch_the_norm(case: OperatorCase):
    operator = case.operator().float().eval()
    expected = operator.norm(case.domain)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(copy.deepcopy(operator).norm(case.domain), expected)
        gradient = torch.autograd.grad(operator.norm(case.domain), operator.weights)[0]
    reference = torch.autograd.grad(operator.norm(case.domain), operator.weights)[0]
    torch.testing.assert_close(gradient, reference)


@every_operator
def test_wrong_inputs_are_named(case: OperatorCase):
    operator = case.operator()
    channels, *sides = case.domain
    for shape in [(2, channels + 1, *sides), (2, *case.domain, 3), (channels,)]:
        with pytest.raises(ShapeError, match=rf"Expected `x` of shape \(batch, {channels}.*got \("):
            operator(torch.zeros(shape, dtype=torch.float64))
