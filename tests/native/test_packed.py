"""Products with a matrix that is packed, in C and with PyTorch, against float64."""

import pytest
import torch

from opteq import native
from opteq.errors import ShapeError
from opteq.native import packed
from opteq.native.packed import Packed, gram, multiply_each

pytestmark = pytest.mark.usefixtures("way")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def off(found, exact):
    """Relative distance of the two."""
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 40])
@pytest.mark.parametrize(("size", "columns"), [(1, 1), (3, 15), (17, 16), (64, 64), (30, 65), (200, 131)])
def test_a_product(rows, size, columns):
    matrix, x = drawn(size, columns), drawn(rows, size, seed=1)
    assert off(Packed(matrix)(x), x.double() @ matrix.double()) < 1e-6


def test_no_rows_have_no_product():
    assert Packed(drawn(4, 9))(torch.empty(0, 4)).shape == (0, 9)


def test_matrices_in_other_matrices():
    wide, x = drawn(30, 80), drawn(9, 100, seed=1)[:, 3:33]
    exact = x.double() @ wide[:, 5:40].double()
    assert off(Packed(wide[:, 5:40])(x), exact) < 1e-6
    assert off(Packed(wide[:, 5:40].T.contiguous().T)(x), exact) < 1e-6
    assert off(Packed(wide[:, 5:40])(x.T.contiguous().T), exact) < 1e-6
    assert off(Packed(wide[:, 5:40])(torch._neg_view(x)), -exact) < 1e-6


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_row_depends_on_the_number_of_threads(threads):
    matrix, x = drawn(50, 70), drawn(23, 50, seed=1)
    packed = Packed(matrix)
    expected, before = packed(x), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(packed(x), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(gram(matrix), matrix @ matrix.T, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 3), (64, 16), (65, 200), (150, 40)])
def test_a_gram_matrix(rows, size):
    a = drawn(rows, size)
    found = gram(a)
    assert torch.equal(found, found.T)
    assert off(found, a.double() @ a.double().T) < 1e-6
    assert off(gram(drawn(size, rows).T), drawn(size, rows).double().T @ drawn(size, rows).double()) < 1e-6


def test_float64_is_as_exact_as_ever():
    matrix, x = drawn(20, 30).double(), drawn(6, 20).double()
    torch.testing.assert_close(Packed(matrix)(x), x @ matrix, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(gram(matrix), matrix @ matrix.T, rtol=1e-14, atol=1e-14)


def test_what_is_not_finite_stays_in_its_row():
    x = drawn(8, 20)
    x[3, 4] = torch.nan
    product = Packed(drawn(20, 33))(x)
    assert torch.isnan(product[3]).all()
    assert torch.isfinite(product[[0, 1, 2, 4, 5, 6, 7]]).all()


def test_what_does_not_fit_is_refused():
    packed = Packed(drawn(20, 33))
    for x in (drawn(8, 19), drawn(8, 20).double(), drawn(20)):
        with pytest.raises(ShapeError, match=r"Expected a float32 matrix of shape \(batch, 20\)"):
            packed(x)


def test_a_packed_matrix_stays_what_it_is(monkeypatch):
    packed, x = Packed(drawn(20, 33)), drawn(8, 20, seed=1)
    expected = packed(x)
    monkeypatch.setattr(native, "enabled", not native.enabled)
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-5)


def test_defaults_for_new_tensors_are_not_those_of_the_matrix():
    matrix, x = drawn(20, 33), drawn(8, 20, seed=1)
    expected = Packed(matrix)(x), gram(matrix)
    torch.set_default_dtype(torch.float64)
    try:
        wide = Packed(matrix)(x), gram(matrix)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        elsewhere = Packed(matrix)(x), gram(matrix)
    for found in (wide, elsewhere):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(("rows", "size", "columns"), [(1, 1, 1), (7, 3, 15), (16, 128, 65), (33, 20, 130)])
def test_products_sample_by_sample(batch, rows, size, columns, monkeypatch):
    monkeypatch.setattr(packed, "_FEWEST_PRODUCTS", 0)
    left, right = drawn(batch, rows, size), drawn(batch, size, columns, seed=1)
    total = drawn(batch, rows, columns, seed=2)
    exact = left.double() @ right.double()
    turned = [m.mT.contiguous().mT for m in (left, right)]
    with torch.no_grad():
        for a, b in (
            (left, right),
            (turned[0], right),
            (left, turned[1]),
            (left, right[:1].expand_as(right)),
        ):
            assert off(multiply_each(a, b, error=1e-4), a.double() @ b.double()) < 1e-6
        added = total.clone()
        assert multiply_each(left, right, added, -0.5, error=1e-4) is added
    assert off(added, total.double() - 0.5 * exact) < 1e-6


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_sample_depends_on_the_number_of_threads(threads, monkeypatch):
    monkeypatch.setattr(packed, "_FEWEST_PRODUCTS", 0)
    left, right, before = drawn(5, 7, 30), drawn(5, 30, 20, seed=1), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            product = multiply_each(left, right, error=1e-4)
        torch.testing.assert_close(product, left @ right, rtol=1e-5, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_products_sample_by_sample_that_are_not_for_c_are_those_of_pytorch():
    left, right = drawn(3, 40, 128).requires_grad_(), drawn(3, 128, 64, seed=1)
    product = multiply_each(left, right, error=1e-4)
    assert torch.equal(product, left @ right)
    product.sum().backward()
    assert left.grad is not None
    with torch.no_grad():
        assert torch.equal(multiply_each(left, right, error=0.0), left @ right)
        wide = multiply_each(left.double(), right.double(), error=1e-4)
        assert torch.equal(wide, left.double() @ right.double())
        with pytest.raises(RuntimeError):
            multiply_each(left, right[:, :4], error=1e-4)
        assert multiply_each(left, right[0], error=1e-4).shape == (3, 40, 64)
        with pytest.raises(RuntimeError):
            multiply_each(left, right, torch.zeros(3, 40, 5), error=1e-4)
