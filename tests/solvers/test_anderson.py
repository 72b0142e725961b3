import pytest
import torch

from opteq import Anderson, Picard
from opteq.solvers.base import find_fixed_point, solve_fixed_point
from tests.solvers.problems import Affine, Recorder


def curved(z):
    """A contraction that is neither affine nor symmetric."""
    turn = torch.tensor([[0.2, -0.6, 0.1], [0.5, 0.3, 0.2], [-0.1, 0.2, 0.7]], dtype=z.dtype)
    return (z @ turn.mT).sin() + torch.tensor([1.0, -0.5, 0.3], dtype=z.dtype)


def textbook_anderson(function, z, memory, damping, steps):
    """Iterates of one sample; the mixing weights from a least-squares problem in differences."""
    inputs, residuals = [], []
    for _ in range(steps):
        inputs.append(z)
        residuals.append(function(z[None])[0] - z)
        inputs_kept, residuals_kept = inputs[-memory:], residuals[-memory:]
        newest = residuals_kept[-1]
        weights = torch.ones(1, dtype=z.dtype)
        if len(inputs_kept) > 1:
            differences = torch.stack([g - newest for g in residuals_kept[:-1]], dim=1)
            others = torch.linalg.lstsq(differences, -newest[:, None], driver="gelsd").solution[:, 0]
            weights = torch.cat((others, 1 - others.sum()[None]))
        pairs = zip(weights, inputs_kept, residuals_kept, strict=True)
        z = sum(w * (point + damping * g) for w, point, g in pairs)
    return inputs


@pytest.mark.parametrize(("memory", "damping"), [(1, 1.0), (2, 1.0), (3, 1.0), (3, 0.6)])
def test_iterates_are_those_of_the_textbook(memory, damping):
    start = torch.tensor([[0.3, -1.0, 0.7], [2.0, 1.0, 0.0]], dtype=torch.float64)
    recorder = Recorder(curved)
    solve_fixed_point(recorder, start, Anderson(1e-12, 7, memory, damping))
    for i in range(2):
        expected = torch.stack(textbook_anderson(curved, start[i], memory, damping, 7))
        actual = torch.stack(recorder.inputs)[:, i]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-7)


def test_memory_one_is_picard_iteration():
    problem = Affine.random((0.5, 0.9))
    anderson, picard = Recorder(problem), Recorder(problem)
    solve_fixed_point(anderson, problem.start, Anderson(1e-6, 500, memory=1))
    solve_fixed_point(picard, problem.start, Picard(1e-6, 500))
    torch.testing.assert_close(torch.stack(anderson.inputs), torch.stack(picard.inputs), rtol=0, atol=1e-12)


def test_an_affine_problem_of_few_dimensions_is_solved_in_as_many_steps():
    # With as many iterates as there are dimensions plus one, some affine combination has residual 0.
    problem = Affine.random((0.9, 0.99), size=4)
    _, info = solve_fixed_point(problem, problem.start, Anderson(1e-9, 50, memory=5))
    assert info.converged.all()
    assert info.evaluations <= 7


def test_collinear_residuals_are_no_obstacle():
    # All residuals of T(z) = z/2 + b are parallel, so every system after the second is singular.
    offset = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z, info = solve_fixed_point(lambda z: z / 2 + offset, torch.zeros_like(offset), Anderson(1e-14, 50))
    assert info.converged.all()
    torch.testing.assert_close(z, 2 * offset, rtol=1e-12, atol=1e-12)


def test_equal_residuals_without_a_fixed_point_stay_finite_and_are_reported():
    z, info = solve_fixed_point(lambda z: z + 1, torch.ones(2, 3), Anderson(1e-5, 30))
    assert torch.isfinite(z).all()
    assert not info.converged.any()


