"""The record of a solve, in C and with PyTorch."""

import math

import pytest
import torch

from opteq.native.serving import takes
from opteq.solvers.progress import Progress

pytestmark = pytest.mark.usefixtures("way")


def table(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_samples_stop_one_by_one():
    progress = Progress(torch.zeros(4, 1), tol=0.1, max_steps=5, scale=2.0, in_c=takes())
    # Residuals 2, .1, .4, 1.
    assert progress.record(table((1, 1), (0.05, 1), (0.4, 2), (2, 4))) == (3, 0)
    assert progress.active.tolist() == [True, False, True, True]
    # What the second would do now is not asked; the third stops for the tolerance, the fourth for good.
    assert progress.record(table((1, 1), (9, 1), (0.1, 2), (math.nan, 4))) == (1, 1)
    assert progress.record(table((math.inf, 1), (0, 1), (math.nan, 2), (0, 4))) == (0, 2)
    info = progress.info()
    assert info.evaluations == 3
    assert info.steps.tolist() == [3, 1, 2, 2]
    assert info.converged.tolist() == [False, True, True, False]
    nan, inf = math.nan, math.inf
    expected = torch.tensor([[2, 2, inf], [0.1, nan, nan], [0.4, 0.1, nan], [1, nan, nan]])
    torch.testing.assert_close(info.residuals, expected, equal_nan=True)


def test_an_image_of_nothing_is_relative_to_the_least_size():
    progress = Progress(torch.zeros(3, 1), tol=0.1, max_steps=5, scale=1.0, in_c=takes())
    # A change of nothing has converged; an infinite residual is no reason to give up.
    tiny = torch.finfo(torch.float32).tiny
    assert progress.record(table((0, 0), (tiny, 0), (tiny, math.nan))) == (2, 0)
    assert progress.active.tolist() == [False, True, True]
    assert str(progress.info().residuals[:, 0].tolist()) == "[0.0, 1.0, nan]"


def test_an_image_that_is_too_large_for_its_norm_has_not_converged():
    progress = Progress(torch.zeros(1, 1), tol=0.1, max_steps=5, scale=1.0, in_c=takes())
    assert progress.record(table((1e38, math.inf))) == (1, 0)
    assert progress.info().residuals.tolist() == [[math.inf]]


def test_who_never_stops_took_all_steps():
    progress = Progress(torch.zeros(2, 1), tol=0.1, max_steps=2, scale=1.0, in_c=takes())
    for _ in range(2):
        assert progress.record(table((1, 1), (1, 1))) == (2, 0)
    info = progress.info()
    assert info.steps.tolist() == [2, 2]
    assert not info.converged.any()


def test_no_samples_have_no_progress():
    progress = Progress(torch.zeros(0, 1), tol=0.1, max_steps=2, scale=1.0, in_c=takes())
    assert progress.record(torch.empty(0, 2, dtype=torch.float64)) == (0, 0)
    assert progress.info().residuals.shape == (0, 1)
