import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from opteq import Anderson, Dense, EquilibriumLayer, GaussianMap, SimilarityMap
from opteq.errors import ConfigError
from opteq.theory.feature_map import gaussian_features, truncation_bound
from tests.conformance.reference import random

GAMMA = 0.4


def kernel(c, v):
    return torch.exp(-GAMMA * (c - v).square().sum(1)) / (2 * GAMMA)


def truncated(c, v, levels):
    return (gaussian_features(c, GAMMA, levels) * gaussian_features(v, GAMMA, levels)).sum(1)


@pytest.mark.spec("R6.5")
def test_the_features_reproduce_the_kernel():
    c, v = 0.6 * random(20, 3), 0.6 * random(20, 3, seed=1)
    torch.testing.assert_close(truncated(c, v, 13), kernel(c, v), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(truncated(c, v, 3), kernel(c, v), rtol=1e-2)


@pytest.mark.spec("R6.5")
def test_the_error_falls_with_every_level_below_its_bound():
    c, v = 0.6 * random(30, 3), 0.6 * random(30, 3, seed=1)
    errors = []
    for levels in range(1, 13):
        error = (truncated(c, v, levels) - kernel(c, v)).abs()
        bound = truncation_bound(c, v, GAMMA, levels)
        assert bound.kind == "bound"
        assert (error <= bound.value * (1 + 1e-9) + 1e-15).all()
        errors.append(error.max().item())
    # Faster than any geometric rate: a level divides the error by more than the one before did.
    ratios = [after / before for before, after in pairwise(errors[4:])]
    assert all(ratio < 0.5 for ratio in ratios)
    assert ratios[-1] < ratios[0]
    assert errors[-1] < 1e-5 * errors[0]


@pytest.mark.spec("R6.5")
def test_the_bound_is_attained_by_one_positive_level():
    # With ⟨c, v⟩ > 0 the next term alone is a lower bound for the remainder.
    c = v = torch.full((1, 2), 0.3, dtype=torch.float64)
    error = (truncated(c, v, 4) - kernel(c, v)).abs()
    bound = truncation_bound(c, v, GAMMA, 4).value
    assert 0.8 * bound < error <= bound


@pytest.mark.spec("R6.5")
def test_levels_have_powers_of_the_width_and_the_weights_of_the_series():
    v = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    features = gaussian_features(v, GAMMA, 3)
    assert features.shape == (1, 1 + 2 + 4)
    scale = math.exp(-GAMMA * 13) / math.sqrt(2 * GAMMA)
    expected = [1.0, *(math.sqrt(2 * GAMMA) * t for t in (2, 3))]
    expected += [2 * GAMMA / math.sqrt(2) * t for t in (4, 6, 6, 9)]
    torch.testing.assert_close(features[0], scale * torch.tensor(expected, dtype=torch.float64))


@pytest.mark.spec("R6.5")
def test_the_statement_as_printed_does_not_reproduce_the_kernel():
    # λ = e^{-γ‖c‖²}e^{-γ‖v‖}, without the square, and no 1/(2γ).
    c, v = random(20, 3), random(20, 3, seed=1)
    weight = torch.exp(-GAMMA * (c.square().sum(1) + v.square().sum(1))) / (2 * GAMMA)
    inner = truncated(c, v, 13) / weight
    printed = torch.exp(-GAMMA * (c.square().sum(1) + v.norm(dim=1))) * inner
    assert (printed - kernel(c, v)).abs().max() > 0.1


class Truncated(nn.Module):
    """`⟨Φ(c), Φ(W y)⟩`: an OptEq model on features of finite width."""

    def __init__(self, W: nn.Module, levels: int) -> None:
        super().__init__()
        self.W, self.levels = W, levels

    def forward(self, y, c):
        return truncated(c, self.W(y), self.levels)


@pytest.mark.spec("R6.5")
def test_equilibria_of_the_wider_models_tend_to_those_of_the_gaussian_map():
    torch.manual_seed(0)
    gaussian = GaussianMap(Dense(4, 3), Dense(2, 3), gamma=GAMMA, bias=False, max_norm=None).double()
    x = random(6, 2)
    solver = Anderson(tol=1e-12, max_steps=1000)
    expected = EquilibriumLayer(gaussian, solver)(x)
    distances = []
    for levels in (2, 4, 6, 8, 10):
        finite = SimilarityMap(Truncated(gaussian.W, levels), gaussian.injection.operator, 4)
        finite.checked = True
        distances.append((EquilibriumLayer(finite, solver)(x) - expected).norm().item())
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.01
    assert distances[-1] < 1e-5


def test_what_cannot_be_computed_is_refused():
    v = torch.ones(1, 10)
    with pytest.raises(ConfigError, match="`gamma` to be positive"):
        gaussian_features(v, 0.0, 3)
    with pytest.raises(ConfigError, match="`levels` to be a whole number of at least 1"):
        truncation_bound(v, v, 1.0, 0)
    with pytest.raises(ConfigError, match="8 levels of 10 numbers are 11111111 features"):
        gaussian_features(v, 1.0, 8)
