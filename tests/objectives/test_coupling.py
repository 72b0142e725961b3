"""Heritage and diversity against the objective as the paper writes it, and against autograd."""

import math

import pytest
import torch
from torch import Tensor

from opteq import HeritageDiversity
from opteq.errors import ConfigError, ShapeError
from tests.conformance.reference import random
from tests.maps.branches import ring_objective

SIZES = [(4, 4), (8, 4), (4, 8), (4, 4, 4), (8, 4, 2), (2, 8, 4), (8, 8, 4, 2), (4, 4, 4, 4)]
OPTIONS = {
    "soft": {"tau": 0.1},
    "default": {},
    "hard": {"tau": 0.0},
    "heritage": {"diversity": False},
    "diversity": {"heritage": False, "tau": 0.03},
}
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def branches(sizes: tuple[int, ...], channels: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    return tuple(
        random(2, channels, n, n + n // 2, seed=seed + i).requires_grad_() for i, n in enumerate(sizes)
    )


def expected_width(z: tuple[Tensor, ...], tau: float) -> Tensor:
    return tau * sum(t.detach().square().sum((1, 2, 3)) for t in z) / len(z)


@every_size
@every_option
@pytest.mark.spec("R5.2")
def test_value_and_gradient(sizes, options):
    z, start = branches(sizes), branches(sizes, seed=50)
    coupling = HeritageDiversity(weight=0.7, **options).at(start)
    tau = options.get("tau", 1e-3)
    width = expected_width(start, tau) if tau else None
    flags = {name: options.get(name, True) for name in ("heritage", "diversity")}
    expected = ring_objective(z, 0.7, width, **flags)
    torch.testing.assert_close(coupling.value(z), expected, rtol=1e-12, atol=1e-12)
    slopes = torch.autograd.grad(expected.sum(), z)
    for i, (h, slope) in enumerate(zip(coupling.gradient(z), slopes, strict=True)):
        torch.testing.assert_close(h, -0.5 * slope, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(coupling.gradient_of(i, z), -0.5 * slope, rtol=1e-10, atol=1e-10)


@every_size
@every_option
@pytest.mark.spec("R5.2", "R5.3")
def test_products_with_the_jacobian_of_h(sizes, options):
    z, v = branches(sizes), branches(sizes, seed=20)
    coupling = (
        HeritageDiversity(weight=0.7, **options)
        .at(z)
        .with_tensors((torch.tensor([0.9, 2.0], dtype=torch.float64),))
    )
    slopes = torch.autograd.grad(
        ring_objective(
            z, 0.7, coupling.width, options.get("heritage", True), options.get("diversity", True)
        ).sum(),
        z,
        create_graph=True,
    )
    pairing = sum((slope * t.detach()).sum() for slope, t in zip(slopes, v, strict=True))
    expected = torch.autograd.grad(pairing, z, materialize_grads=True)
    for product, second in zip(coupling.linearize(z).product(v), expected, strict=True):
        torch.testing.assert_close(product, -0.5 * second, rtol=1e-10, atol=1e-10)


def dense_jacobian(coupling, z: tuple[Tensor, ...]) -> Tensor:
    """`∂h` of one sample, from the products."""
    shapes = [t.shape for t in z]
    size = [s.numel() for s in shapes]
    linearization = coupling.linearize(z)
    columns = []
    for e in torch.eye(sum(size), dtype=torch.float64):
        v = tuple(part.reshape(s) for part, s in zip(e.split(size), shapes, strict=True))
        columns.append(torch.cat([t.detach().flatten() for t in linearization.product(v)]))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 2, 2), (4, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("tau", [0.0, 1e-2, 0.3])
@pytest.mark.spec("R5.5")
def test_the_eigenvalues_of_the_jacobian_of_h(sizes, tau):
    for seed in range(5):
        z = tuple(random(1, 3, n, n, seed=10 * seed + i) for i, n in enumerate(sizes))
        coupling = HeritageDiversity(weight=0.4, tau=tau).at(z)
        values = torch.linalg.eigvalsh(dense_jacobian(coupling, z))
        assert coupling.gain == pytest.approx(1 + 0.4 * 2)
        assert values.max() <= coupling.gain * (1 + 1e-12)
        assert values.abs().max() <= coupling.jacobian_bound(z).item() * (1 + 1e-12)


@pytest.mark.spec("R5.5")
def test_the_gain_is_attained():
    # Every channel of one branch alike and opposite to those of the other: no N_kl is positive.
    a = random(1, 1, 2, 2).expand(1, 5, 2, 2)
    coupling = HeritageDiversity(weight=0.25, tau=0).at((a, -a))
    assert torch.linalg.matrix_norm(dense_jacobian(coupling, (a, -a)), 2).item() == pytest.approx(
        1 + 0.25 * 4, rel=1e-12
    )
    for tau in (0.0, 1e-6):
        coupling = HeritageDiversity(weight=0.25, tau=tau).at((a, -a))
        assert coupling.jacobian_bound((a, -a)).item() == pytest.approx(2.0)


def test_bounds_for_all_states():
    z = branches((4, 4))
    assert HeritageDiversity(diversity=False).at(z).jacobian_bound().item() == 1
    assert HeritageDiversity(weight=0.0).at(z).jacobian_bound().item() == 1
    for tau in (0.0, 0.1):
        assert HeritageDiversity(tau=tau).at(z).jacobian_bound().item() == math.inf


@pytest.mark.spec("R5.2")
def test_the_paper_is_the_limit():
    z = branches((8, 4, 2))
    hard = HeritageDiversity(weight=1.0, tau=0).at(z).value(z)
    for tau in (1e-1, 1e-3, 1e-5):
        soft = HeritageDiversity(weight=1.0, tau=tau).at(z)
        assert soft.width is not None
        # Huber's function is less than |·| by at most half its width, in 3·2 entries of 3 pairs.
        gap = hard - soft.value(z)
        assert (gap >= 0).all()
        assert (gap <= 3 * 6 * soft.width / 2 + 1e-12 * hard).all()


def test_correlations_are_inner_products_of_channels():
    z = branches((4, 2))
    pooled = torch.nn.functional.avg_pool2d(z[0], 2)
    first, second = HeritageDiversity().at(z).correlations(z)
    expected = torch.einsum("bkhw,blhw->bkl", pooled, z[1])
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, expected.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_memory_layout_does_not_matter(layout):
    z = branches((8, 4, 2))
    moved = tuple(t.contiguous(memory_format=layout) for t in z)
    expected = HeritageDiversity().at(z).gradient(z)
    for h, e in zip(HeritageDiversity().at(moved).gradient(moved), expected, strict=True):
        torch.testing.assert_close(h, e, rtol=1e-12, atol=1e-13)


def test_vectors_are_images_of_one_pixel():
    z = tuple(random(2, 3, seed=i) for i in range(3))
    images = tuple(t[:, :, None, None] for t in z)
    coupling = HeritageDiversity(0.5).at(z)
    torch.testing.assert_close(coupling.value(z), ring_objective(images, 0.5, coupling.width))
    expected = HeritageDiversity(0.5).at(images).gradient(images)
    for h, e in zip(coupling.gradient(z), expected, strict=True):
        torch.testing.assert_close(h, e[:, :, 0, 0], rtol=1e-12, atol=1e-13)


def test_states_of_zeros_have_finite_derivatives():
    z = tuple(torch.zeros(2, 3, 4, 4, dtype=torch.float64) for _ in range(3))
    coupling = HeritageDiversity().at(z)
    linearization = coupling.linearize(z)
    v = tuple(torch.ones_like(t) for t in z)
    for t in (*linearization.gradient(), *linearization.product(v), *linearization.pullback(v)):
        assert torch.isfinite(t).all()


def test_branches_that_do_not_fit():
    options = HeritageDiversity()
    with pytest.raises(ConfigError, match="of which there is one; add a branch, or use Parallel"):
        options.at((random(1, 3, 4, 4),))
    with pytest.raises(ConfigError, match=r"equal channels, got \[3, 4\]"):
        options.at((random(1, 3, 4, 4), random(1, 4, 4, 4)))
    for shape in [(4, 4), (12, 6), (8, 6), (4, 8), (6,), ()]:
        with pytest.raises(ShapeError, match=r"divide by one factor, got \(6, 6\) for branch 1 and"):
            options.at((random(1, 3, 6, 6), random(1, 3, *shape)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": -1.0}, "`weight` of HeritageDiversity to be at least 0 and finite, got -1.0"),
        ({"tau": -1e-3}, "`tau` of HeritageDiversity to be at least 0"),
        ({"weight": math.nan}, "`weight`"),
        ({"lambda_": 1}, "no option 'lambda_'; it has weight, tau, heritage, diversity"),
        ({"heritage": False, "diversity": False}, "use Parallel"),
        ({"weight": math.inf}, "at least 0 and finite, got inf"),
        ({"tau": math.inf}, "at least 0 and finite, got inf"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        HeritageDiversity(**options)
