import pytest
import torch

from opteq import Dense, GaussianMap, OptEqUnit
from opteq.errors import ConfigError, ShapeError
from opteq.theory.proximal import check_proximal


def points(n):
    torch.manual_seed(1)
    return torch.randn(8, n, dtype=torch.float64)


@pytest.mark.spec("R2.7", "R1.2")
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus", "soft_threshold"])
def test_an_optequnit_is_proximal(activation):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6), activation, max_norm=1.0).double()
    unit.W.weight.data *= 10
    z = points(4)
    equation = unit.bind(points(3))
    report = check_proximal(equation, z)
    assert report.is_proximal.all()
    assert "8 of 8 points" in str(report)
    # The same Jacobian from its formula.
    (W,) = equation.W.tensors
    slopes = unit.activation.derivative(equation.preactivation(z))
    values = torch.linalg.eigvalsh(W.mT @ (slopes[:, :, None] * W))
    torch.testing.assert_close(report.norm, values[:, -1].detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(report.smallest, values[:, 0].detach(), rtol=0, atol=1e-9)


def expansive(z):
    return 1.1 * z


def rotation(z):
    return 0.5 * torch.stack([-z[:, 1], z[:, 0]], dim=1)


def reflection(z):
    return z * torch.tensor([0.5, -0.5], dtype=z.dtype)


@pytest.mark.spec("R2.7")
@pytest.mark.parametrize(
    ("function", "fault"), [(expansive, "norm"), (rotation, "asymmetry"), (reflection, "smallest")]
)
def test_each_condition_is_checked(function, fault):
    report = check_proximal(function, points(2))
    assert not report.is_proximal.any()
    symmetric = bool((report.asymmetry <= 1e-6).all())
    positive = bool((report.smallest >= -1e-6).all())
    nonexpansive = bool((report.norm <= 1 + 1e-6).all())
    assert {"asymmetry": symmetric, "smallest": positive, "norm": nonexpansive} == {
        name: name != fault for name in ("asymmetry", "smallest", "norm")
    }


@pytest.mark.spec("R2.7")
def test_what_is_measured_is_that_of_the_matrix():
    matrix = torch.tensor([[0.5, 0.3], [-0.1, 0.2]], dtype=torch.float64)
    report = check_proximal(lambda v: v @ matrix.mT, points(2))
    # ½(J - Jᵀ) turns by 0.2; trace and determinant are 0.7 and 0.09 of ½(J + Jᵀ), 0.39 and 0.13² of JᵀJ.
    for found, expected in (
        (report.asymmetry, 0.2),
        (report.smallest, 0.35 - (0.35**2 - 0.09) ** 0.5),
        (report.norm, ((0.39 + (0.39**2 - 4 * 0.13**2) ** 0.5) / 2) ** 0.5),
    ):
        torch.testing.assert_close(found, torch.full((8,), expected, dtype=torch.float64))
    assert str(report) == (
        "a proximal operator at 0 of 8 points: asymmetry at most 0.2, eigenvalues at least 0.17, norm at most"
        " 0.5834"
    )
    # Each may be off by the tolerance.
    assert check_proximal(lambda v: v @ matrix.mT, points(2), 0.2 + 1e-12).is_proximal.all()
    assert check_proximal(lambda v: -0.1 * v, points(2), 0.1 + 1e-12).is_proximal.all()
    assert check_proximal(lambda v: 1.1 * v, points(2), 0.1 + 1e-12).is_proximal.all()


@pytest.mark.spec("R2.7")
def test_proximal_operators_in_closed_form_and_maps_that_are_none():
    z = points(5)
    assert check_proximal(lambda v: v / (1 + 0.3), z).is_proximal.all()
    assert check_proximal(lambda v: v.sign() * (v.abs() - 0.2).clamp(min=0), z).is_proximal.all()
    constant = torch.ones(5, dtype=torch.float64, requires_grad=True)
    assert check_proximal(lambda v: constant.expand_as(v), z).is_proximal.all()
    # The projection onto the unit ball couples the coordinates.
    assert check_proximal(lambda v: v / v.norm(dim=1, keepdim=True).clamp(min=1), z).is_proximal.all()
    torch.manual_seed(0)
    kernel = GaussianMap(Dense(5, 6), Dense(3, 6), gamma=0.5).double()
    assert not check_proximal(kernel.bind(points(3)), z).is_proximal.all()


@pytest.mark.parametrize(
    "function",
    [
        lambda v: 0.5 * v + 0.1 * v.mean(0),
        lambda v: 0.5 * v + 0.1 * v.mean(0).detach(),
        lambda v: 0.5 * v / v.norm(dim=1).max().detach(),
        lambda v: 0.5 * torch.cat([v[:-1], v[-1:] + v[:1]]),
        lambda v: 0.5 * torch.cat([v[:1] + v[-1:], v[1:]]),
        torch.nn.BatchNorm1d(5, dtype=torch.float64),
        lambda v: torch.nn.functional.dropout(v, 0.5),
    ],
    ids=["mean", "detached mean", "largest", "first in last", "last in first", "batch norm", "dropout"],
)
def test_maps_that_mix_the_points_are_refused(function):
    with pytest.raises(ConfigError, match=r"every point by itself, but its value at point [07] changes"):
        check_proximal(function, points(5))


@pytest.mark.parametrize("count", [1, 3])
def test_points_may_be_alike(count):
    assert check_proximal(lambda v: 0.5 * v, points(5)[:1].expand(count, 5)).is_proximal.all()


def test_refuses_what_it_cannot_check():
    with pytest.raises(ShapeError, match="at most 2048 entries per point, got 2049"):
        check_proximal(lambda v: v, torch.zeros(1, 2049))
    with pytest.raises(ShapeError, match=r"keeps the shape \(1, 4\), got \(1, 2\)"):
        check_proximal(lambda v: v[:, :2], torch.zeros(1, 4))
    with pytest.raises(ShapeError, match="at least one point"):
        check_proximal(lambda v: v, torch.zeros(0, 4))
