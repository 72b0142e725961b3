"""What autograd offers beside a backward pass, on every map: right, or refused in one sentence."""

import copy

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call

from opteq import (
    AlmostOrthogonal,
    Anderson,
    Conv2d,
    Dense,
    EquilibriumLayer,
    Implicit,
    OneStep,
    OptEqUnit,
    Phantom,
    Unrolled,
)
from opteq.errors import ConfigError
from tests.conformance.instances import COMPOSED_MAPS, ESTIMATED_MAPS, MAPS, MapCase
from tests.conformance.reference import random

# Forward mode scripts parts of PyTorch, which advises against that.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")

EVERY = MAPS | COMPOSED_MAPS | ESTIMATED_MAPS
every_map = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
# Solved roughly: what is compared here is one solve with the same one.
SOLVER = Anderson(1e-3, 2000)
ADJOINTS = [
    Implicit(1e-3, 500),
    Implicit(1e-3, 500, "anderson"),
    Implicit(1e-3, 500, "gmres"),
    Phantom(),
    Phantom(form="neumann"),
    OneStep(),
]
every_adjoint = pytest.mark.parametrize("method", ADJOINTS, ids=repr)
STEPS = 12


def solving(case: MapCase, method=None) -> EquilibriumLayer:
    return EquilibriumLayer(case.map(), SOLVER, method or ADJOINTS[0], "raise").eval()


def unrolled(case: MapCase, checkpoint: bool = False) -> EquilibriumLayer:
    return EquilibriumLayer(case.map(), gradient=Unrolled(STEPS, checkpoint)).eval()


def tangent_of(layer: EquilibriumLayer, x: Tensor, moves: dict[str, Tensor]) -> Tensor | None:
    """Of the value, where `x` and parameters move as told."""
    with forward_ad.dual_level():
        values = dict(layer.named_parameters())
        duals = {n: forward_ad.make_dual(values[n], t) for n, t in moves.items() if n != "x"}
        given = forward_ad.make_dual(x, moves["x"]) if "x" in moves else x
        return forward_ad.unpack_dual(functional_call(layer, duals, (given,))).tangent


@every_map
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_no_solve_drops_a_tangent(case: MapCase, frozen: bool, grad: bool):
    layer, x = solving(case).requires_grad_(not frozen), case.inputs()
    moves = {"x": random(*x.shape), **{n: random(*p.shape) for n, p in layer.named_parameters()}}
    with torch.set_grad_enabled(grad):
        for name, move in moves.items():
            with pytest.raises(ConfigError, match=r"^opteq .* reverse mode.*gradient=Unrolled\(steps\)"):
                tangent_of(layer, x, {name: move})


@every_map
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["trained", "frozen", "no_grad"])
@pytest.mark.spec("R3.2")
def test_tangents_pass_an_unrolled_layer(case: MapCase, dtype: torch.dtype, mode: str):
    layer, x = unrolled(case).to(dtype), case.inputs().to(dtype)
    moves = {"x": random(*x.shape), **{n: random(*p.shape) for n, p in layer.named_parameters()}}
    moves = {name: move.to(dtype) for name, move in moves.items()}
    cotangent = random(*layer(x).shape, seed=3).to(dtype)
    # The same number from a pass backwards.
    leaf = x.clone().requires_grad_()
    leaves = {"x": leaf, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad((layer(leaf) * cotangent).sum(), list(leaves.values()))
    close = {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 1e-4}
    layer.requires_grad_(mode == "trained")
    for name, gradient in zip(leaves, gradients, strict=True):
        with torch.set_grad_enabled(mode != "no_grad"):
            tangent = tangent_of(layer, x, {name: moves[name]})
        assert tangent is not None
        torch.testing.assert_close((tangent * cotangent).sum(), (gradient * moves[name]).sum(), **close)


@every_map
@every_adjoint
def test_a_moving_cotangent_is_refused(case: MapCase, method):
    layer, x = solving(case, method), case.inputs().requires_grad_()
    z = layer(x)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(z), torch.ones_like(z))
        with pytest.raises(ConfigError, match=r"^opteq .*gradient=Unrolled\(steps\)"):
            torch.autograd.grad(z, x, cotangent)


