"""Every gradient method on every map, against methods and formulas that share no code with it."""

import copy
import gc
import weakref
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from opteq import Anderson, EquilibriumLayer, Implicit, OneStep, Phantom, Unrolled
from opteq.equation import Equation
from opteq.gradients.base import AdjointMethod, DirectMethod, GradientMethod
from tests.conformance.instances import COMPOSED_MAPS, ESTIMATED_MAPS, MAPS, MapCase
from tests.conformance.reference import jacobian, random

# A chain of three has no symmetric form for conjugate gradients; see the tests of deep maps.
CASES = MAPS | ESTIMATED_MAPS | {name: case for name, case in COMPOSED_MAPS.items() if name != "deep-three"}
every_map = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_mode = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
METHODS = {
    "implicit": Implicit(tol=1e-12, max_steps=500),
    "implicit-cg": Implicit(tol=1e-12, max_steps=500, method="cg"),
    "implicit-anderson": Implicit(tol=1e-12, max_steps=500, method="anderson"),
    "implicit-gmres": Implicit(tol=1e-12, max_steps=500, method="gmres"),
    "phantom": Phantom(),
    "phantom-neumann": Phantom(form="neumann"),
    "onestep": OneStep(),
    "unrolled": Unrolled(20),
    "unrolled-checkpoint": Unrolled(20, checkpoint=True),
}
IMPLICIT = {name: method for name, method in METHODS.items() if isinstance(method, Implicit)}
ADJOINT = {name: method for name, method in METHODS.items() if isinstance(method, AdjointMethod)}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def layer_of(
    case: MapCase, method: GradientMethod, training: bool = False, tol: float = 1e-13
) -> EquilibriumLayer:
    solver = None if isinstance(method, DirectMethod) else Anderson(tol, max_steps=2000)
    return EquilibriumLayer(case.map(), solver, method).train(training)


def gradients(layer: EquilibriumLayer, x: Tensor, seed: int = 7) -> list[Tensor]:
    """Gradients of a random linear functional of the equilibrium to the input and every parameter."""
    x = x.clone().requires_grad_()
    z = layer(x)
    cotangent = random(*z.shape, seed=seed).to(z.dtype)
    return list(torch.autograd.grad((z * cotangent).sum(), [x, *layer.parameters()]))


@cache
def unrolled_gradients(case: MapCase, training: bool) -> list[Tensor]:
    """Those of 250 iterations, computed once for all that are compared with them."""
    return gradients(layer_of(case, Unrolled(250), training), case.inputs())


