"""Every similarity: its gradient, Hessian and pullback are those of its value."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.similarity import Similarity
from tests.conformance.instances import ESTIMATED_MAPS, MAPS, STEEP_MAPS, MapCase
from tests.conformance.reference import jacobian, random, spectral_norm

BOUNDED = STEEP_MAPS | {
    name: case for name, case in MAPS.items() if isinstance(case.equation(), SimilarityEquation)
}
CASES = BOUNDED | ESTIMATED_MAPS
STEPS = {
    name: case
    for name, case in BOUNDED.items()
    if case.map().activation.indicator and case.equation().contraction().value.isfinite().all()
}
every_similarity = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_bounded_similarity = pytest.mark.parametrize("case", BOUNDED.values(), ids=BOUNDED)
# From near the start, through the states that matter, to where the weights have vanished.
scales = st.sampled_from([0.01, 0.3, 1.0, 3.0])
seeds = st.integers(0, 10_000)


def similarity_of(case: MapCase, seed: int = 0) -> Similarity:
    equation = case.equation(seed).detach()
    assert isinstance(equation, SimilarityEquation)
    return equation.similarity


def state(similarity: Similarity, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * random(*similarity.initial().shape, seed=seed)


@every_similarity
@given(seed=seeds, scale=scales)
@settings(max_examples=8)
@pytest.mark.spec("R6.1", "R6.2")
def test_gradient_is_that_of_the_value(case: MapCase, seed: int, scale: float):
    similarity = similarity_of(case, seed)
    y = state(similarity, seed, scale).requires_grad_()
    value = similarity.value(y)
    assert value.shape == y.shape[:1]
    expected = torch.autograd.grad(value.sum(), y)[0]
    torch.testing.assert_close(similarity.gradient(y.detach()), expected, rtol=1e-10, atol=1e-12)


@every_similarity
@given(seed=seeds, scale=scales)
@settings(max_examples=8)
@pytest.mark.spec("R6.1", "R6.2")
def test_hessian_product_is_that_of_autograd(case: MapCase, seed: int, scale: float):
    similarity = similarity_of(case, seed)
    y = state(similarity, seed, scale)
    v = state(similarity, seed + 1)
    expected = torch.autograd.functional.hvp(lambda y: similarity.value(y).sum(), y, v)[1]
    torch.testing.assert_close(similarity.linearize(y).product(v), expected, rtol=1e-9, atol=1e-12)


@every_similarity
@given(seed=seeds, scale=scales)
@settings(max_examples=8)
@pytest.mark.spec("R6.1", "R6.2", "R6.3")
def test_pullback_is_that_of_autograd_for_every_tensor(case: MapCase, seed: int, scale: float):
    similarity = similarity_of(case, seed)
    y, u = state(similarity, seed, scale), state(similarity, seed + 1)
    leaves = tuple(t.clone().requires_grad_() for t in similarity.tensors)
    attached = similarity.with_tensors(leaves)
    # Through the value, since of a Gram matrix only the symmetric part has a meaning.
    y_leaf = y.clone().requires_grad_()
    gradient = torch.autograd.grad(attached.value(y_leaf).sum(), y_leaf, create_graph=True)[0]
    expected = torch.autograd.grad((u * gradient).sum(), leaves)
    computed = similarity.linearize(y).pullback(u)
    assert len(computed) == len(expected)
    for c, e, leaf in zip(computed, expected, leaves, strict=True):
        assert c is not None
        assert c.shape == leaf.shape
        if leaf.dim() == 2 and leaf.shape == leaf.mT.shape and torch.allclose(leaf, leaf.mT):
            c, e = c + c.mT, e + e.mT
        torch.testing.assert_close(c, e, rtol=1e-9, atol=1e-12)


@every_bounded_similarity
@given(seed=seeds, scale=scales)
@settings(max_examples=8)
@pytest.mark.spec("R6.4")
def test_bounds_dominate_the_hessian(case: MapCase, seed: int, scale: float):
    similarity = similarity_of(case, seed)
    y = state(similarity, seed, scale)
    true = spectral_norm(jacobian(similarity.gradient, y))
    everywhere, here = similarity.hessian_bound(), similarity.hessian_bound(y)
    assert everywhere.kind == here.kind == "bound"
    assert (everywhere.value >= true).all()
    assert (here.value >= true).all()
    assert (here.value <= everywhere.value).all()


@pytest.mark.parametrize("name", STEPS)
@given(seed=seeds, scale=scales)
@settings(max_examples=8)
def test_proximal_steps_are_short_enough(name: str, seed: int, scale: float):
    # The inverse step is at least the largest eigenvalue of the Hessian of ½‖y‖² - S, which can exceed 1.
    equation = STEPS[name].equation(seed).detach()
    assert isinstance(equation, SimilarityEquation)
    y = state(equation.similarity, seed, scale)
    curvature = torch.linalg.eigvalsh(jacobian(lambda y: y - equation.similarity.gradient(y), y)).max()
    assert equation.reformulate(gradient=True).scale >= curvature


@every_similarity
def test_the_initial_gradient_is_the_gradient_at_zero(case: MapCase):
    similarity = similarity_of(case)
    assert not similarity.initial().any()
    torch.testing.assert_close(
        similarity.initial_gradient(), similarity.gradient(similarity.initial()), rtol=1e-13, atol=1e-13
    )


@every_similarity
def test_other_tensors_change_the_value_and_leave_the_original(case: MapCase):
    similarity = similarity_of(case)
    y = state(similarity)
    before = similarity.value(y)
    for index in range(len(similarity.tensors)):
        tensors = list(similarity.tensors)
        tensors[index] = 1.3 * tensors[index]
        assert not torch.allclose(similarity.with_tensors(tuple(tensors)).value(y), before)
    assert torch.equal(similarity.value(y), before)
