import torch

from opteq import Broyden
from opteq.solvers.base import solve_fixed_point
from tests.solvers.problems import Affine, Recorder


def textbook_broyden(function, z, steps):
    """Iterates of one sample with the inverse Jacobian of `z - T(z)` kept as a matrix."""
    inverse = torch.eye(len(z), dtype=z.dtype)
    value = z - function(z[None])[0]
    inputs = [z]
    for _ in range(steps - 1):
        step = -inverse @ value
        z = z + step
        new_value = z - function(z[None])[0]
        change = new_value - value
        correction = step - inverse @ change
        inverse = inverse + torch.outer(correction, step @ inverse) / (step @ inverse @ change)
        value = new_value
        inputs.append(z)
    return inputs


def curved(z):
    turn = torch.tensor([[0.2, -0.6, 0.1], [0.5, 0.3, 0.2], [-0.1, 0.2, 0.7]], dtype=z.dtype)
    return (z @ turn.mT).sin() + torch.tensor([1.0, -0.5, 0.3], dtype=z.dtype)


def test_iterates_are_those_of_the_textbook():
    start = torch.tensor([[0.3, -1.0, 0.7], [2.0, 1.0, 0.0]], dtype=torch.float64)
    recorder = Recorder(curved)
    solve_fixed_point(recorder, start, Broyden(1e-12, 7))
    for i in range(2):
        expected = torch.stack(textbook_broyden(curved, start[i], 7))
        torch.testing.assert_close(torch.stack(recorder.inputs)[:, i], expected, rtol=0, atol=1e-9)


def test_an_affine_problem_takes_twice_as_many_steps_as_it_has_dimensions():
    # Gay 1979.
    problem = Affine.random((0.9, 0.99), size=4)
    _, info = solve_fixed_point(problem, problem.start, Broyden(1e-9, 50))
    assert info.converged.all()
    assert info.evaluations <= 2 * 4 + 1


def test_a_full_memory_starts_again_with_a_picard_step():
    problem = Affine.random((0.9,))
    recorder = Recorder(problem)
    solve_fixed_point(recorder, problem.start, Broyden(1e-12, 6, memory=2))
    # Two updates fit; the third finds the memory full, is applied to the identity and kept alone.
    inputs = recorder.inputs
    value = [z - problem(z) for z in inputs]
    step, change = inputs[3] - inputs[2], value[3] - value[2]
    weight = (step * value[3]).sum() / (step * change).sum()
    expected = inputs[3] - value[3] - weight * (step - change)
    torch.testing.assert_close(inputs[4], expected)


def test_a_residual_that_grows_sends_back_to_picard():
    problem = Affine.random((0.9, 0.9))
    calls = 0

    def disturbed(z):
        nonlocal calls
        calls += 1
        image = problem(z)
        if calls == 4:
            image[0] += 1000
        return image

    recorder = Recorder(disturbed)
    solve_fixed_point(recorder, problem.start, Broyden(1e-12, 6))
    before, after = recorder.inputs[3:5]
    torch.testing.assert_close(after[0], problem(before)[0] + 1000, rtol=1e-12, atol=0)
    assert (after[1] - problem(before)[1]).abs().max() > 1e-3


def test_a_residual_above_three_times_the_best_one_is_one_that_grows():
    # Residuals of a size at which one could be taken for the inverse of another.
    torch.manual_seed(0)
    x = torch.zeros(2, 5, dtype=torch.float64)
    directions = torch.nn.functional.normalize(torch.randn(5, 2, 5, dtype=torch.float64), dim=2)
    sizes = 1e-3 * torch.tensor([[2, 2], [1, 1], [2.9, 3.1], [5, 5], [2.9, 16]], dtype=torch.float64)
    rule, steps = Broyden().start(x), []
    for direction, size in zip(directions, sizes, strict=True):
        g = size[:, None] * direction
        x, old = rule(x, x + g, g, torch.stack([size, size], dim=1)), x
        steps.append((x - old - g).norm(dim=1) > 1e-9)
    # A plain step at the start and where a sample has grown; from then on the best is the best since.
    assert torch.stack(steps).tolist() == [
        [False, False],
        [True, True],
        [True, False],
        [False, True],
        [True, False],
    ]


def test_an_update_that_divides_by_zero_is_left_out():
    # F is constant, so that Δ F = 0 and no secant exists.
    z, info = solve_fixed_point(lambda z: z + 1, torch.zeros(1, 2, dtype=torch.float64), Broyden(1e-10, 8))
    assert torch.isfinite(z).all()
    assert not info.converged.any()
    torch.testing.assert_close(z, torch.full((1, 2), 7.0, dtype=torch.float64))
