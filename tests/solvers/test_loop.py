"""The loop that all solvers share, with rules made up for the purpose."""

import pytest
import torch

from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Solver, find_fixed_point, solve_fixed_point
from opteq.solvers.broyden import Broyden
from opteq.solvers.picard import Picard
from tests.solvers.problems import Affine, Recorder


class Scripted(Solver):
    """Visits the given points one after the other, whatever the map says."""

    def __init__(self, points, tol=1e-5):
        self.points, self.tol, self.max_steps = points, tol, len(points) + 1

    def start(self, x):
        points = iter(self.points)
        # The rule is asked once more than it is followed: the last answer is where it would go on.
        return lambda x, f, g, changes: torch.full_like(x, next(points, 7.0))


def test_a_rule_that_leaves_the_finite_numbers_gives_the_iterate_before():
    z, info = solve_fixed_point(lambda z: (z + 1).tanh(), torch.zeros(2, 3), Scripted([4.0, torch.inf, 5.0]))
    assert torch.equal(z, torch.full((2, 3), 4.0))
    assert not info.converged.any()
    assert info.steps.tolist() == [3, 3]


def test_the_iterate_that_met_the_tolerance_is_returned_and_not_its_image():
    # T(z) = 2 + z/1e7 meets the tolerance of 1e-5 at z = 2, which differs from T(2).
    z, info = solve_fixed_point(
        lambda z: 2 + 1e-7 * z.double(), torch.zeros(1, 1).double(), Scripted([3.0, 2.0])
    )
    assert info.steps.tolist() == [3]
    assert torch.equal(z, torch.full((1, 1), 2.0).double())


def test_residuals_are_relative_to_the_image_and_scaled_as_asked():
    info = find_fixed_point(lambda z: z / 2 + 3, torch.zeros(1, 1), Scripted([2.0]), residual_scale=10.0).info
    # At 0 the image is 3, at 2 it is 4.
    torch.testing.assert_close(info.residuals, torch.tensor([[10 * 3 / 3, 10 * 2 / 4]]))


def test_the_norm_runs_over_all_entries_of_a_sample():
    image = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    _, info = solve_fixed_point(lambda z: image, torch.tensor([[[3.0, 0.0], [1.0, 2.0]]]), Scripted([]))
    torch.testing.assert_close(info.residuals, torch.tensor([[5**0.5 / 5]]))


def test_the_result_of_every_sample_comes_with_its_image():
    start = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    found = find_fixed_point(lambda z: 2 + 1e-7 * z, start, Scripted([3.0, 2.0], tol=1e-6))
    # The first sample starts near the fixed point and stops there, the second one at the second point.
    assert found.info.steps.tolist() == [1, 3]
    assert found.value.tolist() == [[2.0], [2.0]]
    assert found.image.tolist() == [[2 + 2e-7], [2 + 2e-7]]


def test_iterates_may_change_their_dtype_between_the_samples_that_stop():
    # The first sample stops at once, the second after iterates that came back in low precision.
    def rounded(z):
        return (0.5 * z + 0.25).to(torch.bfloat16) * (z != 0)

    value, info = solve_fixed_point(rounded, torch.tensor([[0.0], [1.0]]), Picard(0.05))
    assert info.steps[0] < info.steps[1]
    assert info.converged.all()
    torch.testing.assert_close(value.float(), torch.tensor([[0.0], [0.5]]), rtol=0.1, atol=0)


@pytest.mark.parametrize("solver", [Picard(1e-9, 200), Anderson(1e-9, 50), Broyden(1e-9, 50)])
def test_a_first_image_that_is_known_is_a_step_that_is_not_evaluated_again(solver):
    problem = Affine.random((0.5, 0.9))
    recorder = Recorder(problem)
    whole = find_fixed_point(problem, problem.start, solver)
    rest = find_fixed_point(recorder, problem.start, solver, first=problem(problem.start))
    torch.testing.assert_close(rest.value, whole.value, rtol=1e-12, atol=0)
    assert rest.info.steps.tolist() == [n - 1 for n in whole.info.steps.tolist()]
    assert len(recorder.inputs) == rest.info.evaluations
    torch.testing.assert_close(rest.info.residuals[1], whole.info.residuals[1, 1:], rtol=1e-6, atol=0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("solver", [Anderson(tol=1e-5), Picard(tol=1e-5, max_steps=200)])
def test_defaults_for_new_tensors_are_not_those_of_the_state(solver):
    # In C a wider tensor would be read as what it is not; one elsewhere has no address to write to.
    scale = torch.linspace(0.1, 0.9, 3)[:, None]
    expected = solve_fixed_point(lambda z: 1 + scale * z, torch.zeros(3, 4), solver)
    torch.set_default_dtype(torch.float64)
    try:
        wide = solve_fixed_point(lambda z: 1 + scale * z, torch.zeros(3, 4).float(), solver)
    finally:
        torch.set_default_dtype(torch.float32)
    start = torch.zeros(3, 4)
    with torch.device("meta"):
        elsewhere = solve_fixed_point(lambda z: 1 + scale * z, start, solver)
    for found in (wide, elsewhere):
        assert torch.equal(found[0], expected[0])
        assert found[0].dtype == torch.float32
        assert torch.equal(found[1].steps, expected[1].steps)
        torch.testing.assert_close(found[1].residuals, expected[1].residuals, equal_nan=True)
