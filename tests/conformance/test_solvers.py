"""What every solver must do. A new solver joins by a line in `SOLVERS`."""

import dataclasses
import re

import pytest
import torch

from opteq import (
    Anderson,
    Broyden,
    Conv2d,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    Nesterov,
    OptEqUnit,
    Patches,
    Picard,
)
from opteq.errors import ConfigError
from opteq.solvers.base import solve_fixed_point
from tests.solvers.problems import Affine, Recorder, TwoBranches, joined

SOLVERS = {
    "picard": Picard(),
    "damped picard": Picard(damping=0.7),
    "anderson": Anderson(),
    "damped anderson": Anderson(damping=0.7),
    "broyden": Broyden(),
    "nesterov": Nesterov(),
}
RATES = (0.0, 0.5, 0.9, 0.97)


@pytest.fixture(params=SOLVERS.values(), ids=SOLVERS.keys())
def solver(request):
    """The solver with options loose enough for every problem here."""
    return dataclasses.replace(request.param, tol=1e-11, max_steps=3000)


def relative_residual(function, z):
    image = function(z)
    return (image - z).flatten(1).norm(dim=1) / image.flatten(1).norm(dim=1)


def test_finds_known_fixed_points_of_every_conditioning(solver):
    problem = Affine.random(RATES)
    z, info = solve_fixed_point(problem, problem.start, solver)
    assert info.converged.all()
    torch.testing.assert_close(z, problem.solution, rtol=1e-8, atol=1e-8)


def optequnit():
    return OptEqUnit(Dense(7, 9), Dense(5, 9), max_norm=0.95), (6, 5)


def convolutional_optequnit():
    return OptEqUnit(Conv2d(3, 4), Conv2d(2, 4), activation="softplus", max_norm=0.9), (3, 2, 5, 6)


def gaussian():
    return GaussianMap(Dense(7, 9), Dense(5, 9), gamma=0.05, max_norm=0.95), (6, 5)


def gaussian_with_patches():
    return GaussianMap(Conv2d(3, 4), Conv2d(2, 4), Patches(2, 2), hidden=6, max_norm=0.95), (3, 2, 4, 6)


@pytest.mark.spec("R1.1", "R6.2", "R6.4")
@pytest.mark.parametrize("make", [optequnit, convolutional_optequnit, gaussian, gaussian_with_patches])
def test_agrees_with_a_long_plain_iteration(solver, make):
    torch.manual_seed(0)
    equilibrium_map, shape = make()
    # Weights well above the ceiling, so that the problem is as hard as the ceiling allows.
    equilibrium_map.double().W.weight.data *= 10
    x = torch.randn(shape, dtype=torch.float64)
    solution = EquilibriumLayer(equilibrium_map, solver).solve(x)
    assert solution.info.converged.all()

    equation = equilibrium_map.bind(x)
    plain = equation.initial()
    for _ in range(1500):
        plain = equation(plain)
    assert plain.abs().max() > 0.05
    torch.testing.assert_close(solution.value, plain, rtol=0, atol=1e-8)


def test_the_value_meets_the_tolerance_it_was_accepted_for(solver):
    problem = Affine.random(RATES)
    loose = dataclasses.replace(solver, tol=1e-3)
    z, info = solve_fixed_point(problem, problem.start, loose)
    residual = relative_residual(problem, z)
    assert (residual <= 1e-3).all()
    torch.testing.assert_close(info.residual, residual, rtol=1e-6, atol=1e-15)


def test_each_sample_stops_on_its_own(solver):
    problem = Affine.random(RATES)
    recorder = Recorder(problem)
    _, info = solve_fixed_point(recorder, problem.start, dataclasses.replace(solver, tol=1e-6))
    assert info.evaluations == len(recorder.inputs) == info.steps.max()
    assert info.residuals.shape == (len(RATES), info.evaluations)
    assert info.steps[0] < info.steps[-1]
    for row, steps in zip(info.residuals, info.steps, strict=True):
        assert (row[: steps - 1] > 1e-6).all()
        assert row[steps - 1] <= 1e-6
        assert row[steps:].isnan().all()


def test_a_batch_gives_what_its_samples_give_alone(solver):
    problem = Affine.random((0.0, 0.3, 0.97, 0.5, 0.9, 0.97, 0.1, 0.8))
    options = dataclasses.replace(solver, tol=1e-6)
    together, info = solve_fixed_point(problem, problem.start, options)
    for i in range(8):
        one = problem[i : i + 1]
        alone, info_alone = solve_fixed_point(one, one.start, options)
        assert info_alone.steps[0] == info.steps[i]
        torch.testing.assert_close(together[i], alone[0], rtol=1e-10, atol=1e-10)


def test_out_of_steps_is_not_converged_and_gives_the_last_iterate(solver):
    problem = Affine.random((0.0, 0.97))
    recorder = Recorder(problem)
    z, info = solve_fixed_point(recorder, problem.start, dataclasses.replace(solver, max_steps=3))
    assert not info.converged[1]
    assert info.steps[1] == info.evaluations == 3
    assert torch.equal(z[1], recorder.inputs[-1][1])


