"""Winograd's convolutions against direct ones in float64."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.grad import conv2d_weight

from opteq import Anderson, Conv2d, EquilibriumLayer, Implicit, OptEqUnit, native
from opteq.operators import winograd
from opteq.rounding import tolerating

pytestmark = pytest.mark.skipif(not winograd.available(), reason="no C compiler, or another processor")

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


def error(value, exact):
    assert value.shape == exact.shape
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_products_are_those_of_the_direct_convolution(case):
    x, weight, y = drawn(*case)
    with tolerating(1e-3):
        image, back = winograd.convolve(x, weight), winograd.convolve(y, weight, adjoint=True)
        gradient = winograd.weight_gradient(x, y, weight)
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    assert error(image, exact) < ERROR
    assert error(back, F.conv_transpose2d(y.double(), weight.double(), padding=1)) < ERROR
    assert error(gradient, conv2d_weight(x.double(), weight.shape, y.double(), padding=1)) < ERROR
    # Pixel by pixel, so that no corner or edge hides in the norm.
    assert (image - exact).abs().max() < 20 * ERROR * exact.abs().mean()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "with gaps", "channels of a larger one"])
def test_the_memory_layout_does_not_matter(layout):
    x, weight, y = drawn(4, 32, 16, 12, 8)
    with tolerating(1e-3):
        expected = winograd.convolve(x, weight), winograd.weight_gradient(x, y, weight)
        if layout == "channels_last":
            x, y = (t.contiguous(memory_format=torch.channels_last) for t in (x, y))
            weight = weight.contiguous(memory_format=torch.channels_last)
        elif layout == "with gaps":
            x, y = (apart(t) for t in (x, y))
        elif layout == "channels of a larger one":
            x = torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[:, :32]
        found = winograd.convolve(x, weight), winograd.weight_gradient(x, y, weight)
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
        with tolerating(1e-3):
            together = winograd.convolve(x, weight)
            torch.set_num_threads(3)
            assert torch.equal(winograd.convolve(x, weight), together)
            doubled = torch.cat([winograd.convolve(x[i : i + 2], weight)[:1] for i in range(6)])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(doubled, together[:6])


def test_a_sample_that_is_not_finite_leaves_the_others_alone():
    x, weight, _ = drawn(3, 16, 16, 16, 16)
    with tolerating(1e-3):
        expected = winograd.convolve(x, weight)
        x[1, 4, 5, 6] = torch.nan
        found = winograd.convolve(x, weight)
    assert torch.equal(found[::2], expected[::2])
    assert torch.isnan(found[1]).any()


def test_a_weight_that_has_changed_is_seen():
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    with tolerating(1e-3):
        before = winograd.convolve(x, weight)
        weight *= 2
        torch.testing.assert_close(winograd.convolve(x, weight), 2 * before)
        weight.data = weight / 4
        torch.testing.assert_close(winograd.convolve(x, weight), before / 2)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_was_changed_through_its_data_is_seen(frozen):
    x, weight, y = drawn(4, 32, 32, 8, 8)
    operator = Conv2d(32, 32).requires_grad_(not frozen)
    with tolerating(1e-3):
        operator(x), operator.adjoint(y)
        operator.weight.data.copy_(weight)
        image, back = operator(x), operator.adjoint(y)
    assert error(image.detach(), F.conv2d(x.double(), weight.double(), padding=1)) < ERROR
    assert error(back.detach(), F.conv_transpose2d(y.double(), weight.double(), padding=1)) < ERROR


@pytest.mark.parametrize("inference", [False, True])
def test_a_stored_weight_that_is_no_parameter_may_be_changed_without_a_trace(inference):
    # As averages of the weights are put into a layer for one call; in inference mode no change is counted.
    x, weight, _ = drawn(4, 32, 32, 8, 8)
    layer = EquilibriumLayer(OptEqUnit(Conv2d(32, 32), Conv2d(32, 32))).eval()
    with torch.inference_mode(inference), torch.no_grad():
        average = {name: p.clone() for name, p in layer.named_parameters()}
        functional_call(layer, average, (x,))
        for name in ("map.W.weight", "map.injection.operator.weight"):
            average[name].data.copy_(weight)
        value = functional_call(layer, average, (x,))
        layer.load_state_dict(average)
        torch.testing.assert_close(value, layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("adjoint", [False, True])
def test_products_in_a_graph_have_gradients(adjoint):
    x, weight, y = drawn(4, 24, 32, 9, 8)
    operator = Conv2d(24, 32)
    operator.weight.data.copy_(weight)
    given, other = (y, x) if adjoint else (x, y)
    given.requires_grad_()
    with tolerating(1e-3):
        image = operator.adjoint(given) if adjoint else operator(given)
    # Outside, as the backward pass of a training step is.
    gradients = torch.autograd.grad(image, (given, operator.weight), other)
    double = [t.detach().double().requires_grad_() for t in (given, weight)]
    product = F.conv_transpose2d if adjoint else F.conv2d
    exact = product(*double, padding=1)
    assert 1e-7 < error(image.detach(), exact.detach()) < ERROR
    for found, expected in zip(gradients, torch.autograd.grad(exact, double, other.double()), strict=True):
        assert 1e-7 < error(found, expected) < ERROR


def test_products_in_a_graph_can_be_differentiated_twice():
    x, weight, _ = drawn(2, 16, 16, 8, 8)
    operator = Conv2d(16, 16)
    operator.weight.data.copy_(weight)
    x.requires_grad_()
    with tolerating(1e-3):
        (first,) = torch.autograd.grad(operator(x).tanh().sum(), x, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), (x, operator.weight))
    double, kernel = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    image = F.conv2d(double, kernel, padding=1).tanh().sum()
    (first,) = torch.autograd.grad(image, double, create_graph=True)
    for found, exact in zip(second, torch.autograd.grad(first.square().sum(), (double, kernel)), strict=True):
        assert error(found, exact) < 10 * ERROR


def test_only_the_gradients_that_are_asked_for_are_computed(monkeypatch):
    x, _, _ = drawn(4, 32, 32, 8, 8)
    operator = Conv2d(32, 32)
    monkeypatch.setattr(Conv2d, "rmatvec", lambda *_: pytest.fail("no one wants the gradient of the image"))
    with tolerating(1e-3):
        operator(x).sum().backward()
    assert operator.weight.grad is not None


def test_norms_are_exact_whatever_is_tolerated():
    operator = Conv2d(32, 32)
    with tolerating(1e-3):
        rough = operator.norm((32, 8, 8)), operator.norm_bound((32, 8, 8))
    other = Conv2d(32, 32)
    other.load_state_dict(operator.state_dict())
    assert torch.equal(rough[0], other.norm((32, 8, 8)))
    assert torch.equal(rough[1], other.norm_bound((32, 8, 8)))


def test_what_is_kept_of_a_weight_goes_with_it():
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    gc.collect()
    before = len(winograd._known)
    with tolerating(1e-3):
        winograd.convolve(x, weight)
    assert len(winograd._known) == before + 1
    del weight
    assert len(winograd._known) == before


def test_the_stored_weight_keeps_nothing_until_the_backward_pass():
    operator, x = Conv2d(16, 16), drawn(2, 16, 16, 16, 16)[0].requires_grad_()
    gc.collect()
    before = len(winograd._known)
    with tolerating(1e-3):
        y = operator(x)
    assert type(y.grad_fn).__name__ == "_AttachedBackward"
    assert len(winograd._known) == before


def refused(x, weight):
    return winograd.convolve(x, weight) is None and winograd.weight_gradient(x, x, weight) is None


def test_it_serves_only_where_its_rounding_is_tolerated():
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    assert refused(x, weight)
    with tolerating(1e-5):
        assert refused(x, weight)
    with tolerating(1e-4):
        assert not refused(x, weight)
        with tolerating(1e-6):
            assert refused(x, weight)
        assert not refused(x, weight)


def test_it_serves_only_where_it_is_written_for(monkeypatch):
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    with tolerating(1e-3):
        assert refused(x.double(), weight.double())
        assert refused(x.bfloat16(), weight.bfloat16())
        assert refused(x[:, :3], weight[:3, :3])
        assert refused(x, weight[..., :1, :1])
        assert refused(x, F.pad(weight, (1, 1, 1, 1)))
        assert refused(x[..., :2, :2], weight)
        assert refused(x[:0], weight)
        assert refused(x.clone().requires_grad_(), weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert refused(x, weight)
        assert not refused(x, weight)
        monkeypatch.setattr(native, "enabled", False)
        assert refused(x, weight)


def test_images_that_do_not_fit_are_left_to_pytorch():
    x, weight, y = drawn(2, 32, 48, 16, 16)
    operator = Conv2d(32, 48)
    with torch.no_grad(), tolerating(1e-3):
        with pytest.raises(RuntimeError, match="channels"):
            operator.matvec((weight,), x[:, :20])
        with pytest.raises(RuntimeError, match="channels"):
            operator.rmatvec((weight,), x)
        with pytest.raises(RuntimeError):
            operator.weight_gradient((weight,), x, y[:1, :, :8])
        image = operator.matvec((weight,), x[0])
        torch.testing.assert_close(image, operator.matvec((weight,), x)[0], rtol=1e-4, atol=1e-3)


def test_a_sign_that_is_still_to_be_applied_is_applied():
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    with torch.no_grad(), tolerating(1e-3):
        image = Conv2d(16, 16).matvec((weight,), x)
        for pair in ((torch._neg_view(weight), x), (weight, torch._neg_view(x))):
            found = Conv2d(16, 16).matvec(pair[:1], pair[1])
            torch.testing.assert_close(found, -image, rtol=1e-4, atol=1e-3)


def test_the_default_device_for_new_tensors_is_not_that_of_the_images():
    x, weight, y = drawn(4, 32, 16, 12, 8)
    with tolerating(1e-3):
        expected = winograd.convolve(x, weight), winograd.weight_gradient(x, y, weight)
        with torch.device("meta"):
            found = winograd.convolve(x, weight.clone()), winograd.weight_gradient(x, y, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_operators_use_it_in_groups_of_one_alone():
    x, _, y = drawn(2, 32, 32, 16, 16)
    for groups, fast in ((1, True), (2, False)):
        operator = Conv2d(32, 32, groups=groups)
        with torch.no_grad():
            exact = operator(x), operator.adjoint(y), operator.weight_gradient(operator.weights, x, y)[0]
            with tolerating(1e-3):
                found = operator(x), operator.adjoint(y), operator.weight_gradient(operator.weights, x, y)[0]
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
            assert torch.equal(a, b) is not fast


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
    monkeypatch.setattr(winograd, "_library", lambda: None)
    slow = gradients(layer(5e-6), x)
    assert torch.equal(fast[0], slow[0])
    assert all(map(torch.equal, fast[1], slow[1]))


def test_layers_work_without_a_compiler(monkeypatch):
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    fast, _ = gradients(layer(1e-4), x)
    monkeypatch.setattr(native, "_loaded", lambda *_: None)
    slow, _ = gradients(layer(1e-4), x)
    assert not torch.equal(fast, slow)
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-3)
