"""Conjugate gradients and GMRES against dense solutions, sample by sample."""

import pytest
import torch

from opteq.errors import ConfigError
from opteq.solvers.linear import conjugate_gradients, gmres


def without_residual(*arguments, **options):
    x, _, info = conjugate_gradients(*arguments, **options)
    return x, info


SOLVERS = {"cg": without_residual, "gmres": gmres}


@pytest.fixture(params=SOLVERS.values(), ids=SOLVERS.keys())
def solver(request):
    return request.param


def definite(conditions, size=10, dtype=torch.float64):
    """Symmetric positive-definite matrices with eigenvalues spread over `[1/condition, 1]`."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(len(conditions), size, size, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(square)[0]
    least = 1 / torch.tensor(conditions, dtype=torch.float64)[:, None]
    spectrum = least + (1 - least) * torch.linspace(0, 1, size).double()
    return (basis @ torch.diag_embed(spectrum) @ basis.mT).to(dtype)


def right_hand_side(batch, size=10, dtype=torch.float64):
    return torch.randn(batch, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


class Product:
    """`v ↦ A v` for each sample, counting its calls."""

    def __init__(self, matrix):
        self.matrix, self.calls = matrix, 0

    def __call__(self, v):
        self.calls += 1
        return (self.matrix @ v[..., None])[..., 0]


def relative_error(matrix, x, b):
    exact = torch.linalg.solve(matrix.double(), b.double())
    return ((x - exact).norm(dim=1) / exact.norm(dim=1)).max()


@pytest.mark.spec("R3.1")
def test_equals_the_dense_solution(solver):
    matrix, b = definite((1.0, 3.0, 30.0, 100.0)), right_hand_side(4)
    product = Product(matrix)
    x, info = solver(product, b, 1e-12, 60)
    assert info.converged.all()
    assert relative_error(matrix, x, b) < 1e-9
    assert product.calls == info.evaluations == info.steps.max()
    assert info.steps[0] == 1  # a multiple of the identity
    assert info.steps[0] < info.steps[-1]


@pytest.mark.spec("R3.1")
def test_gmres_solves_systems_that_are_not_symmetric():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 10, 10, generator=generator, dtype=torch.float64)
    matrix, b = torch.eye(10).double() - 0.25 * noise, right_hand_side(3)
    x, info = gmres(Product(matrix), b, 1e-12, 20)
    assert info.converged.all()
    assert info.evaluations <= 10  # exact after as many steps as there are unknowns
    assert relative_error(matrix, x, b) < 1e-9


def test_gmres_solves_indefinite_systems():
    matrix = definite((3.0, 3.0)) - 0.6 * torch.eye(10).double()
    b = right_hand_side(2)
    x, info = gmres(Product(matrix), b, 1e-12, 20)
    assert info.converged.all()
    assert relative_error(matrix, x, b) < 1e-9


def test_conjugate_gradients_flags_a_matrix_that_is_not_definite():
    matrix = definite((3.0, 3.0, 3.0))
    matrix[1] -= 0.6 * torch.eye(10)
    b = right_hand_side(3)
    x, residual, info = conjugate_gradients(Product(matrix), b, 1e-10, 50)
    torch.testing.assert_close(residual, b - Product(matrix)(x), rtol=0, atol=1e-9)
    assert info.converged.tolist() == [True, False, True]
    assert torch.isfinite(x).all()
    assert info.residual[1] > 1e-10
    assert relative_error(matrix[[0, 2]], x[[0, 2]], b[[0, 2]]) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_sample_stops_on_its_own(solver, dtype):
    matrix, b = definite((1.0, 5.0, 200.0), dtype=dtype), right_hand_side(3, dtype=dtype)
    x, info = solver(Product(matrix), b, 1e-4, 50)
    assert x.dtype == dtype
    for i in range(3):
        alone, alone_info = solver(Product(matrix[i : i + 1]), b[i : i + 1], 1e-4, 50)
        assert alone_info.steps[0] == info.steps[i]
        torch.testing.assert_close(alone[0], x[i], rtol=1e-5, atol=1e-5)
        # The first column is the residual of the start, x = 0.
        assert info.residuals[i, 0] == pytest.approx(1)
        assert (info.residuals[i, : info.steps[i]] > 1e-4).all()
        assert info.residuals[i, info.steps[i]] <= 1e-4
        assert info.residuals[i, info.steps[i] + 1 :].isnan().all()


def test_the_reported_residual_is_the_true_one(solver):
    matrix, b = definite((10.0, 100.0)), right_hand_side(2)
    for steps in (1, 3, 6):
        x, info = solver(Product(matrix), b, 1e-12, steps)
        true = (b - Product(matrix)(x)).norm(dim=1) / b.norm(dim=1)
        assert not info.converged.any()
        assert info.evaluations == steps
        torch.testing.assert_close(info.residual, true, rtol=1e-8, atol=0)


def test_gmres_minimises_the_residual_over_the_krylov_space():
    matrix, b = definite((100.0,)), right_hand_side(1)
    _, info = gmres(Product(matrix), b, 1e-12, 4)
    powers = [b[0]]
    for _ in range(4):
        powers.append(matrix[0] @ powers[-1])
    span = torch.stack(powers[1:], dim=1)
    best = torch.linalg.lstsq(span, b[0][:, None]).solution[:, 0]
    torch.testing.assert_close(info.residual[0], (b[0] - span @ best).norm() / b.norm(), rtol=1e-8, atol=0)


def test_a_zero_right_hand_side_costs_nothing_and_harms_no_other(solver):
    matrix, b = definite((50.0, 50.0)), right_hand_side(2)
    b[0] = 0
    x, info = solver(Product(matrix), b, 1e-10, 50)
    assert info.converged.all()
    assert info.steps[0] == 0
    assert torch.equal(x[0], torch.zeros(10).double())
    assert relative_error(matrix[1:], x[1:], b[1:]) < 1e-8

    product = Product(matrix)
    x, info = solver(product, torch.zeros_like(b), 1e-10, 50)
    assert info.converged.all()
    assert product.calls == info.evaluations == 0
    assert torch.equal(x, torch.zeros_like(b))


def test_a_sample_solved_exactly_stays_solved_while_others_go_on(solver):
    matrix, b = definite((1.0, 100.0)), right_hand_side(2)
    matrix[0], b[0] = torch.eye(10), 2 * torch.eye(10)[3]  # no rounding at all, so that 0/0 could arise
    x, info = solver(Product(matrix), b, 1e-12, 50)
    assert info.converged.all()
    assert torch.equal(x[0], b[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_product_that_is_not_finite_harms_no_other_sample(solver, bad):
    matrix, b = definite((50.0, 50.0, 50.0)), right_hand_side(3)
    clean = Product(matrix)
    calls = 0

    def poisoned(v):
        nonlocal calls
        calls += 1
        image = clean(v)
        if calls == 3:
            image[1] = bad
        return image

    x, info = solver(poisoned, b, 1e-10, 50)
    assert info.converged.tolist() == [True, False, True]
    assert relative_error(matrix[[0, 2]], x[[0, 2]], b[[0, 2]]) < 1e-8


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_right_hand_side_that_is_not_finite_is_neither_converged_nor_hidden(solver, bad):
    # A finite answer would hide an overflow from whoever checks the gradients, such as a loss scaler.
    matrix, b = definite((50.0, 50.0)), right_hand_side(2)
    b[0, 3] = bad
    x, info = solver(Product(matrix), b, 1e-10, 50)
    assert info.converged.tolist() == [False, True]
    assert not torch.isfinite(x[0]).all()
    assert relative_error(matrix[1:], x[1:], b[1:]) < 1e-8

    x, info = solver(Product(matrix[:1]), b[:1], 1e-10, 50)
    assert not info.converged
    assert not torch.isfinite(x).all()


@pytest.mark.parametrize("size", [1e-15, 1e-6, 1e6, 1e15])
def test_the_scale_of_the_right_hand_side_does_not_matter(solver, size):
    matrix, b = definite((50.0,), dtype=torch.float32), right_hand_side(1, dtype=torch.float32)
    x, info = solver(Product(matrix), b, 1e-5, 50)
    scaled, scaled_info = solver(Product(matrix), size * b, 1e-5, 50)
    assert info.converged.all()
    assert scaled_info.converged.all()
    assert (scaled_info.steps - info.steps).abs() <= 1
    torch.testing.assert_close(scaled / size, x, rtol=1e-3, atol=1e-3)


def test_a_tolerance_that_rounding_keeps_out_of_reach_is_refused(solver):
    with pytest.raises(
        ConfigError, match="tol=1e-07 cannot be reached in float32; use at least 2e-06 or a wider dtype"
    ):
        solver(
            Product(definite((2.0,), dtype=torch.float32)), right_hand_side(1, dtype=torch.float32), 1e-7, 5
        )


@pytest.mark.parametrize("metric", [lambda v: v, lambda v: 2 * v])
def test_a_metric_may_hand_back_what_it_is_given(metric):
    matrix, b = definite((3.0, 30.0)), right_hand_side(2)
    product = Product(matrix)
    x, residual, info = conjugate_gradients(lambda p, _: product(p), b, 1e-12, 60, metric)
    assert info.converged.all()
    assert relative_error(matrix, x, b) < 1e-9
    torch.testing.assert_close(residual, b - product(x), rtol=0, atol=1e-12)


def test_who_follows_conjugate_gradients_can_add_up_the_solution():
    matrix, b = definite((3.0, 30.0)), 1e3 * right_hand_side(2)
    product, directions, lengths = Product(matrix), [], []

    def watched(p):
        directions.append(p.clone())
        return product(p)

    x, _, info = conjugate_gradients(watched, b, 1e-10, 60, follow=lambda t: lengths.append(t.clone()))
    assert len(lengths) == info.evaluations
    way = sum(t[:, None] * p for t, p in zip(lengths, directions, strict=True))
    torch.testing.assert_close(way, x, rtol=1e-10, atol=1e-10)


def test_residuals_are_relative_to_the_size_that_is_given():
    matrix, b = definite((30.0, 30.0)), right_hand_side(2)
    size = torch.tensor([0.1, 10.0], dtype=torch.float64) * b.norm(dim=1)
    x, residual, info = conjugate_gradients(Product(matrix), b, 1e-4, 60, size=size)
    assert info.converged.all()
    assert info.steps[1] < info.steps[0]
    torch.testing.assert_close(info.residuals[:, 0], torch.tensor([10.0, 0.1], dtype=torch.float64))
    true = b - Product(matrix)(x)
    torch.testing.assert_close(residual, true, rtol=0, atol=1e-10)
    torch.testing.assert_close(info.residual, true.norm(dim=1) / size, rtol=1e-6, atol=1e-12)


def test_steps_of_gmres_past_an_exact_solution_are_none():
    # The first sample's space is exhausted after one step, without any rounding.
    matrix = torch.stack([2 * torch.eye(10).double(), definite((50.0,))[0]])
    b = torch.stack([torch.eye(10)[3].double(), right_hand_side(1)[0]])
    x, info = gmres(Product(matrix), b, 1e-12, 50)
    assert info.steps[0] == 1
    assert torch.equal(x[0], b[0] / 2)
    assert relative_error(matrix[1:], x[1:], b[1:]) < 1e-9


def test_defaults_for_new_tensors_are_not_those_of_the_right_hand_side(solver):
    product = Product(definite((3.0, 30.0), dtype=torch.float32))
    b = right_hand_side(2, dtype=torch.float32)
    expected, expected_info = solver(product, b, 1e-5, 30)
    torch.set_default_dtype(torch.float64)
    try:
        wide = solver(product, b, 1e-5, 30)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        elsewhere = solver(product, b, 1e-5, 30)
    for x, info in (wide, elsewhere):
        assert torch.equal(x, expected)
        assert x.dtype == torch.float32
        assert torch.equal(info.steps, expected_info.steps)
        assert torch.equal(info.converged, expected_info.converged)
