"""Hooks and parametrizations of torch on the operators and on every other part of a layer."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from opteq import Anderson, Conv2d, Dense, EquilibriumLayer, Implicit, OptEqUnit, Unrolled
from opteq.errors import ConfigError
from opteq.maps.base import Injection
from opteq.results import tensors_of
from tests.conformance.instances import COMPOSED_MAPS, ESTIMATED_MAPS, MAPS, MapCase
from tests.conformance.reference import random

# `torch.nn.utils.weight_norm` says that it is superseded.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
EVERY = MAPS | COMPOSED_MAPS | ESTIMATED_MAPS
every_map = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)


def build(image: bool, max_norm: float | None = 0.9) -> EquilibriumLayer:
    torch.manual_seed(0)
    W, U = (Conv2d(2, 3), Conv2d(1, 3)) if image else (Dense(4, 6), Dense(3, 6))
    unit = OptEqUnit(W, U, "tanh", max_norm=max_norm)
    unit.W.weight.data *= 3
    return EquilibriumLayer(unit, Anderson(1e-13, 1000), Implicit(1e-12, 500), "raise").double()


def inputs(image: bool) -> Tensor:
    return random(3, *((1, 3, 4) if image else (3,)))


# What is done to an operator, and the weight that comes of it, by hand.
def pruned(operator):
    prune.l1_unstructured(operator, "weight", 0.4)
    return lambda: operator.weight_orig * operator.weight_mask


def filters_pruned(operator):
    prune.ln_structured(operator, "weight", 0.5, n=2, dim=0)
    return lambda: operator.weight_orig * operator.weight_mask


def lengths(v):
    return v.flatten(1).norm(dim=1).view(-1, *[1] * (v.dim() - 1))


def old_weight_norm(operator):
    nn.utils.weight_norm(operator)
    return lambda: operator.weight_g * operator.weight_v / lengths(operator.weight_v)


def new_weight_norm(operator):
    parametrizations.weight_norm(operator)

    def weight():
        g, v = operator.parametrizations.weight.original0, operator.parametrizations.weight.original1
        return g * v / lengths(v)

    return weight


def old_spectral_norm(operator):
    nn.utils.spectral_norm(operator)

    def weight():
        w = operator.weight_orig
        return w / (operator.weight_u @ w.flatten(1) @ operator.weight_v)

    return weight


def new_spectral_norm(operator):
    parametrizations.spectral_norm(operator)

    def weight():
        w, norm = operator.parametrizations.weight.original, operator.parametrizations.weight[0]
        return w / (norm._u @ w.flatten(1) @ norm._v)

    return weight


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def own_parametrization(operator):
    nn.utils.parametrize.register_parametrization(operator, "weight", Halved())
    return lambda: operator.parametrizations.weight.original / 2


WAYS = [
    pruned,
    filters_pruned,
    old_weight_norm,
    new_weight_norm,
    old_spectral_norm,
    new_spectral_norm,
    own_parametrization,
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
every_kind = pytest.mark.parametrize("image", [False, True], ids=["dense", "conv"])


def reference(x: Tensor, W: Tensor, U: Tensor, bias: Tensor, max_norm: float | None) -> Tensor:
    """The equilibrium by a long plain iteration, `W` scaled by its largest singular value."""
    image = x.dim() == 4
    forward = (lambda z, w: F.conv2d(z, w, padding=1)) if image else F.linear
    adjoint = (lambda y, w: F.conv_transpose2d(y, w, padding=1)) if image else (lambda y, w: y @ w)
    domain = (W.shape[1], *x.shape[2:])
    if max_norm is not None:
        basis = torch.eye(torch.Size(domain).numel(), dtype=x.dtype).view(-1, *domain)
        norm = torch.linalg.matrix_norm(forward(basis, W).flatten(1), 2)
        W = W * (max_norm / norm).clamp(max=1)
    c = forward(x, U) + bias.view(-1, *[1] * (x.dim() - 2))
    z = x.new_zeros(len(x), *domain)
    for _ in range(400):
        z = adjoint(torch.tanh(forward(z, W) + c), W)
    return z


def compare(layer: EquilibriumLayer, x: Tensor, expected: Tensor) -> None:
    """Values, and gradients to the input and all that is trained."""
    leaves = (x, *layer.parameters())
    value, cotangent = layer(x), random(*expected.shape, seed=5)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)
    computed = torch.autograd.grad((value * cotangent).sum(), leaves)
    wanted = torch.autograd.grad((expected * cotangent).sum(), leaves)
    for a, b in zip(computed, wanted, strict=True):
        assert b.any()
        # The derivative of the norm is right to the root of its own precision.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@every_way
@every_kind
@pytest.mark.parametrize("part", ["W", "U"])
def test_values_and_gradients_are_those_of_the_weight_by_hand(way, image, part):
    layer, x = build(image), inputs(image).requires_grad_()
    unit = layer.map
    operators = {"W": unit.W, "U": unit.injection.operator}
    weights = {name: lambda operator=operator: operator.weight for name, operator in operators.items()}
    weights[part] = way(operators[part])
    layer.eval()
    for scale in (1.0, 0.1):  # above the ceiling, and below
        with torch.no_grad():
            for parameter in operators[part].parameters():
                parameter.mul_(scale)
        for _ in range(2):  # the second time as the first
            W, U = weights["W"](), weights["U"]()
            compare(layer, x, reference(x, W, U, unit.injection.bias, unit.max_norm))


@every_way
@every_kind
def test_training_goes_on_behind_hooks(way, image):
    layer, x = build(image).train(), inputs(image)
    way(layer.map.W)
    way(layer.map.injection.operator)
    target, losses = 0.3 * random(*layer(x).shape, seed=2), []
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    for _ in range(12):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@every_way
@every_kind
def test_a_saved_state_is_loaded_behind_hooks(way, image):
    layer, x = build(image), inputs(image)
    other = build(image)
    for each in (layer, other):
        way(each.map.W)
        way(each.map.injection.operator)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.3)
    other(x)  # what is known of its norm must not survive
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other.eval()(x), layer.eval()(x), rtol=0, atol=1e-12)
    # Copies of modules whose hooks left a tensor of the graph behind fail in PyTorch as well.
    with torch.no_grad():
        layer(x)
        torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x), rtol=0, atol=1e-12)


def trained(layer: EquilibriumLayer, x: Tensor) -> EquilibriumLayer:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    return layer


def test_pruning_and_training_and_loading_is_that_of_torch():
    x, layers = inputs(True), []
    for own in (True, False):
        layer = build(True)
        if not own:
            plain = nn.Conv2d(1, 3, 3, padding=1, bias=False).double()
            plain.weight.data.copy_(layer.map.injection.operator.weight.data)
            layer.map.injection.operator = plain
        prune.l1_unstructured(layer.map.injection.operator, "weight", 0.5)
        layers.append(trained(layer, x))
    ours, torchs = layers
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    for key, value in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-8, atol=1e-10)
    # Each is loaded into the other, and then made permanent.
    ours.load_state_dict(torchs.state_dict())
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x), rtol=1e-8, atol=1e-10)
    for layer in layers:
        operator, before = layer.map.injection.operator, layer(x)
        mask = operator.weight_mask.bool()
        prune.remove(operator, "weight")
        assert (operator.weight[~mask] == 0).all()
        torch.testing.assert_close(layer(x), before, rtol=0, atol=1e-12)


@every_kind
@pytest.mark.parametrize("size", [0.1, 4.0], ids=["below the ceiling", "above"])
def test_what_is_pruned_of_W_stays_zero(image, size):
    layer, x = build(image), inputs(image)
    W = layer.map.W
    with torch.no_grad():
        W.weight.mul_(size)
    prune.random_unstructured(W, "weight", 0.5)
    mask = W.weight_mask.bool()
    before = W.weight_orig.detach().clone()
    for _ in range(10):
        trained(layer, x)
        (acting,) = layer.bind(x).W.tensors
        assert (acting[~mask] == 0).all()
        assert (acting[mask] != 0).all()
    assert not torch.equal(W.weight_orig[mask], before[mask])
    # No gradient came to what is masked, and no one scaled it.
    assert torch.equal(W.weight_orig[~mask], before[~mask])


def first_argument(module, args):
    return args[0].square() and None


def unpacked(module, args):
    (_,) = args


def by_keyword(module, args, kwargs):
    kwargs["x"].square()


def doubled(module, args):
    return tuple(2 * x for x in args)


@pytest.mark.parametrize(
    ("hook", "options", "message"),
    [
        (first_argument, {}, "looks at an input"),
        (unpacked, {}, "looks at an input"),
        (by_keyword, {"with_kwargs": True}, "looks at an input"),
        (doubled, {}, "changes its input"),
    ],
)
def test_a_hook_before_W_that_wants_an_input_is_refused(hook, options, message):
    layer = build(False)
    handle = layer.map.W.register_forward_pre_hook(hook, **options)
    for call in (layer, layer.bind, EquilibriumLayer(layer.map, gradient=Unrolled(2))):
        with pytest.raises(ConfigError, match=rf"hook of Dense {message}.*Hook the layer or `U` instead\.$"):
            call(inputs(False))
    handle.remove()
    layer(inputs(False))


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_before_W_may_hand_back_what_it_was_given(with_kwargs):
    layer, x = build(image=True), inputs(image=True)
    expected = layer(x)
    hook = (lambda module, *given: given) if with_kwargs else (lambda module, given: given)
    layer.map.W.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
    assert torch.equal(layer(x), expected)


def test_a_scope_that_a_tracer_opens_before_W_is_closed(monkeypatch):
    class Trace:
        scopes = ("net",)

        def push_scope(self, name):
            self.scopes += (name,)

        def pop_scope(self):
            self.scopes = self.scopes[:-1]

        def current_scope(self):
            return "/".join(self.scopes)

    def open_scopes(module, given):
        trace.push_scope("W")
        trace.push_scope("inner")
        seen.append(trace.current_scope())
        return given

    trace, seen, W = Trace(), [], build(image=True).map.W
    W.register_forward_pre_hook(open_scopes)
    monkeypatch.setattr(torch._C, "_get_tracing_state", lambda: trace)
    W.bind((2, 3, 4))
    monkeypatch.undo()
    assert seen == ["net/W/inner"]
    # torch ends the process where a scope is left open.
    assert trace.scopes == ("net",)


def test_the_hooks_of_opacus_are_refused_at_W_alone():
    def hook(module, given, result):
        calls.append(module)

    calls = []
    # As that of its GradSampleModule, which needs a call of a module to see the gradient of each sample.
    hook.__module__ = "opacus.grad_sample.grad_sample_module"
    layer = build(image=True)
    layer.map.injection.operator.register_forward_hook(hook)
    layer.map.injection.register_forward_hook(hook)
    layer(inputs(image=True))
    assert len(calls) == 2
    layer.map.W.register_forward_hook(hook)
    with pytest.raises(ConfigError, match=r"Opacus collects .* freeze it by W\.requires_grad_\(False\)"):
        layer(inputs(image=True))


def test_what_is_given_to_an_injection_is_the_input_alone():
    seen = []
    layer = build(image=True)
    layer.map.injection.register_forward_pre_hook(lambda module, given: seen.append(given))
    layer(inputs(image=True))
    ((given,),) = seen
    assert torch.equal(given, inputs(image=True))


def test_a_hook_before_W_runs_once_for_a_solve():
    layer, calls = build(False), []
    layer.map.W.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
    layer(inputs(False)).sum().backward()
    assert calls == [0]


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_hook_behind_U_sees_U_x_and_may_change_it(image, dtype):
    layer, x, seen = build(image).to(dtype), inputs(image).to(dtype), []
    layer.solver, layer.gradient = Anderson(1e-5, 200), Implicit(1e-5, 200)
    U = layer.map.injection.operator
    expected = F.conv2d(x, U.weight, padding=1) if image else F.linear(x, U.weight)
    plain = layer(x)
    with torch.no_grad():
        U.weight.mul_(2)
        doubled = layer(x)
        U.weight.div_(2)
    handle = U.register_forward_hook(lambda module, args, output: seen.append((args, output)))
    torch.testing.assert_close(layer(x), plain, rtol=0, atol=0)
    ((given,), output), *others = seen
    assert given is x
    assert not others
    assert torch.equal(output, expected)
    handle.remove()
    U.register_forward_hook(lambda module, args, output: 2 * output)
    torch.testing.assert_close(layer(x), doubled, rtol=1e-4, atol=1e-5)


def test_a_hook_that_writes_into_U_x_is_obeyed():
    layer, x = build(False), inputs(False)
    layer.map.injection.operator.register_forward_hook(lambda module, args, output: output.mul_(0))
    with torch.no_grad():
        layer.map.injection.bias.zero_()
    assert not layer(x).any()


def layer_of(case: MapCase) -> EquilibriumLayer:
    return EquilibriumLayer(case.map(), Anderson(1e-12, 2000), Implicit(1e-11, 500), "raise")


def gradients(layer: EquilibriumLayer, x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    z = layer(x)
    value = sum((t * random(*t.shape, seed=i)).sum() for i, t in enumerate(tensors_of(z)))
    return (*tensors_of(z), *torch.autograd.grad(value, (x, *layer.parameters())))


@every_map
def test_full_backward_hooks_everywhere_change_nothing(case: MapCase):
    layer, x, seen = layer_of(case), case.inputs(), []
    expected = gradients(layer, x)
    for module in layer.modules():
        module.register_full_backward_hook(lambda m, given, back: seen.append((m, given, back)))
        module.register_full_backward_pre_hook(lambda m, back: None)
    torch.testing.assert_close(gradients(layer, x), expected, rtol=0, atol=1e-9)
    expected = {layer, *(m for m in layer.modules() if isinstance(m, Injection))}
    assert expected <= {module for module, _, _ in seen}
    for _, given, back in seen:
        assert all(torch.isfinite(g).all() for g in (*given, *back) if g is not None)


@every_map
@pytest.mark.parametrize("grad", [True, False])
def test_what_a_forward_hook_saw_is_not_changed_afterwards(case: MapCase, grad: bool):
    layer, x, seen = layer_of(case), case.inputs(), []
    for module in layer.modules():
        module.register_forward_hook(
            lambda m, args, output: seen.extend((t, t.detach().clone()) for t in tensors_of(output))
        )
    with torch.set_grad_enabled(grad):
        z = layer(x)
    if grad:
        sum(t.square().sum() for t in tensors_of(z)).backward()
    assert len(seen) > 1
    for output, then in seen:
        assert torch.equal(output, then)
