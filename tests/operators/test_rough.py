"""Convolutions that may be rough, against direct ones in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from opteq import Conv2d, DeepOptEq, EquilibriumLayer, GaussianMap, HiddenReadout, OptEqUnit, Unrolled, native
from opteq.operators.conv import BoundConv2d

pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or another processor")

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


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_was_changed_through_its_data_is_seen(frozen):
    x, weight, y = drawn(4, 32, 32, 8, 8)
    operator = Conv2d(32, 32).requires_grad_(not frozen)
    before = operator.bind((32, 8, 8), error=1e-3)
    before(x), before.adjoint(y)
    operator.weight.data.copy_(weight)
    after = operator.bind((32, 8, 8), error=1e-3)
    image, back = after(x), after.adjoint(y)
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
    bound = operator.bind((24, 9, 8), error=1e-3)
    image = bound.adjoint(given) if adjoint else bound(given)
    gradients = torch.autograd.grad(image, (given, operator.weight), other)
    double = [t.detach().double().requires_grad_() for t in (given, weight)]
    product = F.conv_transpose2d if adjoint else F.conv2d
    exact = product(*double, padding=1)
    assert 1e-7 < error(image.detach(), exact.detach()) < ERROR
    outside = bound.detach()
    assert torch.equal(image, outside.adjoint(given.detach()) if adjoint else outside(given.detach()))
    for found, expected in zip(gradients, torch.autograd.grad(exact, double, other.double()), strict=True):
        assert 1e-7 < error(found, expected) < ERROR


def test_products_in_a_graph_can_be_differentiated_twice():
    x, weight, _ = drawn(2, 16, 16, 8, 8)
    operator = Conv2d(16, 16)
    operator.weight.data.copy_(weight)
    x.requires_grad_()
    (first,) = torch.autograd.grad(operator(x, error=1e-3).tanh().sum(), x, create_graph=True)
    second = torch.autograd.grad(first.square().sum(), (x, operator.weight))
    double, kernel = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    image = F.conv2d(double, kernel, padding=1).tanh().sum()
    (first,) = torch.autograd.grad(image, double, create_graph=True)
    for found, exact in zip(second, torch.autograd.grad(first.square().sum(), (double, kernel)), strict=True):
        assert error(found, exact) < 10 * ERROR


ROUGH_MAPS = {
    "unit": lambda: OptEqUnit(Conv2d(16, 32), Conv2d(16, 32)),
    "hidden": lambda: HiddenReadout(OptEqUnit(Conv2d(16, 32), Conv2d(16, 32))),
    "deep": lambda: DeepOptEq([OptEqUnit(Conv2d(16, 16), Conv2d(16, 16)) for _ in range(2)]),
    "gaussian": lambda: GaussianMap(Conv2d(16, 32), Conv2d(16, 32)),
}


@pytest.mark.parametrize("build", ROUGH_MAPS.values(), ids=ROUGH_MAPS)
def test_unrolled_iterations_may_be_rough(build):
    x, _, _ = drawn(4, 16, 32, 8, 8)
    torch.manual_seed(0)
    equilibrium_map = build()

    def run(error):
        given = x.clone().requires_grad_()
        value = EquilibriumLayer(equilibrium_map, gradient=Unrolled(3, error=error)).eval()(given)
        return value.detach(), *torch.autograd.grad(value.sin().sum(), (given, *equilibrium_map.parameters()))

    for rough, exact in zip(run(1e-3), run(0.0), strict=True):
        assert 1e-8 < error(rough, exact) < 2e-4
    assert all(torch.equal(a, b) for a, b in zip(run(1e-6), run(0.0), strict=True))


def test_only_the_gradients_that_are_asked_for_are_computed(monkeypatch):
    x, _, _ = drawn(4, 32, 32, 8, 8)
    operator = Conv2d(32, 32)
    unwanted = "no one wants the gradient of the image"
    monkeypatch.setattr(BoundConv2d, "adjoint", lambda *_: pytest.fail(unwanted))
    operator(x, error=1e-3).sum().backward()
    assert operator.weight.grad is not None


def test_norms_are_exact_whatever_error_is_allowed():
    operator = Conv2d(32, 32)
    rough = operator.bind((32, 8, 8), ceiling=0.5, error=1e-3).detach()
    other = Conv2d(32, 32)
    other.load_state_dict(operator.state_dict())
    exact = other.bind((32, 8, 8), ceiling=0.5).detach()
    assert torch.equal(rough.tensors[0], exact.tensors[0])
    assert torch.equal(rough.quick_norm_bound(), exact.quick_norm_bound())
    assert torch.equal(rough.norm_bound(), exact.quick_norm_bound())


def test_images_that_do_not_fit_are_left_to_pytorch():
    x, weight, y = drawn(2, 32, 48, 16, 16)
    bound = Conv2d(32, 48).bind((32, 16, 16), error=1e-3).with_tensors((weight,))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="channels"):
            bound(x[:, :20])
        with pytest.raises(RuntimeError, match="channels"):
            bound.adjoint(x)
        with pytest.raises(RuntimeError):
            bound.weight_gradient((x, y[:1, :, :8]))
        torch.testing.assert_close(bound(x[0]), bound(x)[0], rtol=1e-4, atol=1e-3)


def test_a_sign_that_is_still_to_be_applied_is_applied():
    x, weight, _ = drawn(2, 16, 16, 16, 16)
    bound = Conv2d(16, 16).bind((16, 16, 16), error=1e-3).with_tensors((weight,))
    with torch.no_grad():
        image = bound(x)
        for weights, given in (((torch._neg_view(weight),), x), ((weight,), torch._neg_view(x))):
            found = bound.with_tensors(weights)(given)
            torch.testing.assert_close(found, -image, rtol=1e-4, atol=1e-3)


def test_operators_use_it_in_groups_of_one_alone():
    x, _, y = drawn(2, 32, 32, 16, 16)
    for groups, fast in ((1, True), (2, False)):
        operator = Conv2d(32, 32, groups=groups)
        exact, found = (
            (bound(x), bound.adjoint(y), *bound.weight_gradient((x, y)))
            for bound in (operator.bind((32, 16, 16), error=error).detach() for error in (0.0, 1e-3))
        )
        for a, b in zip(found, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
            assert torch.equal(a, b) is not fast
