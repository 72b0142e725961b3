import pytest
import torch

from opteq.tensors.lanczos import extreme_ritz_values, largest_eigenvalue_bound, largest_ritz_pair


@pytest.mark.parametrize("steps", [3, 12, 40])
def test_the_pair_is_never_above_the_largest_eigenvalue_and_reaches_it(steps):
    torch.manual_seed(0)
    root = torch.randn(12, 12, dtype=torch.float64)
    matrix = root @ root.mT
    largest = torch.linalg.eigvalsh(matrix)[-1]
    value, vector = largest_ritz_pair(lambda v: matrix @ v, torch.randn(12, dtype=torch.float64), steps)
    assert value <= largest * (1 + 1e-13)
    assert vector.norm() == pytest.approx(1, rel=1e-13)
    assert vector @ matrix @ vector == pytest.approx(value, rel=1e-12)
    if steps >= 12:  # the Krylov space is everything
        assert value == pytest.approx(largest.item(), rel=1e-12)


def test_a_start_in_an_invariant_space_and_the_zero_operator():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    start = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert largest_ritz_pair(lambda v: matrix @ v, start, 3)[0] == pytest.approx(2)
    value, vector = largest_ritz_pair(lambda v: 0 * v, start, 3)
    assert value == 0
    assert torch.isfinite(vector).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restarts_settle_the_vector_where_eigenvalues_crowd(dtype):
    # As those of a convolution on large images do: five within 1e-3 of the largest, the others further off.
    spectrum = torch.linspace(0.95, 0, 300, dtype=torch.float64)
    spectrum[:5] = torch.tensor([1, 1 - 2e-4, 1 - 4e-4, 1 - 6e-4, 1 - 8e-4])
    rotation = torch.linalg.qr(torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).double())[0]
    matrix, products = ((rotation * spectrum) @ rotation.mT).to(dtype), 0

    def product(v):
        nonlocal products
        products += 1
        return matrix @ v

    tol = 100 * torch.finfo(dtype).eps
    value, vector = largest_ritz_pair(product, torch.ones(300, dtype=dtype), 20, tol, 50)
    residual = matrix.double() @ vector.double() - value * vector.double()
    assert residual.norm() <= 1.5 * tol
    # Sums of 300 products are wrong by about the root of that many roundings, by 18 on some processors.
    assert value == pytest.approx(1, abs=2 * 300**0.5 * torch.finfo(dtype).eps)
    assert (vector.double() @ rotation[:, 0]).abs() == pytest.approx(1, abs=(tol / 2e-4) ** 2 + 1e-6)
    assert products < 200  # from the best Ritz vector alone it takes 924 in float64


def test_as_many_restarts_as_are_allowed():
    matrix, products = torch.linspace(0.9, 1, 300, dtype=torch.float64).diag(), []
    start = torch.ones(300, dtype=torch.float64)
    value, _ = largest_ritz_pair(lambda v: products.append(v) or matrix @ v, start, 20, 1e-15, 3)
    assert len(products) == 20 + 3 * 12
    assert 0.99 < value < 1


@pytest.mark.parametrize(
    ("spectrum", "looseness"),
    [
        (torch.rand(150).square(), 2e-9),
        (torch.ones(40), 2e-9),
        (torch.tensor([1.0, 0.0, 0.0]), 2e-9),
        (torch.tensor([3.0]), 2e-9),
        (torch.linspace(0, 1, 600).pow(0.25), 2e-3),  # a hundred steps do not separate the largest
    ],
)
@pytest.mark.parametrize("scale", [1e-60, 1.0, 1e60])
def test_the_bound_is_never_below_the_largest_eigenvalue(spectrum, looseness, scale):
    torch.manual_seed(0)
    spectrum = spectrum.double()
    turn = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64)).Q
    matrix = scale * (turn * spectrum) @ turn.mT
    matrix = (matrix + matrix.mT) / 2
    largest = torch.linalg.eigvalsh(matrix)[-1].item()
    assert largest <= largest_eigenvalue_bound(matrix).item() <= largest * (1 + looseness)


def test_no_bound_where_the_start_hides_the_largest_eigenvalue(monkeypatch):
    # What the Ritz value misses the factorisation has to notice.
    matrix = torch.diag(torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: torch.tensor([1.0, 1.0, 0.0]))
    assert torch.isinf(largest_eigenvalue_bound(matrix))


@pytest.mark.parametrize("steps", [3, 8, 30])
def test_extreme_values_of_many_matrices_lie_within_the_spectrum_and_reach_its_ends(steps):
    torch.manual_seed(0)
    matrices = torch.randn(5, 8, 8, dtype=torch.float64)
    matrices = matrices + matrices.mT
    matrices[1] = 3 * torch.eye(8)  # one step exhausts the space
    matrices[2] = -torch.outer(matrices[0, 0], matrices[0, 0])
    matrices[3] = 0
    values = torch.linalg.eigvalsh(matrices)
    like = torch.zeros(5, 2, 4, dtype=torch.float64)

    def product(v):
        return (matrices @ v.flatten(1)[..., None]).view_as(v)

    smallest, largest = extreme_ritz_values(product, like, steps)
    assert (smallest >= values[:, 0] - 1e-12).all()
    assert (largest <= values[:, -1] + 1e-12).all()
    # The first is generic; the others have one or two different eigenvalues.
    reached = slice(None) if steps >= 8 else slice(1, 4)
    torch.testing.assert_close(smallest[reached], values[reached, 0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(largest[reached], values[reached, -1], rtol=1e-11, atol=1e-11)


def test_a_sample_without_finite_products_spoils_no_other():
    scale = torch.tensor([2.0, torch.nan, 3.0], dtype=torch.float64)[:, None]
    smallest, largest = extreme_ritz_values(lambda v: scale * v, torch.zeros(3, 4, dtype=torch.float64), 10)
    for values in (smallest, largest):
        assert torch.isnan(values[1])
        torch.testing.assert_close(values[::2], torch.tensor([2.0, 3.0], dtype=torch.float64))
