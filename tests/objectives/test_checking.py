"""Faults planted in regularisers, each of which the checker names."""

import math

import pytest
import torch

from opteq import HSIC, AbsoluteNorm, Decorrelation, Incay, RandomFeatureHSIC, SquaredNorm, check_regulariser
from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.objectives.regularisers import Regulariser

SHAPES = [(5,), (3, 4, 4)]
pytestmark = pytest.mark.spec("R4.1")


class Huber(Regulariser):
    """½z² near zero, |z| - ½ further out."""

    curvature = (0.0, 1.0)

    def value(self, z):
        return torch.where(z.abs() < 1, 0.5 * z.square(), z.abs() - 0.5).flatten(1).sum(1)

    def gradient(self, z):
        return z.clamp(-1, 1)

    def prox(self, z, gamma):
        return torch.where(z.abs() < 1 + gamma, z / (1 + gamma), z - gamma * z.sign())


RIGHT = [
    SquaredNorm(),
    AbsoluteNorm(),
    Incay(),
    Incay(0.3),
    Huber(),
    Decorrelation(),
    HSIC(),
    RandomFeatureHSIC(7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("regulariser", RIGHT, ids=lambda r: type(r).__name__)
def test_right_ones_pass(regulariser, shape):
    report = check_regulariser(regulariser, shape)
    assert report.error < 1e-9
    assert getattr(regulariser, "reference", None) is None  # it was a copy that saw the features
    if regulariser.curvature:
        low, high = regulariser.curvature
        assert low - 1e-4 <= report.curvature[0] <= report.curvature[1] <= high + 1e-4


def test_the_curvatures_are_those_of_the_hessian():
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).double()
    hessian = matrix + matrix.mT

    class Quadratic(Regulariser):
        def value(self, z):
            return 0.5 * ((z @ hessian) * z).sum(1)

        def gradient(self, z):
            return z @ hessian

    values = torch.linalg.eigvalsh(hessian)
    found = check_regulariser(Quadratic(), (6,)).curvature
    assert found == pytest.approx((values[0].item(), values[-1].item()), rel=1e-2)


def faulty(**members):
    return type("Faulty", (Huber,), members)()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("members", "error", "sentence"),
    [
        (
            {"gradient": lambda self, z: z.clamp(-1, 1) / 2},
            ConfigError,
            "`gradient` .* 5.0e-01 of its size",
        ),
        (
            {"gradient": lambda self, z: z.clamp(-1, 1).sum()},
            ShapeError,
            "`gradient` .* of the features",
        ),
        ({"value": lambda self, z: Huber().value(z).sum()}, ShapeError, r"one number a sample.* got \(\)"),
        ({"value": lambda self, z: Huber().value(z) / 0}, NonFiniteError, "not finite"),
        ({"value": lambda self, z: Huber().value(z.detach())}, ConfigError, "lost its way back"),
        ({"value": lambda self, z: 0.0}, ConfigError, r"`Faulty\.value\(z\)` to be a tensor, got 0\.0"),
        (
            {"gradient": lambda self, z: None},
            ConfigError,
            r"`Faulty\.gradient\(z\)` to be a tensor, got",
        ),
        (
            {
                "value": lambda self, z: Huber().value(z) / len(z),
                "gradient": lambda self, z: z.clamp(-1, 1) / len(z),
            },
            ConfigError,
            "depends on the others of a batch",
        ),
        ({"curvature": (0.0, 0.5)}, ConfigError, r"between 0 and 0\.5, but there it is .* and 1[;. ]"),
        ({"curvature": (0.5, 1.0)}, ConfigError, r"between 0\.5 and 1"),
        ({"prox": lambda self, z, gamma: z / (1 + gamma)}, ConfigError, "`prox` .* no minimum"),
        ({"prox": lambda self, z, gamma: z}, ConfigError, "`prox` .* no minimum"),
    ],
)
def test_a_fault_is_named(members, error, sentence, shape):
    with pytest.raises(error, match=sentence):
        check_regulariser(faulty(**members), shape)


@pytest.mark.parametrize("shape", [5, (0, 3), (2.5,), "ab"])
def test_a_shape_that_is_none_is_refused(shape):
    with pytest.raises(ConfigError, match="Expected `shape` to be that of the features"):
        check_regulariser(Huber(), shape)


def test_what_is_no_regulariser_is_refused():
    with pytest.raises(ConfigError, match="`regulariser`"):
        check_regulariser(torch.nn.ReLU(), (3,))


def test_a_kink_has_no_upper_bound():
    assert AbsoluteNorm().curvature == (0.0, math.inf)
    assert check_regulariser(AbsoluteNorm(), (4,)).curvature[1] >= 0
