"""Winograd's convolutions against direct ones in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.grad import conv2d_weight

from opteq import Anderson, Conv2d, EquilibriumLayer, Implicit, OptEqUnit, native
from opteq.errors import ShapeError
from opteq.native import winograd

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor")

# Whole tiles and broken ones, channels that fill vectors and panels and such that do not, one block and many.
CASES = [
    (4, 16, 16, 8, 8),
    (1, 64, 64, 16, 16),
    (3, 64, 64, 14, 14),
    (5, 30, 128, 7, 12),
    (2, 128, 30, 9, 16),
    (2, 17, 79, 13, 8),
    (40, 16, 48, 3, 3),
    (1, 256, 100, 16, 32),
    (2, 512, 32, 11, 14),
]
# Relative to the norm; the direct convolution has 2e-7 to 4e-7.
ERROR = 6e-6


def drawn(batch, channels, out, height, width):
    generator = torch.Generator().manual_seed(1000 * channels + out)
    x = torch.randn(batch, channels, height, width, generator=generator)
    weight = torch.randn(out, channels, 3, 3, generator=generator)
    y = torch.randn(batch, out, height, width, generator=generator)
    return x, weight, y


def convolve(x, weight, adjoint=False, tol=1e-3):
    """The convolution, None where it does not fit."""
    if not winograd.fits(x, weight, 1, tol, adjoint):
        return None
    return winograd.convolve(x, winograd.transformed(weight, adjoint), weight.shape[1 if adjoint else 0])


def weight_gradient(x, y, weight, tol=1e-3):
    return winograd.weight_gradient(x, y) if winograd.fits_gradient(x, y, weight, 1, tol) else None


def error(value, exact):
    assert value.shape == exact.shape
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_direct_convolution(case):
    x, weight, y = drawn(*case)
    image, back = convolve(x, weight), convolve(y, weight, adjoint=True)
    gradient = weight_gradient(x, y, weight)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    assert error(image, exact) < ERROR
    assert error(back, F.conv_transpose2d(y.double(), weight.double(), padding=1)) < ERROR
    assert error(gradient, conv2d_weight(x.double(), weight.shape, y.double(), padding=1)) < ERROR
    # Pixel by pixel, so that no corner or edge hides in the norm.
    assert (image - exact).abs().max() < 20 * ERROR * exact.abs().mean()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "with gaps", "channels of a larger one"])
def test_the_memory_layout_does_not_matter(layout):
    x, weight, y = drawn(4, 32, 16, 12, 8)
    expected = convolve(x, weight), weight_gradient(x, y, weight)
    if layout == "channels_last":
        x, y = (t.contiguous(memory_format=torch.channels_last) for t in (x, y))
        weight = weight.contiguous(memory_format=torch.channels_last)
    elif layout == "with gaps":
        x, y = (apart(t) for t in (x, y))
    elif layout == "channels of a larger one":
        x = torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[:, :32]
    found = convolve(x, weight), weight_gradient(x, y, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def apart(x):
    """`x` with channels last and room between the images."""
    images = x.permute(0, 2, 3, 1)
    rows = torch.full((len(x), images[0].numel() + 5), torch.nan)
    rows[:, :-5] = images.flatten(1)
    return rows[:, :-5].view(images.shape).permute(0, 3, 1, 2)


def test_a_sample_does_not_depend_on_the_others_nor_on_the_threads():
    x, weight, _ = drawn(7, 32, 48, 10, 13)
    threads = torch.get_num_threads()
    try:
        together = convolve(x, weight)
        torch.set_num_threads(3)
        assert torch.equal(convolve(x, weight), together)
        doubled = torch.cat([convolve(x[i : i + 2], weight)[:1] for i in range(6)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(doubled, together[:6])


def test_a_sample_that_is_not_finite_leaves_the_others_alone():
    x, weight, _ = drawn(3, 16, 16, 16, 16)
    expected = convolve(x, weight)
    x[1, 4, 5, 6] = torch.nan
    found = convolve(x, weight)
    assert torch.equal(found[::2], expected[::2])
    assert torch.isnan(found[1]).any()


def refused(x, weight, tol=1e-3):
    return convolve(x, weight, tol=tol) is None and weight_gradient(x, x, weight, tol=tol) is None


def test_it_serves_only_where_its_rounding_is_allowed():
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    assert refused(x, weight, tol=0.0)
    assert refused(x, weight, tol=1e-5)
    assert not refused(x, weight, tol=1e-4)


def test_it_serves_only_where_it_is_written_for(monkeypatch):
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    assert refused(x.double(), weight.double())
    assert refused(x.bfloat16(), weight.bfloat16())
    assert refused(x[:, :3], weight[:3, :3])
    assert refused(x, weight[..., :1, :1])
    assert refused(x, F.pad(weight, (1, 1, 1, 1)))
    assert refused(x[..., :2, :2], weight)
    assert refused(x[:0], weight)
    assert refused(x[0], weight)
    assert refused(x.clone().requires_grad_(), weight)
    assert not winograd.fits(x, weight, 2, 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert refused(x, weight)
    assert not refused(x, weight)
    monkeypatch.setattr(native, "enabled", False)
    assert refused(x, weight)


def test_what_does_not_fit_is_never_read_beyond_its_end():
    x, weight, y = drawn(2, 32, 48, 16, 16)
    kernels = winograd.transformed(weight, adjoint=False)
    for images, channels in ((x[:, :20], 48), (x, 64), (y, 48)):
        with pytest.raises(ShapeError, match="kernels"):
            winograd.convolve(images, kernels, channels)
    for images in (y[:1], y[..., :8]):
        with pytest.raises(ShapeError, match="images"):
            winograd.weight_gradient(x, images)


def test_the_default_device_for_new_tensors_is_not_that_of_the_images():
    x, weight, y = drawn(4, 32, 16, 12, 8)
    expected = convolve(x, weight), weight_gradient(x, y, weight)
    with torch.device("meta"):
        found = convolve(x, weight.clone()), weight_gradient(x, y, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def layer(tol):
    torch.manual_seed(0)
    unit = OptEqUnit(Conv2d(16, 32), Conv2d(3, 32), max_norm=0.9)
    return EquilibriumLayer(unit, Anderson(tol), Implicit(tol), on_unconverged="raise")


def gradients(made, x):
    value = made(x)
    made.zero_grad()
    value.square().sum().backward()
    return value.detach(), [p.grad.clone() for p in made.parameters()]


@pytest.mark.parametrize("tol", [1e-3, 1e-4, 3e-5])
def test_equilibria_and_gradients_are_as_near_as_without(tol, monkeypatch):
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    exact = layer(1e-12).double()
    value, truth = gradients(exact, x.double())
    errors, values = {}, {}
    for fast in (True, False):
        monkeypatch.setattr(native, "enabled", fast)
        found, slopes = gradients(layer(tol), x)
        distances = [error(found, value), *(error(g, t) for g, t in zip(slopes, truth, strict=True))]
        errors[fast], values[fast] = max(distances), found
    assert not torch.equal(values[True], values[False])
    assert errors[True] < 1.2 * errors[False] + 2e-5


def test_tight_solves_stay_exact(monkeypatch):
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    fast = gradients(layer(5e-6), x)
    for name in ("fits", "fits_gradient"):
        monkeypatch.setattr(winograd, name, lambda *_, **__: False)
    slow = gradients(layer(5e-6), x)
    assert torch.equal(fast[0], slow[0])
    assert all(map(torch.equal, fast[1], slow[1]))
