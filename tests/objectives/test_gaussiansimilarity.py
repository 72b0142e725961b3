"""The bounds on the Hessian of the Gaussian similarity are attained."""

import math

import pytest
import torch

from opteq import Conv2d, Patches
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from tests.conformance.reference import jacobian, random

SCALE = 0.8


@pytest.fixture
def similarity() -> GaussianSimilarity:
    """Of patches of 8 numbers, with `W` 0.8 times the identity."""
    W = Conv2d(4, 4, 1).double()
    with torch.no_grad():
        W.weight.copy_(SCALE * torch.eye(4, dtype=torch.float64)[:, :, None, None])
    projection = random(8, 3, seed=1)
    gamma = torch.tensor([0.3, 2.0], dtype=torch.float64)
    c = random(2, 4, 2, 4)
    return GaussianSimilarity(c, gamma, projection @ projection.mT, W.bind((4, 2, 4)).detach(), Patches(2, 2))


def state_at(similarity: GaussianSimilarity, residual: torch.Tensor) -> torch.Tensor:
    """The `y` for which every patch of `c - W y` is `residual`, `(batch, 8)`."""
    patches = residual[:, None].expand(-1, 4, -1)
    return (similarity.injection - similarity.merge(patches)) / SCALE


@pytest.mark.spec("R6.4")
def test_the_hessian_is_largest_where_the_state_meets_the_injection(similarity):
    y = state_at(similarity, torch.zeros(2, 8, dtype=torch.float64))
    norm = torch.linalg.matrix_norm(jacobian(similarity.gradient, y), 2)
    torch.testing.assert_close(norm, (SCALE**2 * torch.linalg.matrix_norm(similarity.gram, 2)).expand(2))
    for bound in (similarity.hessian_bound(), similarity.hessian_bound(y)):
        torch.testing.assert_close(bound.value, norm, rtol=1e-7, atol=0)
        assert bound.kind == "bound"
        assert bound.assumptions == ("The norm of W is bounded for this height and width.",)


@pytest.mark.spec("R6.4")
def test_the_hessian_rises_by_2_over_e_to_the_three_halves_at_most(similarity):
    # Along the first eigenvector of G, at γ rᵀG r = 3/2.
    values, vectors = torch.linalg.eigh(similarity.gram)
    length = (1.5 / (similarity.gamma * values[-1])).sqrt()
    y = state_at(similarity, length[:, None] * vectors[:, -1])
    largest = torch.linalg.eigvalsh(jacobian(similarity.gradient, y))[:, -1]
    expected = (2 * math.exp(-1.5) * SCALE**2 * values[-1]).expand(2)
    torch.testing.assert_close(largest, expected)
    torch.testing.assert_close(similarity.largest_eigenvalue_bound().value, expected, rtol=1e-7, atol=0)
    # Nearer to it than that no patch is: what is left is this rise, and the weight of the nearest one.
    torch.testing.assert_close(similarity.hessian_bound(y).value, expected, rtol=1e-7, atol=0)
    nearer = state_at(similarity, 0.5 * length[:, None] * vectors[:, -1])
    torch.testing.assert_close(
        similarity.hessian_bound(nearer).value, (math.exp(-0.375) * SCALE**2 * values[-1]).expand(2)
    )
