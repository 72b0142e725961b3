import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opteq import (
    AveragePool,
    Compose,
    Conv2d,
    Dense,
    DepthwiseSeparableConv2d,
    GaussianStart,
    OrthogonalStart,
    check_operator,
)
from opteq.errors import ConfigError, ShapeError
from tests.conformance.instances import seeded
from tests.conformance.reference import matrix_of, random, spectral_norm


@st.composite
def convolutions(draw: st.DrawFn):
    groups = draw(st.integers(1, 3))
    build = (
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 3, 5, 7])),
        groups,
    )
    operator = seeded(lambda: Conv2d(*build), seed=draw(st.integers(0, 10_000)))
    # Kernels of one sign, or of signs like a checkerboard, are largest at one frequency and attain the
    # bound most closely.
    pattern = draw(st.sampled_from(["random", "positive", "checkerboard"]))
    if pattern != "random":
        operator.weight.data.abs_()
    if pattern == "checkerboard":
        index = torch.arange(build[2])
        operator.weight.data *= 1 - 2 * ((index[:, None] + index) % 2)
    return operator, (build[0], draw(st.integers(1, 5)), draw(st.integers(1, 5)))


def naive(weight: np.ndarray, x: np.ndarray, groups: int) -> np.ndarray:
    """Zero-padded cross-correlation, pixel by pixel."""
    out, per_group, k, _ = weight.shape
    batch, _, height, width = x.shape
    y = np.zeros((batch, out, height, width))
    for o in range(out):
        first = o // (out // groups) * per_group
        for i in range(height):
            for j in range(width):
                for a in range(k):
                    for b in range(k):
                        row, column = i + a - k // 2, j + b - k // 2
                        if 0 <= row < height and 0 <= column < width:
                            patch = x[:, first : first + per_group, row, column]
                            y[:, o, i, j] += patch @ weight[o, :, a, b]
    return y


@given(convolutions())
@settings(max_examples=15)
def test_values_are_those_of_the_definition(case):
    operator, domain = case
    x = random(2, *domain)
    expected = naive(operator.weight.detach().numpy(), x.numpy(), operator.groups)
    np.testing.assert_allclose(operator(x).detach().numpy(), expected, rtol=1e-11, atol=1e-12)


@given(convolutions())
@settings(max_examples=60)
@pytest.mark.spec("R1.6")
def test_estimate_norm_and_bound_are_in_order(case):
    operator, domain = case
    true = spectral_norm(matrix_of(operator, domain)).item()
    assert true * (1 - 1e-3) <= operator.norm(domain).item() <= true * (1 + 1e-12)
    bound = operator.bind(domain)
    assert bound.quick_norm_bound().item() >= bound.norm_bound().item() >= true


@given(convolutions())
@settings(max_examples=30)
def test_the_checker_passes_convolutions_of_any_shape(case):
    assert check_operator(*case).error <= 1e-12


@pytest.mark.parametrize("groups", [1, 2])
def test_the_quick_bound_becomes_sharp_on_large_images(groups):
    operator = seeded(lambda: Conv2d(groups, 2, 3, groups=groups))
    domain = (groups, 14, 14)
    true = spectral_norm(matrix_of(operator, domain))
    assert operator.bind(domain).quick_norm_bound() < 1.03 * true


@pytest.mark.spec("R2.7")
def test_separable_convolution_is_that_of_torch():
    operator = seeded(lambda: DepthwiseSeparableConv2d(4, 6, 5, multiplier=2))
    depthwise = torch.nn.Conv2d(4, 8, 5, padding=2, groups=4, bias=False).double()
    pointwise = torch.nn.Conv2d(8, 6, 1, bias=False).double()
    depthwise.weight.data, pointwise.weight.data = operator.weights
    x = random(2, 4, 6, 5)
    torch.testing.assert_close(operator(x), pointwise(depthwise(x)))


