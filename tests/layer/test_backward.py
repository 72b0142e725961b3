"""The layer in an autograd graph."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from opteq import Anderson, Conv2d, Dense, EquilibriumLayer, Implicit, OneStep, OptEqUnit, Phantom, Unrolled
from opteq.activations import get_activation
from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.similarity import Similarity
from tests.solvers.problems import TwoBranches

ADJOINTS = [
    Implicit(tol=1e-11),
    Implicit(tol=1e-11, method="gmres"),
    Phantom(),
    Phantom(form="neumann"),
    OneStep(),
]
names = str


def unit_layer(gradient=None, seed=0):
    torch.manual_seed(seed)
    unit = OptEqUnit(Dense(6, 8), Dense(4, 8), activation="softplus")
    solver = None if isinstance(gradient, Unrolled) else Anderson(tol=1e-12, max_steps=200)
    return EquilibriumLayer(unit, solver, gradient or Implicit(tol=1e-11)).double()


def inputs(batch=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, generator=generator, dtype=torch.float64, requires_grad=True)


def gradients(output, tensors):
    return torch.autograd.grad(output.square().sum(), tensors)


def reference(layer, x):
    """Equilibrium by plain autograd through many iterations written out here."""
    weight, unit = layer.map.W.weight, layer.map
    scale = (unit.max_norm / torch.linalg.matrix_norm(weight, 2)).clamp(max=1)
    c = x @ unit.injection.operator.weight.mT + unit.injection.bias
    z = torch.zeros(len(x), 6, dtype=x.dtype)
    for _ in range(300):
        z = nn.functional.softplus(z @ (scale * weight).mT + c) @ (scale * weight)
    return z


@pytest.mark.spec("R3.1")
@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
def test_implicit_gradients_equal_those_of_a_long_unrolled_iteration(method):
    layer, x = unit_layer(Implicit(tol=1e-11, max_steps=200, method=method)), inputs()
    sources = (x, *layer.parameters())
    actual, expected = gradients(layer(x), sources), gradients(reference(layer, x), sources)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_several_calls_before_one_backward():
    layer, x, y = unit_layer(), inputs(), inputs(5, seed=2)
    parameters = tuple(layer.parameters())
    together = torch.autograd.grad(layer(x).square().sum() + layer(y).square().sum(), parameters)
    apart = zip(gradients(layer(x), parameters), gradients(layer(y), parameters), strict=True)
    for a, (b, c) in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b + c)


def test_a_layer_may_feed_itself():
    torch.manual_seed(0)
    layer = unit_layer()
    middle = nn.Linear(6, 4).double()
    x = inputs()
    sources = (x, *layer.parameters(), *middle.parameters())
    actual = gradients(layer(middle(layer(x))), sources)
    expected = gradients(reference(layer, middle(reference(layer, x))), sources)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_two_layers_may_share_a_map():
    first = unit_layer()
    second = EquilibriumLayer(first.map, Anderson(tol=1e-12, max_steps=200), Implicit(tol=1e-11))
    x, y = inputs(), inputs(seed=2)
    (shared,) = torch.autograd.grad((first(x) * second(y)).sum(), first.map.W.weight)
    (expected,) = torch.autograd.grad((reference(first, x) * reference(first, y)).sum(), first.map.W.weight)
    torch.testing.assert_close(shared, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gradient", [*ADJOINTS, Unrolled(20)], ids=names)
def test_only_the_input_or_only_parameters_may_require_gradients(gradient):
    layer, x = unit_layer(gradient), inputs()
    everything = gradients(layer(x), (x, *layer.parameters()))

    only_parameters = gradients(layer(x.detach()), tuple(layer.parameters()))
    for a, b in zip(only_parameters, everything[1:], strict=True):
        torch.testing.assert_close(a, b)

    layer.requires_grad_(False)
    torch.testing.assert_close(gradients(layer(x), x)[0], everything[0])


@pytest.mark.parametrize("gradient", [*ADJOINTS, Unrolled(20)], ids=names)
def test_nothing_requires_gradients_without_cause(gradient):
    layer, x = unit_layer(gradient), inputs()
    with torch.no_grad():
        z = layer(x)
    assert not z.requires_grad
    assert z.grad_fn is None
    layer.requires_grad_(False)
    assert not layer(x.detach()).requires_grad


@pytest.mark.parametrize("gradient", [*ADJOINTS, Unrolled(20)], ids=names)
def test_a_kept_graph_may_be_used_twice_and_a_freed_one_may_not(gradient):
    layer, x = unit_layer(gradient), inputs()
    z = layer(x).square().sum()
    first = torch.autograd.grad(z, x, retain_graph=True)[0]
    second = torch.autograd.grad(z, x)[0]
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(z, x)


@pytest.mark.parametrize("gradient", ADJOINTS, ids=names)
def test_a_weight_changed_between_forward_and_backward_is_detected(gradient):
    for scale in (0.1, 10):  # below the ceiling of the norm, where the weights enter as they are, and above
        layer, x = unit_layer(gradient), inputs()
        layer.map.W.weight.data *= scale
        z = layer(x)
        with torch.no_grad():
            layer.map.W.weight.mul_(1.1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("gradient", ADJOINTS, ids=names)
def test_a_changed_output_does_not_change_the_gradient(gradient):
    layer, x = unit_layer(gradient), inputs()
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    z = layer(x)
    loss = z.sum()
    with torch.no_grad():
        z.mul_(2)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("gradient", ADJOINTS, ids=names)
def test_an_inplace_module_may_follow_the_layer(gradient):
    layer, x = unit_layer(gradient), inputs()
    (expected,) = torch.autograd.grad(nn.Sequential(layer, nn.Tanh())(x).sum(), x)
    z = layer(x).tanh_()
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], expected)


@pytest.mark.parametrize("gradient", [*ADJOINTS, Unrolled(200)], ids=names)
@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_gradients_through_a_state_of_two_branches(gradient, used):
    torch.manual_seed(0)
    branches = TwoBranches()
    solver = None if isinstance(gradient, Unrolled) else Anderson(tol=1e-12, max_steps=200)
    layer = EquilibriumLayer(branches, solver, gradient)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    first, second = layer(x)
    loss = {"both": first.square().sum() + second.square().sum(), "first": first.square().sum()}
    loss["second"] = second.square().sum()
    grad_x, grad_first, grad_second = torch.autograd.grad(loss[used], (x, branches.first, branches.second))

    # The same model with one tensor as its state.
    joint = OptEqUnit(Dense(11, 6), nn.Identity(), activation="tanh", bias=False, max_norm=None).double()
    joint.W.weight.data.copy_(branches.joint_weight)
    z = EquilibriumLayer(joint, solver, gradient)(x)
    parts = {"both": z, "first": z[:, :3], "second": z[:, 3:]}
    expected_x, expected_w = torch.autograd.grad(parts[used].square().sum(), (x, joint.W.weight))
    torch.testing.assert_close(grad_x, expected_x, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(torch.cat((grad_first, grad_second), 1), expected_w, rtol=1e-7, atol=1e-9)


def test_the_memory_layout_of_input_and_cotangent_does_not_matter():
    torch.manual_seed(0)
    unit = OptEqUnit(Conv2d(3, 4), Conv2d(2, 4))
    layer = EquilibriumLayer(unit, Anderson(tol=1e-11), Implicit(tol=1e-11)).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    g = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = x.clone(memory_format=layout).requires_grad_()
        layer.zero_grad()
        layer(leaf).backward(g.contiguous(memory_format=layout))
        results.append([leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.parametrize("gradient", ADJOINTS, ids=names)
def test_function_transforms_are_refused_and_not_silently_wrong(gradient):
    layer, x = unit_layer(gradient), inputs().detach()
    with pytest.raises(ConfigError, match=r"not by torch\.func; .*Unrolled"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    with pytest.raises(ConfigError, match=r"not by torch\.func; .*Unrolled"):
        torch.func.jvp(layer, (x,), (x,))


@dataclass(frozen=True, eq=False)
class Derived(Equation):
    """`z = tanh(½ z S + c)` with an `S` that is made when the tensors are given."""

    c: torch.Tensor
    W: torch.Tensor
    S: torch.Tensor

    @property
    def tensors(self):
        return self.c, self.W

    def with_tensors(self, tensors):
        c, W = tensors
        return replace(self, c=c, W=W, S=W @ W.mT)

    def initial(self):
        return torch.zeros_like(self.c)

    def __call__(self, state):
        return torch.tanh(0.5 * state @ self.S + self.c)

    def contraction(self, state=None):
        raise NotImplementedError


class DerivedMap(EquilibriumMap):
    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.linspace(-0.6, 0.6, 16, dtype=torch.float64).view(4, 4))

    def bind(self, x, error=0.0):
        return Derived(x, self.W, self.W @ self.W.mT)


def test_an_equation_may_derive_tensors_from_those_that_it_is_given():
    layer, x = EquilibriumLayer(DerivedMap(), Anderson(tol=1e-12), Implicit(tol=1e-12)), inputs()
    unrolled = EquilibriumLayer(layer.map, gradient=Unrolled(200))
    sources = (x, layer.map.W)
    for a, b in zip(gradients(layer(x), sources), gradients(unrolled(x), sources), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


class Constant(Similarity):
    """`S(y) = ⟨c, y⟩`, whose gradient is the very tensor that it was given."""

    def __init__(self, c):
        self.c = c

    @property
    def tensors(self):
        return (self.c,)

    def with_tensors(self, tensors):
        return Constant(tensors[0])

    def initial(self):
        return torch.zeros_like(self.c)

    def value(self, y):
        return (self.c * y).sum(1)

    def gradient(self, y):
        return self.c

    def linearize(self, y):
        raise NotImplementedError

    hessian_bound = linearize


class ConstantMap(EquilibriumMap):
    def bind(self, x, error=0.0):
        return SimilarityEquation(Constant(x), get_activation("relu"))


def test_the_gradient_of_a_similarity_is_not_written_into_unless_it_says_so():
    x = torch.randn(3, 4)
    before = x.clone()
    assert torch.equal(EquilibriumLayer(ConstantMap())(x), before.relu())
    assert torch.equal(x, before)
