"""Singular values against those of a matrix that is assembled column by column."""

import math

import pytest
import torch
from torch.nn import functional as F

from opteq.operators.compose import Compose, DepthwiseSeparableConv2d
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense
from opteq.operators.norms.almost_orthogonal import AlmostOrthogonal
from opteq.operators.norms.orthogonal import Orthogonal
from opteq.operators.norms.unconstrained import Unconstrained
from opteq.operators.norms.weight_normalised import WeightNormalised
from opteq.operators.resample import AveragePool
from opteq.operators.starts import GaussianStart
from opteq.theory import spectrum
from opteq.theory.spectrum import singular_values

CEILING = 0.9
OPERATORS = {
    "dense": lambda: Dense(7, 12),
    "tall": lambda: Dense(12, 7),
    "ceiling": lambda: Conv2d(3, 5, 3, start=GaussianStart(1.0)),
    "few channels out": lambda: Conv2d(5, 2, 5),
    "almost orthogonal": lambda: Conv2d(3, 5, 3, norm=AlmostOrthogonal()),
    "orthogonal": lambda: Conv2d(3, 5, 3, norm=Orthogonal()),
    "weight normalised": lambda: Conv2d(3, 5, 3, norm=WeightNormalised()),
    "none": lambda: Conv2d(3, 5, 3, norm=Unconstrained()),
    "separable": lambda: DepthwiseSeparableConv2d(3, 6, 3),
    "pooled": lambda: Compose(AveragePool(3, 2), Conv2d(3, 4, 3)),
}


def bound_of(name):
    torch.manual_seed(0)
    operator = OPERATORS[name]()
    return operator.bind((operator.in_channels, 6, 4) if operator.sides else (operator.in_channels,), CEILING)


def matrix_of(bound):
    """Row by row of unit vectors, as the operator acts on them."""
    size = math.prod(bound.domain)
    exact = bound.with_tensors(tuple(w.detach().double() for w in bound.tensors))
    return exact(torch.eye(size, dtype=torch.float64).view(size, *bound.domain)).flatten(1).mT


@pytest.mark.spec("R7.9")
@pytest.mark.parametrize("name", OPERATORS)
def test_all_singular_values_are_those_of_the_matrix(name):
    bound = bound_of(name)
    found, expected = singular_values(bound), torch.linalg.svdvals(matrix_of(bound))
    assert found.kind == "exact"
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-7)
    assert found.largest == pytest.approx(expected[0].item(), rel=1e-9)
    assert found.above(0.5) == pytest.approx(expected[(len(expected) - 1) // 2].item(), rel=1e-6)
    assert found.above(1.0) == pytest.approx(expected[-1].item(), rel=1e-6, abs=1e-7)
    if name == "orthogonal":
        # Less what the rounding of float32 might add to the norm.
        torch.testing.assert_close(found.values, torch.full_like(expected, CEILING), rtol=1e-4, atol=0)


@pytest.mark.spec("R7.9")
def test_the_matrix_is_that_of_the_weight_with_zero_padding():
    """The tests above take what the operator does for granted; here it is written out."""
    bound = bound_of("ceiling")
    weight = bound.tensors[0].detach().double()
    basis = torch.eye(72, dtype=torch.float64).view(72, 3, 6, 4)
    matrix = F.conv2d(basis, weight, padding=1).flatten(1)
    torch.testing.assert_close(
        singular_values(bound).values, torch.linalg.svdvals(matrix), rtol=1e-9, atol=1e-9
    )


@pytest.mark.spec("R7.9")
@pytest.mark.parametrize("name", ["ceiling", "few channels out", "separable", "pooled"])
def test_the_quadrature_finds_the_norm_the_moments_and_the_shares(name, monkeypatch):
    bound = bound_of(name)
    expected = torch.linalg.svdvals(matrix_of(bound))
    monkeypatch.setattr(spectrum, "_LARGEST", 0)
    # Enough vectors for the averages to settle, and fewer steps than there are values.
    monkeypatch.setattr(spectrum, "_PROBES", 200)
    monkeypatch.setattr(spectrum, "_STEPS", 12)
    found = singular_values(bound)
    assert found.kind == "estimate"
    assert found.shares.sum().item() == pytest.approx(1, rel=1e-6)
    assert (found.values.diff() <= 0).all()
    assert expected[0] * 0.99 <= found.largest <= expected[0] * (1 + 1e-5)
    for power in (2, 4):
        moment = (found.shares * found.values**power).sum().item()
        assert moment == pytest.approx((expected**power).mean().item(), rel=0.05)
    for level in (0.25, 0.5, 0.75):
        middle = level * expected[0]
        share = found.shares[found.values > middle].sum().item()
        assert share == pytest.approx((expected > middle).double().mean().item(), abs=0.08)


@pytest.mark.spec("R7.9")
def test_a_large_operator_is_estimated_within_its_memory():
    torch.manual_seed(0)
    bound = Conv2d(3, 5, 3, norm=Orthogonal()).bind((3, 40, 40), CEILING)
    found = singular_values(bound)
    assert found.kind == "estimate"
    assert (found.domain, found.codomain) == ((3, 40, 40), (5, 40, 40))
    # All singular values are alike: the space is exhausted after one step.
    assert found.largest == pytest.approx(CEILING, rel=1e-4)
    assert found.above(0.999) == pytest.approx(CEILING, rel=1e-4)


def test_a_basis_holds_no_more_numbers_than_allowed(monkeypatch):
    monkeypatch.setattr(spectrum, "_LARGEST", 0)
    monkeypatch.setattr(spectrum, "_NUMBERS", 5 * 72)
    assert len(singular_values(bound_of("ceiling")).values) == 5 * spectrum._PROBES
    # Two steps are the fewest from which there is something to learn.
    monkeypatch.setattr(spectrum, "_NUMBERS", 1)
    assert len(singular_values(bound_of("ceiling")).values) == 2 * spectrum._PROBES


def test_the_quadrature_is_the_same_every_time_and_leaves_the_generator_alone(monkeypatch):
    monkeypatch.setattr(spectrum, "_LARGEST", 0)
    bound = bound_of("ceiling")
    before = torch.get_rng_state()
    first = singular_values(bound)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(singular_values(bound).values, first.values)


def test_weights_of_low_precision_are_looked_at_in_float32(monkeypatch):
    monkeypatch.setattr(spectrum, "_LARGEST", 0)
    bound = bound_of("ceiling")
    rounded = bound.with_tensors(tuple(w.detach().bfloat16() for w in bound.tensors))
    expected = torch.linalg.svdvals(matrix_of(rounded))[0].item()
    assert singular_values(rounded).largest == pytest.approx(expected, rel=1e-3)


def test_the_value_that_a_share_reaches():
    values, shares = torch.tensor([4.0, 2.0, 1.0]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    found = spectrum.Spectrum(values, shares, "estimate", (3,), (3,))
    reached = {0.1: 4, 0.25: 4, 0.26: 2, 0.5: 2, 0.51: 1, 1.0: 1}
    assert {share: found.above(share) for share in reached} == reached