def batched(layer: EquilibriumLayer, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    z = layer(x)
    basis = torch.eye(z.numel(), dtype=z.dtype).view(-1, *z.shape)
    return torch.autograd.grad(z, x, basis, is_grads_batched=True)[0].view(*z.shape, *x.shape)


def mapped(layer: EquilibriumLayer, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    z = layer(x)
    basis = torch.eye(z.numel(), dtype=z.dtype).view(-1, *z.shape)

    def back(g: Tensor) -> Tensor:
        return torch.autograd.grad(z, x, g, retain_graph=True)[0]

    return func.vmap(back)(basis).view(*z.shape, *x.shape)


def vectorized(layer: EquilibriumLayer, x: Tensor) -> Tensor:
    return jacobian(layer, x, vectorize=True)


@every_map
@every_adjoint
@pytest.mark.parametrize("ask", [batched, mapped, vectorized], ids=lambda f: f.__name__)
def test_many_cotangents_at_a_time_are_refused(case: MapCase, method, ask):
    with pytest.raises(NotImplementedError, match=r"^opteq .* one cotangent at a time; .*Unrolled\(steps\)"):
        ask(solving(case, method), case.inputs(batch=1))


@pytest.mark.parametrize(
    "name", ["unit-dense", "unit-conv-tanh", "unit-mu", "kernel-sigmoid", "skip", "deep-two"]
)
@pytest.mark.parametrize("ask", [batched, mapped, vectorized], ids=lambda f: f.__name__)
def test_many_cotangents_pass_an_unrolled_layer(name: str, ask):
    layer, x = unrolled(EVERY[name]), EVERY[name].inputs(batch=1)
    torch.testing.assert_close(ask(layer, x), jacobian(layer, x), rtol=1e-10, atol=1e-12)


@every_map
def test_many_tangents_at_a_time_are_refused(case: MapCase):
    x = case.inputs(batch=1)
    for layer, message in ((unrolled(case), "one tangent at a time; "), (solving(case), "one tangent")):
        with pytest.raises(ConfigError, match=rf"^opteq's layers take {message}.*gradient=Unrolled\(steps\)"):
            jacobian(layer, x, vectorize=True, strategy="forward-mode")


TRANSFORMS = {
    "grad": lambda f, x: func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: func.jvp(f, (x,), (x,))[1],
    "vjp": lambda f, x: func.vjp(f, x)[1](f(x))[0],
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "hessian": lambda f, x: func.hessian(lambda x: f(x).square().sum())(x),
}
every_transform = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
SENTENCE = (
    r"^opteq [^.]*torch\.autograd, and not by torch\.func; [^.]*gradient=Unrolled\(steps\)[^.]*torch\.func\.$"
)


@every_transform
@every_adjoint
def test_transforms_of_a_solve_are_refused(transform, method):
    case = MAPS["unit-dense"]
    layer, x = solving(case, method), case.inputs(batch=1)
    with pytest.raises(ConfigError, match=SENTENCE):
        transform(layer, x)
    with torch.no_grad(), pytest.raises(ConfigError, match=SENTENCE):
        transform(layer.requires_grad_(False), x)
    layer(x)  # and nothing of it is left behind


@every_transform
def test_transforms_of_an_estimated_norm_are_refused(transform):
    case = MAPS["unit-dense"]
    layer, x = unrolled(case), case.inputs(batch=1)
    with pytest.raises(ConfigError, match=SENTENCE):
        transform(layer, x)
    layer(x)


def free(image: bool = False) -> EquilibriumLayer:
    """Unrolled, with a norm that needs no estimate."""
    torch.manual_seed(0)
    way = AlmostOrthogonal()
    parts = (Conv2d(2, 3, norm=way), Conv2d(1, 3)) if image else (Dense(4, 6, norm=way), Dense(3, 6))
    return EquilibriumLayer(OptEqUnit(*parts, "tanh"), gradient=Unrolled(STEPS)).double()


@every_transform
@pytest.mark.parametrize("image", [False, True], ids=["dense", "conv"])
def test_transforms_pass_a_layer_as_the_sentence_says(transform, image: bool):
    layer, x = free(image), random(1, *((1, 3, 3) if image else (3,)))
    found = transform(layer, x)
    J = jacobian(layer, x)
    z = layer(x).detach()
    expected = {
        "grad": lambda: torch.autograd.functional.vjp(layer, x, 2 * z)[1],
        "jvp": lambda: torch.tensordot(J, x, x.dim()),
        "vjp": lambda: torch.autograd.functional.vjp(layer, x, z)[1],
        "jacrev": lambda: J,
        "jacfwd": lambda: J,
        "hessian": lambda: hessian(lambda x: layer(x).square().sum(), x),
    }
    name = next(n for n, t in TRANSFORMS.items() if t is transform)
    torch.testing.assert_close(found, expected[name](), rtol=1e-9, atol=1e-11)


def test_gradients_by_the_parameters_pass_such_a_layer():
    layer, x = free(), random(2, 3)
    parameters = dict(layer.named_parameters())
    found = func.grad(lambda p: functional_call(layer, p, (x,)).square().sum())(parameters)
    expected = torch.autograd.grad(layer(x).square().sum(), list(parameters.values()))
    for name, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)
    assert layer.bind(x).contraction().value.isfinite().all()


@pytest.mark.parametrize("make", [lambda: unrolled(MAPS["unit-dense"]), free], ids=["ceiling", "free"])
def test_samples_of_vmap_are_refused(make):
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ConfigError, match=r"^opteq's layers .*whole batch"):
            func.vmap(make())(random(4, 1, 3))


