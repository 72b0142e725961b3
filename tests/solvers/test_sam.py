"""Sequential averaging on a map with a whole subspace of fixed points."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from opteq import SAM, AbsoluteNorm, Decorrelation, EquilibriumLayer, Incay, SquaredNorm, Unrolled
from opteq.errors import ConfigError
from tests.conformance.reference import random
from tests.maps.problems import dense_unit, inputs


@dataclass(frozen=True)
class Quadratic:
    """`½‖A z - t‖²`, convex; strongly so if `A` has full column rank. Not from the library."""

    matrix: torch.Tensor
    target: torch.Tensor

    @property
    def lipschitz(self):
        return torch.linalg.matrix_norm(self.matrix, 2).square().item()

    def gradient(self, z):
        return (z @ self.matrix.mT - self.target) @ self.matrix


class Flat:
    """`T(z) = P z + b`: its fixed points are an affine subspace, all `z` with `N z = n`.

    `P` is a symmetric contraction on the row space of `N` and the identity on the kernel.
    """

    def __init__(self, size=6, rank=2):
        basis = torch.linalg.qr(random(size, size))[0]
        rates = torch.cat((torch.tensor([0.3, 0.6]).double()[:rank], torch.ones(size - rank).double()))
        self.matrix = basis @ torch.diag(rates) @ basis.mT
        self.normal = basis[:, :rank]
        self.fixed = random(1, size, seed=2)
        self.kernel = basis[:, rank:]

    def __call__(self, z):
        return self.fixed + (z - self.fixed) @ self.matrix

    def least(self, function):
        """The fixed point with the least `½‖A z - t‖²`, in closed form."""
        A, t = function.matrix, function.target
        moved = torch.linalg.lstsq(A @ self.kernel, (t - self.fixed @ A.mT)[0]).solution
        return self.fixed + (self.kernel @ moved)[None]


def error_at(sam, problem, expected, steps):
    return (sam.select(problem, torch.zeros(1, 6).double(), steps) - expected).norm().item()


@pytest.mark.spec("R4.3")
def test_a_strongly_convex_function_is_minimised_over_the_fixed_points():
    problem = Flat()
    function = Quadratic(torch.diag(torch.linspace(1, 2, 6)).double(), random(1, 6, seed=3))
    expected = problem.least(function)
    sam = SAM(function, rho=0.5, c=None)
    errors = [error_at(sam, problem, expected, steps) for steps in (1000, 10_000)]
    assert errors[1] < 5e-3
    # The error falls as k^-ρ: ten times the steps, 10^-0.5 = 0.32 of it.
    assert 2.8 < errors[0] / errors[1] < 3.6
    # Plain iteration ends at another fixed point.
    z = torch.zeros(1, 6).double()
    for _ in range(2000):
        z = problem(z)
    torch.testing.assert_close(problem(z), z, rtol=0, atol=1e-12)
    assert (z - expected).norm() > 0.3


@pytest.mark.spec("R4.3")
def test_a_convex_function_is_minimised_slowly():
    problem = Flat(rank=2)
    # Not strongly convex, with one minimiser on the fixed points: it vanishes along their normals.
    function = Quadratic(problem.kernel.mT.contiguous() * 1.5, random(1, 4, seed=3))
    assert torch.linalg.matrix_rank(function.matrix) == 4
    expected = problem.least(function)
    sam = SAM(function, rho=0.5, c=0.2)
    errors = [error_at(sam, problem, expected, steps) for steps in (300, 3000, 30_000)]
    assert errors[2] < 0.03
    # k^-c: ten times the steps, 10^-0.2 = 0.63 of the error.
    assert all(1.3 < a / b < 2.2 for a, b in pairwise(errors))


@pytest.mark.spec("R4.3")
def test_one_step_is_the_formula():
    function = Quadratic(random(3, 4), random(1, 3, seed=1))
    sam = SAM(function, rho=0.4, c=0.25)
    L = function.lipschitz
    gamma, eta = 1 / (2 * L), min((2 * L) ** 0.5, L / 2, 0.5)
    z, image = random(2, 4), random(2, 4, seed=5)
    for k in (1, 7):
        beta, lam = eta * k**-0.4, eta * k**-0.25
        selected = (1 - gamma * lam) * z - gamma * function.gradient(z)
        expected = beta * selected + (1 - beta) * image
        torch.testing.assert_close(sam.blend(k, z, image), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("R4.3")
def test_the_steps_that_are_asked_for_are_taken():
    problem, function = Flat(), Quadratic(random(3, 6), random(1, 3, seed=1))
    sam, z = SAM(function), random(1, 6, seed=2)
    expected = z
    for k in (1, 2, 3):
        expected = sam.blend(k, expected, problem(expected))
    torch.testing.assert_close(sam.select(problem, z, 3), expected, rtol=1e-13, atol=0)
    assert torch.equal(sam.select(problem, z, 0), z)


@pytest.mark.spec("R4.3")
@pytest.mark.parametrize(("L", "gamma", "eta"), [(0.5, 1.0, 0.25), (0.02, 25.0, 0.01), (3.0, 1 / 6, 0.5)])
def test_step_lengths_follow_the_lipschitz_constant(L, gamma, eta):
    # Theorem 5: γ = 1/(2L), η = min(√(2L), L/2, ½).
    matrix = L**0.5 * torch.diag(torch.tensor([1.0, 0.1], dtype=torch.float64))
    function = Quadratic(matrix, torch.zeros(1, 2, dtype=torch.float64))
    assert function.lipschitz == pytest.approx(L)
    z, image = random(1, 2), random(1, 2, seed=1)
    beta, lam = eta * 4**-0.5, eta * 4**-0.2
    expected = beta * ((1 - gamma * lam) * z - gamma * function.gradient(z)) + (1 - beta) * image
    torch.testing.assert_close(SAM(function).blend(4, z, image), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("R4.3", "R3.5")
@pytest.mark.parametrize(
    "sam",
    [
        SAM(SquaredNorm(), rho=0.5, c=None),
        SAM(SquaredNorm(), gamma=0.2, eta=0.3),
        SAM(Incay()),
        SAM(Decorrelation(), gamma=0.01, eta=0.4),
        SAM(AbsoluteNorm(), gamma=0.05, eta=0.3),
    ],
    ids=["square", "square-given", "incay", "decorrelation", "absolute"],
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_unrolled_selection_is_differentiated_step_by_step(sam, checkpoint):
    unit, x = dense_unit(), inputs().requires_grad_()
    gamma, eta = sam._constants()
    z = torch.zeros(4, 5).double()
    for k in range(1, 6):
        beta, lam = eta * k**-sam.rho, 0.0 if sam.c is None else eta * k**-sam.c
        selected = (1 - gamma * lam) * z - gamma * sam.regulariser.gradient(z)
        z = beta * selected + (1 - beta) * unit.bind(x)(z)
    layer = EquilibriumLayer(unit, gradient=Unrolled(5, checkpoint, sam))
    value = layer(x)
    torch.testing.assert_close(value, z, rtol=1e-11, atol=1e-12)
    wanted, weight = (x, *unit.parameters()), random(4, 5)
    ours, expected = (torch.autograd.grad((v * weight).sum(), wanted) for v in (value, z))
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.spec("R3.5")
def test_selection_reports_the_residual_of_the_map():
    unit, x = dense_unit(), inputs()
    layer = EquilibriumLayer(unit, gradient=Unrolled(3, select=SAM(SquaredNorm())))
    info = layer.solve(x).info
    assert info.evaluations == 3
    shorter = EquilibriumLayer(unit, gradient=Unrolled(2, select=SAM(SquaredNorm())))(x).detach()
    image = unit.bind(x)(shorter)
    expected = (image - shorter).norm(dim=1) / image.norm(dim=1)
    torch.testing.assert_close(info.residual, expected.detach(), rtol=1e-10, atol=0)


@pytest.mark.spec("R3.5")
def test_a_layer_takes_care_of_a_regulariser_that_compares_samples():
    regulariser = Decorrelation()
    layer = EquilibriumLayer(dense_unit(), gradient=Unrolled(4, select=SAM(regulariser, gamma=0.01, eta=0.4)))
    x = inputs(6)
    layer(x)
    assert regulariser.reference.shape == (6, 5)
    layer.eval()
    assert not regulariser.training
    alone = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(alone, layer(x), rtol=0, atol=1e-11)
    assert any(name.endswith("reference") for name in layer.state_dict())


def test_bad_options_are_refused():
    for options, message in [
        ({"rho": 0.7}, "`rho` of SAM to be less than 1 - 2c, got 0.7"),
        ({"rho": 0.6}, "`rho` of SAM to be less than 1 - 2c, got 0.6"),
        ({"rho": 1, "c": None}, "`rho` of SAM to be less than 1 - 2c, got 1"),
        ({"rho": 0}, "`rho` of SAM to be positive, got 0"),
        ({"c": -0.1}, "`c` of SAM to be positive or None, got -0.1"),
        ({"c": 0}, "`c` of SAM to be positive or None, got 0"),
        ({"gamma": 0}, "`gamma` of SAM to be positive or None, got 0"),
        ({"eta": 0}, r"`eta` of SAM to be in \(0, 1\] or None, got 0"),
        ({"eta": 2}, r"`eta` of SAM to be in \(0, 1\] or None, got 2"),
    ]:
        with pytest.raises(ConfigError, match=message):
            SAM(SquaredNorm(), **options)
    for given in ({"gamma": 0.1}, {"eta": 0.1}, {}):
        with pytest.raises(
            ConfigError, match="no Lipschitz constant to derive `gamma` and `eta` from; give both"
        ):
            SAM(AbsoluteNorm(), **given)
    SAM(SquaredNorm(), rho=0.99, c=None, eta=1)
    with pytest.raises(ConfigError, match="`regulariser` of SAM to be an object with `gradient`"):
        SAM(None)
    with pytest.raises(ConfigError, match=r"`select` of Unrolled to be a SAM\(regulariser\) or None"):
        Unrolled(3, select=SquaredNorm())