def assert_equal(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@every_map
@every_method
def test_a_step_leaves_no_tensor_to_the_cyclic_collector(case: MapCase, method: GradientMethod):
    layer, x = layer_of(case, method, tol=1e-3), case.inputs()
    gradients(layer, x)  # what is made once
    gc.disable()
    gc.freeze()  # what is there already would take long to search
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gradients(layer, x)
        gc.collect()
        assert not [item for item in gc.garbage if isinstance(item, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


@every_map
@pytest.mark.parametrize("method", ADJOINT.values(), ids=ADJOINT)
def test_a_backward_pass_lets_go_of_the_equation_though_the_loss_is_kept(
    case: MapCase, method: AdjointMethod, monkeypatch: pytest.MonkeyPatch
):
    layer, x = layer_of(case, method, tol=1e-3), case.inputs().requires_grad_()
    detach, used = Equation.detach, []

    def observed(equation: Equation) -> Equation:
        detached = detach(equation)
        used.extend(weakref.ref(t) for t in detached.tensors)
        return detached

    monkeypatch.setattr(Equation, "detach", observed)
    loss = layer(x).sum()
    loss.backward()
    assert used
    assert not any(reference() is not None for reference in used)


@every_map
@pytest.mark.parametrize("method", ADJOINT.values(), ids=ADJOINT)
def test_gradients_where_autograd_recomputes_or_moves_what_it_saves(case: MapCase, method: AdjointMethod):
    layer, x = layer_of(case, method, tol=1e-3), case.inputs().requires_grad_()
    leaves = (x, *layer.parameters())
    expected = torch.autograd.grad(layer(x).sum(), leaves)
    again = checkpoint(layer, x, use_reentrant=False)
    assert_equal(list(torch.autograd.grad(again.sum(), leaves)), list(expected), 0)
    with torch.autograd.graph.saved_tensors_hooks(Tensor.numpy, torch.from_numpy):
        loss = layer(x).sum()
    assert_equal(list(torch.autograd.grad(loss, leaves)), list(expected), 0)


@every_map
@every_mode
@pytest.mark.parametrize("method", IMPLICIT.values(), ids=IMPLICIT)
@pytest.mark.spec("R3.1", "R3.2")
def test_implicit_is_unrolled(case: MapCase, method: Implicit, training: bool):
    found = gradients(layer_of(case, method, training), case.inputs())
    assert_equal(found, unrolled_gradients(case, training), 1e-9)


@every_map
@pytest.mark.spec("R3.1")
def test_implicit_passes_gradcheck(case: MapCase):
    layer = layer_of(case, Implicit(tol=1e-13, max_steps=500))
    names, parameters = zip(*layer.named_parameters(), strict=True)
    inputs = [t.detach().clone().requires_grad_() for t in (case.inputs(batch=2), *parameters)]

    def function(x, *values):
        # Each evaluation on its own: nothing may be carried over from one to the next.
        return functional_call(copy.deepcopy(layer), dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-6, rtol=1e-5, fast_mode=True)


def explicit(case: MapCase, weights: list[float], damping: float) -> list[Tensor]:
    """Gradients with adjoint `u = Σ_i w_i ((1-λ)I + λJᵀ)ⁱ g`, `J` dense."""
    layer = layer_of(case, OneStep())
    x = case.inputs().requires_grad_()
    equation = layer.map.bind(x)
    state = layer.solve(x).state.detach()
    # What is read out depends on the state, and on the input and the parameters besides.
    z = state.clone().requires_grad_()
    value = equation.readout(z)
    cotangent = random(*value.shape, seed=7)
    own = torch.autograd.grad(
        value,
        [z, x, *layer.parameters()],
        cotangent,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    g, z = own[0], state
    dense = jacobian(equation.detach(), z)
    step = (1 - damping) * torch.eye(dense.shape[1], dtype=dense.dtype) + damping * dense.mT
    term, u = g.flatten(1)[..., None], torch.zeros_like(g.flatten(1))[..., None]
    for weight in weights:
        u = u + weight * term
        term = step @ term
    through = torch.autograd.grad(equation(z), [x, *layer.parameters()], u.reshape(z.shape))
    return [a + b for a, b in zip(through, own[1:], strict=True)]


@every_map
@pytest.mark.parametrize("form", ["unroll", "neumann"])
@pytest.mark.parametrize(("steps", "damping"), [(5, 0.8), (1, 0.5), (3, 1.0)])
@pytest.mark.spec("R3.3")
def test_phantom_is_its_series(case: MapCase, form: str, steps: int, damping: float):
    # At the equilibrium itself every damped step has the same Jacobian, so both forms agree.
    computed = gradients(layer_of(case, Phantom(steps, damping, form)), case.inputs())
    assert_equal(computed, explicit(case, [damping] * steps, damping), 1e-9)


@every_map
@pytest.mark.spec("R3.4")
def test_onestep_differentiates_one_application(case: MapCase):
    assert_equal(gradients(layer_of(case, OneStep()), case.inputs()), explicit(case, [1.0], 1.0), 1e-10)


@every_map
@pytest.mark.spec("R3.3")
def test_many_phantom_steps_tend_to_the_implicit_gradient(case: MapCase):
    x = case.inputs()
    expected = gradients(layer_of(case, Implicit(tol=1e-12, max_steps=500)), x)
    assert_equal(gradients(layer_of(case, Phantom(steps=250, damping=1.0)), x), expected, 1e-8)


@every_map
@every_mode
@pytest.mark.spec("R3.2")
def test_checkpointing_changes_nothing(case: MapCase, training: bool):
    x = case.inputs()
    plain = layer_of(case, Unrolled(6), training)
    checkpointed = layer_of(case, Unrolled(6, checkpoint=True), training)
    torch.testing.assert_close(checkpointed(x), plain(x), rtol=0, atol=0)
    assert_equal(gradients(checkpointed, x), gradients(plain, x), 1e-13)


@every_map
@pytest.mark.spec("R3.2")
def test_unrolled_is_the_plain_iteration(case: MapCase):
    equation = layer_of(case, OneStep()).map.bind(case.inputs())
    z = equation.initial()
    for _ in range(4):
        z = equation(z)
    value = equation.readout(z)
    torch.testing.assert_close(layer_of(case, Unrolled(4))(case.inputs()), value, rtol=1e-12, atol=1e-13)


@every_map
@every_method
@every_mode
def test_every_method_reaches_input_and_parameters(case: MapCase, method: GradientMethod, training: bool):
    for gradient in gradients(layer_of(case, method, training, tol=1e-3), case.inputs()):
        assert torch.isfinite(gradient).all()
        assert gradient.any()


@every_map
@every_method
def test_an_input_without_gradient_does_not_stop_those_of_the_parameters(case, method):
    layer = layer_of(case, method)
    layer(case.inputs()).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())


@every_map
@every_method
def test_frozen_parameters_do_not_stop_the_gradient_of_the_input(case, method):
    layer = layer_of(case, method).requires_grad_(False)
    x = case.inputs().requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()


@every_map
@every_method
def test_samples_have_their_own_gradients(case, method):
    x = case.inputs(batch=3)

    def of(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(layer_of(case, method)(x).sum(), x)[0]

    alone = torch.cat([of(x[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(of(x), alone, rtol=1e-8, atol=1e-9)


@every_map
@every_method
def test_without_grad_there_is_no_graph(case, method):
    with torch.no_grad():
        assert not layer_of(case, method)(case.inputs()).requires_grad


@every_map
@pytest.mark.parametrize("method", ADJOINT.values(), ids=ADJOINT)
def test_second_derivatives_are_refused(case, method):
    layer = layer_of(case, method)
    x = case.inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"Unrolled\(steps\)"):
        gradient.sum().backward()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", ["unit-conv-tanh", "unit-mu", "gaussian-plain", "gaussian-plain-adaptive"])
@pytest.mark.spec("R3.2")
def test_second_derivatives_of_unrolled(name: str, checkpoint: bool):
    case = MAPS[name]
    layer = layer_of(case, Unrolled(3, checkpoint))
    layer.map.max_norm = None  # the derivative of the constraint exists once
    names, parameters = zip(*layer.named_parameters(), strict=True)
    inputs = [t.detach().clone().requires_grad_() for t in (case.inputs(batch=1), *parameters)]

    def function(x, *values):
        return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-6, rtol=1e-4, fast_mode=True)


def test_second_derivatives_through_the_norm_constraint():
    layer = layer_of(MAPS["unit-constrained"], Unrolled(5))
    x = MAPS["unit-constrained"].inputs().requires_grad_()

    def slope(x):
        return torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)[0]

    # A gradient penalty on the input needs no more than the first derivative of the constraint ...
    (weight,) = layer.map.W.weights
    penalty = torch.autograd.grad(slope(x).square().sum(), weight)[0]
    direction, step = random(*weight.shape), 1e-5
    values = []
    for sign in (1, -1):
        moved = copy.deepcopy(layer)
        with torch.no_grad():
            moved.map.W.weights[0].add_(sign * step * direction)
        y = x.detach().requires_grad_()
        values.append(torch.autograd.grad(moved(y).square().sum(), y)[0].square().sum().item())
    difference = (values[0] - values[1]) / (2 * step)
    assert (penalty * direction).sum().item() == pytest.approx(difference, rel=1e-6)
    # ... a second derivative by the weights needs the second, which is refused.
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="max_norm=None"):
        gradient.sum().backward()