def test_a_residual_that_grows_sends_back_to_the_best_iterate_with_an_empty_history():
    problem = Affine.random((0.9, 0.9))
    calls = 0

    def disturbed(z):
        nonlocal calls
        calls += 1
        image = problem(z)
        if calls == 5:
            image[0] += 1000
        return image

    recorder = Recorder(disturbed)
    solve_fixed_point(recorder, problem.start, Anderson(1e-12, 10))
    best, before, after, next_one = recorder.inputs[3:7]
    torch.testing.assert_close(after[0], problem(best)[0], rtol=1e-12, atol=0)
    assert (after[1] - problem(before)[1]).abs().max() > 1e-3
    # With nothing to combine, the step after that is a plain one.
    torch.testing.assert_close(next_one[0], problem(after)[0], rtol=1e-12, atol=0)


def test_every_sample_of_a_contraction_converges():
    # Among these is one that ran in a circle when growth sent it on from where it had been thrown to.
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(6, 4, generator=generator).double()
    W *= 0.9 / torch.linalg.matrix_norm(W, 2)
    c = 3 * torch.randn(5000, 4, generator=generator).double()
    start = torch.zeros_like(c)
    found = find_fixed_point(
        lambda y: torch.relu(y @ W.T @ W + c), start, Anderson(1e-9, 50), first=torch.relu(c)
    )
    assert found.info.converged.all()


def test_stagnation_sends_back_to_picard():
    # Every residual is as long as the best one.
    recorder = Recorder(lambda z: z + 1)
    solve_fixed_point(recorder, torch.zeros(1, 1, dtype=torch.float64), Anderson(1e-10, 30, memory=3))
    moves = torch.cat(recorder.inputs).diff(dim=0)[:, 0]
    later = moves[5:]
    assert ((later - 1).abs() < 1e-12).any()


def test_steps_that_lead_away_are_shortened():
    """Eigenvalues of the Jacobian far below -1, as steep penalties have them, beside others up to 0.9."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(16, 10, 10, dtype=torch.float64, generator=generator))[0]
    values = -40 + 40.9 * torch.rand(16, 10, dtype=torch.float64, generator=generator)
    values[:, 0] = -40
    A = basis @ torch.diag_embed(values) @ basis.mT
    b = torch.randn(16, 10, 1, dtype=torch.float64, generator=generator)
    found, info = solve_fixed_point(
        lambda z: (A @ z[..., None] + b)[..., 0],
        torch.zeros(16, 10, dtype=torch.float64),
        Anderson(1e-10, 400),
    )
    assert info.converged.all()
    expected = torch.linalg.solve(torch.eye(10, dtype=torch.float64) - A, b)[..., 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


def test_a_length_of_steps_is_halved_by_starts_afresh_and_grows_again():
    """Of three rows, whose changes are made up, one is thrown far off twice and one once, which is free."""
    sizes = [1.0, 9.0, 90.0, 0.5, 9.0, 90.0, *(1 / k for k in range(4, 19))]
    late = [1.0, 0.9, 0.8, 0.5, 9.0, 90.0, *(1 / k for k in range(4, 19))]
    stepper = Anderson(memory=2, damping=0.8).start(torch.zeros(3, 1, dtype=torch.float64))
    lengths = []
    for k, (twice, once) in enumerate(zip(sizes, late, strict=True)):
        f, g = stepper.rooms
        x = torch.zeros(3, 1, dtype=torch.float64)
        g.copy_(torch.tensor([[twice], [1 / (k + 1)], [once]]))
        f.copy_(x + g)
        stepper(x, f, g, torch.stack([g[:, 0].abs(), f[:, 0].abs()], 1))
        lengths.append((f / g)[:, 0])
    expected = torch.tensor(
        [[0.8] * 8 + [0.4] * 4 + [0.4 * 2**0.5] * 4 + [0.8] * 5, [0.8] * 21, [0.8] * 21],
        dtype=torch.float64,
    )
    torch.testing.assert_close(torch.stack(lengths, 1), expected, rtol=1e-12, atol=0)
