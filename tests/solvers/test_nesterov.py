import math

import pytest
import torch

from opteq import Conv2d, EquilibriumLayer, GaussianMap, Nesterov, Patches, Picard
from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.solvers.base import solve_fixed_point
from tests.solvers.problems import Affine, Recorder


def textbook_nesterov(function, point, steps):
    """Points at which one sample evaluates the gradient, with O'Donoghue and Candès's restart."""
    old, t, restarts, points = point, 1.0, 0, []
    for _ in range(steps):
        points.append(point)
        new = function(point[None])[0]
        following = (1 + math.sqrt(1 + 4 * t * t)) / 2
        weight = (t - 1) / following
        if ((point - new) * (new - old)).sum() > 0:
            weight, following, restarts = 0.0, 1.0, restarts + 1
        point, old, t = new + weight * (new - old), new, following
    return points, restarts


def test_iterates_are_those_of_the_textbook():
    problem = Affine.random((0.9, 0.99))
    recorder = Recorder(problem)
    solve_fixed_point(recorder, problem.start, Nesterov(1e-14, 60))
    for i in range(2):
        expected, restarts = textbook_nesterov(lambda z, i=i: problem[i : i + 1](z), problem.start[i], 60)
        assert restarts > 0
        torch.testing.assert_close(
            torch.stack(recorder.inputs)[:, i], torch.stack(expected), rtol=0, atol=1e-10
        )


def test_needs_far_fewer_evaluations_than_plain_iteration():
    problem = Affine.random((0.999,), size=40)
    _, fast = solve_fixed_point(problem, problem.start, Nesterov(1e-8, 20000))
    _, plain = solve_fixed_point(problem, problem.start, Picard(1e-8, 20000))
    assert fast.converged.all()
    assert plain.converged.all()
    assert fast.evaluations < plain.evaluations / 5


@pytest.mark.spec("R6.4")
def test_the_tolerance_holds_for_the_map_and_not_only_for_the_short_step():
    # On kernel maps a step has length t < 1, so its own residual is smaller than that of the map.
    torch.manual_seed(0)
    kernel = GaussianMap(Conv2d(3, 4), Conv2d(2, 4), Patches(2, 2), hidden=6).double()
    x = torch.randn(3, 2, 4, 6, dtype=torch.float64)
    solution = EquilibriumLayer(kernel, Nesterov(1e-3, 500)).solve(x)
    assert solution.info.converged.all()
    image = kernel.bind(x)(solution.value)
    residual = (image - solution.value).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)
    assert (residual <= 1e-3).all()
    # Not by solving far too precisely either.
    assert (residual >= 1e-5).any()


def test_maps_that_are_no_gradient_step_are_refused():
    kernel = GaussianMap(Conv2d(3, 4), Conv2d(2, 4), activation="softplus")
    layer = EquilibriumLayer(kernel, Nesterov())
    with pytest.raises(ConfigError, match=r"Nesterov on a kernel map needs .* use Anderson"):
        layer(torch.randn(1, 2, 4, 4))

    class Anything(Equation):
        initial = contraction = __call__ = None

    with pytest.raises(ConfigError, match="Anything is no gradient step; use Anderson instead of Nesterov"):
        Anything().reformulate(gradient=True)
