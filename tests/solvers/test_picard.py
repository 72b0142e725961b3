import pytest
import torch

from opteq import Picard
from opteq.errors import ConfigError
from opteq.solvers.base import solve_fixed_point
from tests.solvers.problems import Affine, Recorder


@pytest.mark.parametrize("damping", [1.0, 0.3])
def test_iterates_are_damped_steps(damping):
    problem = Affine.random((0.9,))
    recorder = Recorder(problem)
    solve_fixed_point(recorder, problem.start, Picard(1e-12, 5, damping))
    z = problem.start
    for point in recorder.inputs:
        torch.testing.assert_close(point, z)
        z = (1 - damping) * z + damping * problem(z)


def test_damping_makes_an_oscillation_converge():
    def flip(z):
        return 1 - z

    start = torch.zeros(1, 2, dtype=torch.float64)
    assert not solve_fixed_point(flip, start, Picard(1e-8, 100))[1].converged
    z, info = solve_fixed_point(flip, start, Picard(1e-8, 100, damping=0.4))
    assert info.converged
    torch.testing.assert_close(z, torch.full_like(z, 0.5), rtol=1e-7, atol=0)


@pytest.mark.parametrize("damping", [0.0, -0.5, 1.5, float("nan")])
def test_damping_out_of_range_is_refused(damping):
    with pytest.raises(ConfigError, match=r"Expected `damping` of Picard to be in \(0, 1\], got"):
        Picard(damping=damping)


def test_iterates_that_grow_beyond_all_norms_have_not_converged():
    value, info = solve_fixed_point(lambda z: 1.5 * z + 1, torch.zeros(2, 3), Picard(max_steps=400))
    assert not info.converged.any()
    assert torch.isfinite(value).all()
