"""The loop that all solvers share, with rules made up for the purpose."""

import pytest
import torch

from opteq.errors import ConfigError
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import Solver, check_tolerance, find_fixed_point, solve_fixed_point
from opteq.solvers.broyden import Broyden
from opteq.solvers.nesterov import Nesterov
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


def test_an_image_that_is_not_finite_at_once_gives_the_start():
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = find_fixed_point(lambda z: torch.stack([z[0] / 0, z[1] / 2]), start, Scripted([4.0], tol=0.1))
    assert torch.equal(found.value[0], start[0])
    assert torch.equal(found.image[0], start[0])
    assert not found.info.converged.any()
    assert found.info.steps.tolist() == [1, 2]


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


def test_an_image_of_low_precision_comes_in_the_precision_of_its_iterate():
    found = find_fixed_point(lambda z: (z / 2 + 1).bfloat16(), torch.zeros(1, 2), Picard(0.1, damping=0.5))
    assert found.value.dtype == found.image.dtype == torch.float32
    torch.testing.assert_close(found.image, torch.full((1, 2), 2.0), rtol=0.1, atol=0)


@pytest.mark.parametrize("solver", [Anderson(max_steps=6), Broyden(max_steps=6), Nesterov(max_steps=6)])
def test_under_autocast_the_products_of_a_solver_are_in_full_precision(solver):
    def scaled(z):  # by nothing that autocast would run in low precision
        return torch.linspace(0.1, 0.9, 12) * z + 1

    plain, cast = Recorder(scaled), Recorder(scaled)
    solve_fixed_point(plain, torch.zeros(2, 12), solver)
    with torch.autocast("cpu", torch.bfloat16):
        solve_fixed_point(cast, torch.zeros(2, 12), solver)
    # Low precision would be off by a hundredth; compiled code, which autocast goes without, rounds otherwise.
    torch.testing.assert_close(torch.stack(cast.inputs), torch.stack(plain.inputs), rtol=1e-4, atol=1e-4)


def test_a_batch_that_is_one_system_has_one_residual_and_stops_at_once():
    rates = torch.tensor([[0.1], [0.5], [0.9]], dtype=torch.float64)
    start, solver = torch.zeros(3, 4, dtype=torch.float64), Picard(1e-6, 500)
    found = find_fixed_point(lambda z: rates * z + 1, start, solver, joint=True)
    row = find_fixed_point(lambda z: (rates * z.view(3, 4) + 1).view(1, 12), start.view(1, 12), solver)
    assert torch.equal(found.value, row.value.view(3, 4))
    assert torch.equal(found.image, row.image.view(3, 4))
    assert found.info.steps.tolist() == 3 * row.info.steps.tolist()
    assert found.info.converged.tolist() == [True, True, True]
    assert torch.equal(found.info.residuals, row.info.residuals.expand(3, -1))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 64), (torch.float64, 64), (torch.bfloat16, 32)])
def test_a_tolerance_out_of_reach_says_where_it_is_set(dtype, width):
    name = str(dtype).removeprefix("torch.")
    for owner, method in (("solver", "Anderson"), ("gradient", "Implicit")):
        with pytest.raises(ConfigError) as refusal:
            check_tolerance(1e-20, dtype, owner)
        possible = f"{20 * torch.finfo(dtype).eps:.1g}"
        assert str(refusal.value) == (
            f"tol=1e-20 cannot be reached in {name}; use at least {possible} or a wider dtype. It is the"
            f" `tol` of the {owner}, as in EquilibriumLayer(…, {owner}={method}(tol={possible})), or"
            f" --model.network.body.{owner}.tol={possible} on the command line; the dtype is that of"
            f" layer.to(torch.float{width}), or --trainer.precision={width}."
        )


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