def test_a_sample_that_turns_nan_keeps_its_last_finite_iterate_and_harms_no_other(solver):
    problem = Affine.random((0.9, 0.9, 0.9))
    calls = 0

    def poisoned(z):
        nonlocal calls
        calls += 1
        image = problem(z)
        if calls == 4:
            image[1] = torch.nan
        return image

    recorder = Recorder(poisoned)
    z, info = solve_fixed_point(recorder, problem.start, solver)
    assert info.converged.tolist() == [True, False, True]
    assert torch.equal(z[1], recorder.inputs[3][1])
    assert info.steps[1] == 4
    clean, clean_info = solve_fixed_point(problem, problem.start, solver)
    assert torch.equal(z[[0, 2]], clean[[0, 2]])
    assert torch.equal(info.steps[[0, 2]], clean_info.steps[[0, 2]])


def test_divergence_gives_finite_iterates(solver):
    # exp(z) + 1 = z has no real solution; plain iteration overflows within a few steps.
    z, info = solve_fixed_point(
        lambda z: z.exp() + 1, torch.zeros(2, 3), dataclasses.replace(solver, tol=1e-3)
    )
    assert torch.isfinite(z).all()
    assert not info.converged.any()
    assert torch.isfinite(info.residual).all()


def test_a_map_that_hits_exactly_zero_is_not_taken_for_broken(solver):
    # T(-7) = 0: an infinite relative residual, and no reason to give up.
    z, info = solve_fixed_point(
        lambda z: torch.relu(z / 2 + 1) / 2, torch.full((1, 2), -7.0).double(), solver
    )
    assert info.residuals[0, 0] == torch.inf
    assert info.converged.all()
    torch.testing.assert_close(z, torch.full_like(z, 2 / 3))


def test_a_start_that_is_the_solution_takes_one_evaluation(solver):
    z, info = solve_fixed_point(lambda z: 0.5 * z, torch.zeros(2, 3, dtype=torch.float64), solver)
    assert info.steps.tolist() == [1, 1]
    assert info.residuals.tolist() == [[0.0], [0.0]]
    assert torch.equal(z, torch.zeros_like(z))


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_the_scale_of_the_problem_does_not_matter(solver, size):
    problem = Affine.random((0.5, 0.97), dtype=torch.float32)
    options = dataclasses.replace(solver, tol=1e-5)
    z, info = solve_fixed_point(problem, problem.start, options)
    scaled, scaled_info = solve_fixed_point(
        Affine(problem.matrix, size * problem.offset), problem.start, options
    )
    assert info.converged.all()
    assert scaled_info.converged.all()
    assert (scaled_info.steps - info.steps).abs().max() <= 2
    torch.testing.assert_close(scaled / size, z, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_dtype_is_kept_and_used(solver, dtype, tol):
    problem = Affine.random(RATES, dtype=dtype)
    z, info = solve_fixed_point(problem, problem.start, dataclasses.replace(solver, tol=tol))
    assert z.dtype == dtype
    assert info.converged.all()
    assert (relative_residual(problem, z) <= tol).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_tolerance_that_rounding_keeps_out_of_reach_is_refused(solver, dtype):
    floor = 10 * torch.finfo(dtype).eps
    start = torch.zeros(1, 2, dtype=dtype)
    solve_fixed_point(lambda z: z / 2, start, dataclasses.replace(solver, tol=floor))
    for tol in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="to be positive and finite"):
            dataclasses.replace(solver, tol=tol)
    for tol in (0.99 * floor, 1e-300):
        with pytest.raises(ConfigError, match=r"cannot be reached in (bfloat16|float32|float64); ") as error:
            solve_fixed_point(lambda z: z / 2, start, dataclasses.replace(solver, tol=tol))
    advice = float(re.search(r"use at least (\S+) or a wider dtype", str(error.value))[1])
    solve_fixed_point(lambda z: z / 2, start, dataclasses.replace(solver, tol=advice))


def test_a_state_of_two_branches_is_solved_as_one(solver):
    torch.manual_seed(0)
    branches = TwoBranches()
    x = torch.randn(4, 6, dtype=torch.float64)
    solution = EquilibriumLayer(branches, solver).solve(x)
    assert [tuple(z.shape) for z in solution.value] == [(4, 3), (4, 2, 2, 2)]

    weight = branches.joint_weight
    plain = torch.zeros(4, 11, dtype=torch.float64)
    for _ in range(2000):
        plain = (plain @ weight.mT + x).tanh() @ weight
    torch.testing.assert_close(joined(solution.value), plain, rtol=0, atol=1e-9)


def test_the_memory_layout_of_the_input_does_not_matter(solver):
    torch.manual_seed(0)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(3, 4), Conv2d(2, 4)), solver).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    contiguous = layer(x)
    channels_last = layer(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(channels_last, contiguous, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(4,), (0, 3)])
def test_scalar_states_and_empty_batches(solver, shape):
    z, info = solve_fixed_point(lambda z: z / 2 + 1, torch.zeros(shape, dtype=torch.float64), solver)
    assert info.converged.all()
    torch.testing.assert_close(z, torch.full(shape, 2.0, dtype=torch.float64))


def test_one_object_may_serve_many_solves(solver):
    problem, other = Affine.random(RATES), Affine.random((0.8,), size=5, seed=1)
    first, _ = solve_fixed_point(problem, problem.start, solver)
    solve_fixed_point(other, other.start, solver)
    second, _ = solve_fixed_point(problem, problem.start, solver)
    assert torch.equal(first, second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        solver.tol = 1.0


def test_max_steps_below_one_is_refused(solver):
    with pytest.raises(ConfigError, match=r"Expected `max_steps` of .* to be at least 1, got 0"):
        dataclasses.replace(solver, max_steps=0)