def test_average_pool_is_the_mean_of_blocks():
    x = random(2, 3, 4, 6)
    blocks = x.numpy().reshape(2, 3, 2, 2, 3, 2).mean((3, 5))
    np.testing.assert_allclose(AveragePool(3, 2)(x).numpy(), blocks, rtol=1e-14)
    bound = AveragePool(3, 2).bind((3, 4, 6))
    assert bound.quick_norm_bound() == 0.5
    assert 0.5 <= bound.norm_bound() <= 0.5 * (1 + 1e-8)


def test_memory_format_does_not_matter():
    operator = seeded(lambda: Conv2d(3, 4))
    x = random(2, 3, 5, 4)
    y = x.contiguous(memory_format=torch.channels_last)
    bound = operator.bind((3, 5, 4))
    torch.testing.assert_close(bound(y), bound(x), rtol=1e-13, atol=1e-13)
    for a, b in zip(bound.weight_gradient((y, bound(y))), bound.weight_gradient((x, bound(x))), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Conv2d(2, 2, 4), "odd `kernel_size`"),
        (lambda: Conv2d(3, 2, 3, groups=2), "`groups` to divide both channel numbers, got 2 for 3 and 2"),
        (lambda: Conv2d(2, 3, 3, groups=2), "`groups` to divide both channel numbers, got 2 for 2 and 3"),
        (
            lambda: Dense(2, 2, start=GaussianStart(-1.0)),
            "`std` of GaussianStart to be at least 0 and finite",
        ),
        (lambda: Dense(2, 2, start=GaussianStart(math.inf)), "to be at least 0 and finite, got inf"),
        (
            lambda: Dense(2, 2, start=OrthogonalStart(0.0)),
            "`gain` of OrthogonalStart to be positive and finite",
        ),
        (lambda: Dense(2, 2, start=OrthogonalStart(math.nan)), "to be positive and finite, got nan"),
        (lambda: Conv2d(0, 2), "`in_channels` to be a whole number of at least 1, got 0"),
        (lambda: Conv2d(2, "3"), "`out_channels` to be a whole number of at least 1, got '3'"),
        (lambda: Conv2d(2, 3, (3, 3)), r"`kernel_size` to be a whole number of at least 1, got \(3, 3\)"),
        (lambda: Conv2d(2, 2, 3, groups=0.5), "`groups` to be a whole number of at least 1, got 0.5"),
        (lambda: Dense(0, 2), "`in_channels` to be a whole number of at least 1, got 0"),
        (lambda: Dense(2, 1.5), "`out_channels` to be a whole number of at least 1, got 1.5"),
        (lambda: DepthwiseSeparableConv2d(2, 2, 3, 1.5), "`multiplier` to be a whole number of at least 1"),
        (lambda: AveragePool(2, 0), "`factor` to be a whole number of at least 1, got 0"),
        (lambda: AveragePool(2, 1.5), "`factor` to be a whole number of at least 1, got 1.5"),
        (lambda: AveragePool("2", 2), "`channels` to be a whole number of at least 1, got '2'"),
        (lambda: Compose(), "at least one operator"),
        (lambda: Compose([Conv2d(2, 3)]), r"one by one, such as .*, got builtins.list"),
        (lambda: Compose(torch.nn.Conv2d(2, 3, 3), Conv2d(3, 3)), r"got torch\.nn\.modules\.conv\.Conv2d"),
        (lambda: Compose(Conv2d(2, 3), Conv2d(2, 3)), "matching channels, got 3"),
    ],
)
def test_impossible_operators_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_operators_say_what_they_are():
    assert repr(Dense(2, 3)) == "Dense(2, 3, norm=Ceiling())"
    assert repr(Conv2d(2, 3, 5)) == "Conv2d(2, 3, 5, norm=Ceiling())"
    assert repr(Conv2d(4, 6, groups=2)) == "Conv2d(4, 6, 3, groups=2, norm=Ceiling())"
    assert repr(AveragePool(2, 4)) == "AveragePool(2, factor=4)"


def test_pooling_needs_divisible_sides():
    with pytest.raises(ShapeError, match=r"divisible by 2, got \(3, 4\)"):
        AveragePool(1, 2)(torch.zeros(1, 1, 3, 4))