RECIPE = r"^opteq .*gradient=Unrolled\(steps\), .*Ceiling\(\) .*AlmostOrthogonal\(\), or max_norm=None\.$"


def second(layer: EquilibriumLayer, x: Tensor, parameter: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), parameter, create_graph=True)
    return torch.autograd.grad((gradient * random(*parameter.shape, seed=4)).sum(), parameter)[0]


@every_map
@every_adjoint
def test_second_derivatives_say_the_whole_recipe_at_once(case: MapCase, method):
    layer, x = solving(case, method), case.inputs()
    for parameter in layer.parameters():
        with pytest.raises(NotImplementedError, match=RECIPE):
            second(layer, x, parameter)


def above_the_ceiling() -> OptEqUnit:
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6), "tanh").double().eval()
    unit.W.weight.data *= 10
    return unit


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_recipe_works(checkpoint: bool):
    unit, x, method = above_the_ceiling(), random(2, 3), Unrolled(STEPS, checkpoint)
    for start in (EquilibriumLayer(unit), EquilibriumLayer(unit, gradient=method)):
        with pytest.raises(NotImplementedError, match=RECIPE):
            second(start, x, unit.W.weight)
    trusted = copy.deepcopy(unit)
    trusted.max_norm, trusted.norm_checked = None, True
    with torch.no_grad():
        trusted.W.weight.mul_(0.9 / torch.linalg.matrix_norm(trusted.W.weight, 2))
    other = OptEqUnit(Dense(4, 6, norm=AlmostOrthogonal()), Dense(3, 6), "tanh").double()
    for module in (trusted, other):
        layer = EquilibriumLayer(module, gradient=method)
        weight = module.W.weight
        found = second(layer, x, weight)
        values, step, direction = [], 1e-5, random(*weight.shape, seed=5)
        for sign in (1, -1):
            moved = copy.deepcopy(layer)
            with torch.no_grad():
                moved.map.W.weight.add_(sign * step * direction)
            (gradient,) = torch.autograd.grad(moved(x).square().sum(), moved.map.W.weight)
            values.append((gradient * random(*weight.shape, seed=4)).sum().item())
        difference = (values[0] - values[1]) / (2 * step)
        assert (found * direction).sum().item() == pytest.approx(difference, rel=1e-6, abs=1e-8)


def test_a_norm_does_not_lose_the_tangent_of_its_gradient():
    # Forward mode over reverse mode is a second derivative as well.
    layer, x = EquilibriumLayer(above_the_ceiling(), gradient=Unrolled(STEPS)), random(2, 3)
    weight = layer.map.W.weight
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight.detach(), random(*weight.shape)).requires_grad_()
        value = functional_call(layer, {"map.W.weight": dual}, (x,)).sum()
        assert forward_ad.unpack_dual(value).tangent is not None
        with pytest.raises(ConfigError, match=r"^opteq .*`W` under Ceiling\(\)"):
            torch.autograd.grad(value, dual)


@every_map
@pytest.mark.parametrize("method", [*ADJOINTS, Unrolled(STEPS), Unrolled(STEPS, checkpoint=True)], ids=repr)
def test_what_is_saved_may_be_changed_where_autograd_watches_over_it(case: MapCase, method):
    solver = None if isinstance(method, Unrolled) else SOLVER
    layer, x = EquilibriumLayer(case.map(), solver, method).eval(), case.inputs().requires_grad_()
    leaves = (x, *layer.parameters())
    expected = torch.autograd.grad(layer(x).square().sum(), leaves)
    before = [t.detach().clone() for t in leaves]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        z = layer(x)
        loss = z.square().sum()
        recomputed = isinstance(method, Unrolled) and method.checkpoint
        with torch.no_grad():
            z.zero_()
            for leaf in () if recomputed else leaves:
                leaf.add_(1)
        found = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        for leaf, value in zip(leaves, before, strict=True):
            leaf.copy_(value)
    torch.testing.assert_close(torch.autograd.grad(layer(x).square().sum(), leaves), expected)
