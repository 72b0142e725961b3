"""Faults that users of other equilibrium libraries have run into, one test or more for each.

The numbers are those of a list of reports; 12 (data-parallel training) and 16 (one configuration per
published result) are tested with the training code.
"""

import copy
import dataclasses
import gc
import os
import pickle
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from opteq import (
    Anderson,
    Broyden,
    Conv2d,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    Implicit,
    Nesterov,
    OneStep,
    OptEqUnit,
    Patches,
    Phantom,
    Picard,
    Unrolled,
)
from opteq.equation import Equation
from opteq.errors import ConfigError, ConvergenceError
from opteq.gradients.base import AdjointMethod, GradientMethod
from opteq.layer import solve_log
from opteq.maps.optequnit import OptEqEquation
from opteq.solvers.base import Solver, solve_fixed_point
from opteq.solvers.sam import SAM
from tests.solvers.problems import Affine, Recorder, TwoBranches

SOLVERS = [Picard(), Anderson(), Broyden(), Nesterov()]
GRADIENTS = [
    Implicit(),
    Implicit(method="anderson"),
    Implicit(method="gmres"),
    Phantom(),
    Phantom(form="neumann"),
    OneStep(),
    Unrolled(10),
    Unrolled(10, checkpoint=True),
]
DIRECT = (Unrolled,)
each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
each_gradient = pytest.mark.parametrize("gradient", GRADIENTS, ids=str)


def optequnit():
    return OptEqUnit(Conv2d(3, 4), Conv2d(2, 4), activation="softplus")


def gaussian():
    return GaussianMap(Conv2d(3, 4), Conv2d(2, 4), Patches(2, 2), hidden=6)


each_map = pytest.mark.parametrize("make_map", [optequnit, gaussian])


def make_layer(make_map=optequnit, gradient=None, tol=1e-10, **options):
    """A layer in float64, its weights held at the ceiling of the norm."""
    torch.manual_seed(0)
    equilibrium_map = make_map().double()
    equilibrium_map.W.weight.data *= 4
    solver = None if isinstance(gradient, DIRECT) else Anderson(tol=tol, max_steps=200)
    return EquilibriumLayer(equilibrium_map, solver, gradient, **options)


def images(batch=3, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, 4, 6, generator=generator, dtype=torch.float64).to(dtype)


def all_gradients(layer, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(layer(x).square().sum(), (x, *layer.parameters()))


# 1: options that do not exist


def subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


OPTION_CLASSES = [
    cls for base in (Solver, GradientMethod) for cls in subclasses(base) if dataclasses.is_dataclass(cls)
]


@pytest.mark.parametrize("cls", [*OPTION_CLASSES, Patches])
@pytest.mark.parametrize("name", ["stop_mode", "bogus", "tolerance"])
def test_pitfall_01_an_unknown_option_fails_and_lists_the_valid_ones(cls, name):
    valid = ", ".join(field.name for field in dataclasses.fields(cls))
    with pytest.raises(ConfigError) as error:
        cls(**{name: 3})
    assert str(error.value) == f"{cls.__name__} has no option {name!r}; it has {valid or 'none'}."


# 2 and 3: gradients that do not arrive


@each_map
@each_gradient
def test_pitfall_02_every_gradient_reaches_input_and_parameters(make_map, gradient):
    for value in all_gradients(make_layer(make_map, gradient), images()):
        assert torch.isfinite(value).all()
        assert value.abs().max() > 1e-6


@each_map
@each_gradient
def test_pitfall_03_eval_mode_gives_the_gradients_of_train_mode(make_map, gradient):
    layer = make_layer(make_map, gradient)
    training = all_gradients(layer.train(), images())
    evaluation = all_gradients(layer.eval(), images())
    for a, b in zip(training, evaluation, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_pitfall_03_phantom_steps_do_not_vanish_in_eval_mode():
    few, many = (make_layer(gradient=Phantom(steps=k)).eval() for k in (1, 5))
    assert (all_gradients(few, images())[0] - all_gradients(many, images())[0]).abs().max() > 1e-3


# 4: second derivatives


@pytest.mark.parametrize("gradient", [g for g in GRADIENTS if isinstance(g, AdjointMethod)], ids=str)
def test_pitfall_04_second_derivatives_are_refused_wherever_they_would_be_wrong(gradient):
    layer, x = make_layer(gradient=gradient), images().requires_grad_()
    head = nn.Linear(72, 1).double()
    loss = head(layer(x).flatten(1)).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    penalised = loss + slope.square().sum()
    # Also for the weights behind the layer, which the slope depends on through the cotangent alone.
    for source in (x, layer.map.W.weight, head.weight):
        with pytest.raises(NotImplementedError, match=r"use gradient=Unrolled\(steps\)"):
            torch.autograd.grad(penalised, source, retain_graph=True)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_pitfall_04_second_derivatives_of_an_unrolled_layer_are_right(checkpoint):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(3, 4), Dense(2, 4), activation="softplus", max_norm=None)
    layer = EquilibriumLayer(unit, gradient=Unrolled(6, checkpoint)).double()
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    sources = (x, layer.map.W.weight)
    loss = layer(x).square().sum()
    slopes = torch.autograd.grad(loss, sources, create_graph=True)
    directions = [torch.randn_like(s) for s in sources]
    inner = sum((s * d).sum() for s, d in zip(slopes, directions, strict=True))
    second = torch.autograd.grad(inner, sources)

    def slopes_at(shift):
        with torch.no_grad():
            for source, direction in zip(sources, directions, strict=True):
                source += shift * direction
        values = torch.autograd.grad(layer(x).square().sum(), sources)
        with torch.no_grad():
            for source, direction in zip(sources, directions, strict=True):
                source -= shift * direction
        return values

    for actual, plus, minus in zip(second, slopes_at(1e-5), slopes_at(-1e-5), strict=True):
        torch.testing.assert_close(actual, (plus - minus) / 2e-5, rtol=1e-6, atol=1e-8)


# 5: hooks


@each_gradient
def test_pitfall_05_two_forwards_and_one_backward(gradient):
    layer = make_layer(gradient=gradient)
    x, y = images(seed=1), images(seed=2)
    parameters = tuple(layer.parameters())
    z = layer(x)
    together = torch.autograd.grad(z.square().sum() + layer(y).square().sum(), parameters)
    apart = zip(all_gradients(layer, x)[1:], all_gradients(layer, y)[1:], strict=True)
    for a, (b, c) in zip(together, apart, strict=True):
        torch.testing.assert_close(a, b + c, rtol=1e-7, atol=1e-9)


@each_gradient
def test_pitfall_05_backward_in_any_order_and_never(gradient):
    layer = make_layer(gradient=gradient)
    first, second, _unused = layer(images(seed=1)), layer(images(seed=2)), layer(images(seed=3))
    second.square().sum().backward()
    first.square().sum().backward()
    expected = zip(
        all_gradients(layer, images(seed=1))[1:], all_gradients(layer, images(seed=2))[1:], strict=True
    )
    for parameter, (a, b) in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, a + b, rtol=1e-7, atol=1e-9)


@each_gradient
def test_pitfall_05_there_are_no_tensor_hooks(gradient):
    layer, x = make_layer(gradient=gradient), images().requires_grad_()
    z = layer(x)
    assert not z._backward_hooks
    assert not x._backward_hooks
    assert not any(p._backward_hooks for p in layer.parameters())


# 6: Anderson acceleration


@pytest.mark.parametrize("size", [1e-8, 1e-3, 1e3, 1e8])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_pitfall_06_anderson_does_not_depend_on_the_scale(size, activation):
    # With these activations and no bias the equilibrium is proportional to the input.
    def unit():
        return OptEqUnit(Conv2d(3, 4), Conv2d(2, 4), activation, bias=False)

    layer = make_layer(unit).float()
    layer.solver = Anderson(tol=1e-5, max_steps=100)
    x = images(dtype=torch.float32)
    solution, scaled = layer.solve(x), layer.solve(size * x)
    assert solution.info.converged.all()
    assert scaled.info.converged.all()
    assert (solution.info.steps - scaled.info.steps).abs().max() <= 1
    torch.testing.assert_close(scaled.value / size, solution.value, rtol=1e-3, atol=1e-3)


def test_pitfall_06_singular_systems_are_no_error_and_never_a_frozen_wrong_answer():
    offset = torch.ones(3, 2)

    def parallel(z):  # every residual is parallel to every other
        return z / 2 + offset

    def translation(z):  # every residual is the same
        return z + offset

    def constant(z):  # the second residual is zero
        return offset.clone()

    for function, solvable in ((parallel, True), (translation, False), (constant, True)):
        z, info = solve_fixed_point(function, torch.zeros(3, 2), Anderson(tol=1e-5, max_steps=40))
        assert torch.isfinite(z).all()
        assert info.converged.tolist() == [solvable] * 3
        if solvable:
            torch.testing.assert_close(function(z), z)


def test_pitfall_06_anderson_converges_where_picard_does_on_badly_conditioned_units():
    torch.manual_seed(0)
    for seed in range(20):
        torch.manual_seed(seed)
        unit = OptEqUnit(Dense(12, 16), Dense(4, 16), max_norm=0.9995).double()
        unit.W.weight.data *= 10
        x = torch.randn(4, 4, dtype=torch.float64)
        info = (
            EquilibriumLayer(unit, Anderson(tol=1e-9, max_steps=2000), on_unconverged="count").solve(x).info
        )
        assert info.converged.all()


# 7: options that do nothing


def evaluations(solver):
    problem = Affine.random((0.5, 0.9, 0.99))
    recorder = Recorder(problem)
    solve_fixed_point(recorder, problem.start, solver)
    return torch.cat(recorder.inputs)


def backward_record(gradient):
    """What a gradient method does: its gradients and its Jacobian products."""
    # A loose solve, since at an exact equilibrium both forms of the phantom gradient coincide.
    layer = make_layer(gaussian, gradient, tol=1e-2, on_unconverged="count")
    with solve_log(layer) as log:
        values = all_gradients(layer, images())
    return torch.cat([v.flatten() for v in values]), log.adjoint.evaluations


def saved_bytes(gradient):
    sizes = {}

    def pack(tensor):
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    layer = make_layer(gradient=gradient)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = layer(images().requires_grad_())
    assert output.requires_grad
    return sum(sizes.values())


def allowed_errors(gradient):
    """The rounding errors that a call of the layer allows to products."""
    layer, seen = make_layer(gradient=gradient), []
    bind = layer.map.bind

    def recorded(x, error=0.0):
        seen.append(error)
        return bind(x, error)

    layer.map.bind = recorded
    layer(images())
    return seen


class HalfSquare:
    """`½‖z‖²`."""

    lipschitz = 1.0

    def gradient(self, z):
        return z


SOLVER_CHANGES = [
    (Picard(), {"tol": 1e-2, "max_steps": 7, "damping": 0.5}),
    (Anderson(), {"tol": 1e-2, "max_steps": 4, "memory": 2, "damping": 0.5}),
    (Broyden(), {"tol": 1e-2, "max_steps": 4, "memory": 2}),
    (Nesterov(), {"tol": 1e-2, "max_steps": 7}),
]
GRADIENT_CHANGES = [
    (Implicit(), {"tol": 1e-1, "max_steps": 2, "method": "gmres"}),
    (Phantom(), {"steps": 2, "damping": 0.5, "form": "neumann"}),
    (Phantom(form="neumann"), {"steps": 2, "damping": 0.5}),
    (OneStep(), {}),
    (Unrolled(10), {"steps": 5, "error": 1e-2, "checkpoint": True, "select": SAM(HalfSquare())}),
]


def one_by_one(table):
    return [(base, name, value) for base, changes in table for name, value in changes.items()]


@pytest.mark.parametrize(("base", "name", "value"), one_by_one(SOLVER_CHANGES))
def test_pitfall_07_every_option_of_a_solver_changes_the_run(base, name, value):
    before, after = evaluations(base), evaluations(dataclasses.replace(base, **{name: value}))
    assert before.shape != after.shape or not torch.equal(before, after)


@pytest.mark.parametrize(("base", "name", "value"), one_by_one(GRADIENT_CHANGES))
def test_pitfall_07_every_option_of_a_gradient_changes_the_run(base, name, value):
    changed = dataclasses.replace(base, **{name: value})
    if name == "checkpoint":
        assert saved_bytes(changed) < saved_bytes(base) / 2
        return
    if name == "error":
        # These layers compute in float64, in which no products are rough.
        assert (allowed_errors(base), allowed_errors(changed)) == ([0.0], [value])
        return
    (before, count), (after, new_count) = backward_record(base), backward_record(changed)
    assert count != new_count or not torch.equal(before, after)


def test_pitfall_07_no_option_is_left_out_above():
    tested = defaultdict(set)
    for base, changes in SOLVER_CHANGES + GRADIENT_CHANGES:
        tested[type(base)].update(changes)
    assert tested == {cls: {f.name for f in dataclasses.fields(cls)} for cls in OPTION_CLASSES}


def test_pitfall_07_the_layer_uses_the_solver_and_the_gradient_it_was_given():
    histories = set()
    for solver in SOLVERS:
        layer = make_layer()
        layer.solver = dataclasses.replace(solver, tol=1e-6, max_steps=500)
        histories.add(tuple(layer.solve(images()).info.residuals[0].tolist()))
    assert len(histories) == len(SOLVERS)


# 8 and 9: samples that go wrong


@each_solver
def test_pitfall_08_without_improvement_the_last_finite_iterate_is_returned(solver):
    # T doubles the distance from 1 and leaves the numbers of float32 after some hundred steps.
    def explode(z):
        return z.square() + 1

    z, info = solve_fixed_point(explode, torch.full((2, 3), 2.0), dataclasses.replace(solver, max_steps=300))
    assert torch.isfinite(z).all()
    assert not info.converged.any()


@each_map
@each_solver
def test_pitfall_09_results_do_not_depend_on_the_batch(make_map, solver):
    def relu_map():
        made = make_map()
        return made if make_map is gaussian else OptEqUnit(made.W, made.injection.operator)

    layer = make_layer(relu_map, Implicit(tol=1e-8))
    layer.solver = dataclasses.replace(solver, tol=1e-6, max_steps=500)
    x = images(8)
    x[3] *= 20
    solution = layer.solve(x)
    together = all_gradients(layer, x)[0]
    for i in range(8):
        alone = layer.solve(x[i : i + 1])
        assert alone.info.steps[0] == solution.info.steps[i]
        torch.testing.assert_close(alone.value[0], solution.value[i], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            all_gradients(layer, x[i : i + 1])[0][0], together[i], rtol=1e-6, atol=1e-9
        )


@each_solver
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_pitfall_09_one_bad_sample_spoils_no_other(solver, bad):
    problem = Affine.random((0.5, 0.9, 0.9, 0.5))

    def poisoned(z):
        image = problem(z)
        image[2] = torch.where(image[2].abs().max() > 0.5, bad, image[2])
        return image

    options = dataclasses.replace(solver, tol=1e-8, max_steps=500)
    z, info = solve_fixed_point(poisoned, problem.start, options)
    clean, _ = solve_fixed_point(problem, problem.start, options)
    assert info.converged.tolist() == [True, True, False, True]
    assert torch.equal(z[[0, 1, 3]], clean[[0, 1, 3]])
    assert torch.isfinite(z).all()


# 10: the backward solve


@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
def test_pitfall_10_an_adjoint_that_misses_its_tolerance_is_reported(method):
    gradient = Implicit(tol=1e-9, max_steps=1, method=method)
    layer = make_layer(gradient=gradient, on_unconverged="count")
    with solve_log(layer) as log:
        layer(images()).sum().backward()
    assert log.adjoint.unconverged == log.adjoint.samples == 3
    assert log.adjoint.residual_max > 1e-9

    with pytest.warns(RuntimeWarning, match="The adjoint solve of the backward pass did not reach"):
        make_layer(gradient=gradient)(images()).sum().backward()
    z = make_layer(gradient=gradient, on_unconverged="raise")(images())
    with pytest.raises(ConvergenceError, match="The adjoint solve of the backward pass did not reach"):
        z.sum().backward()


# 11: dense matrices


class LargestTensor(TorchDispatchMode):
    """Notes the number of entries of the largest tensor that any operation makes."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return out


@each_map
@pytest.mark.parametrize("gradient", [g for g in GRADIENTS if isinstance(g, AdjointMethod)], ids=str)
def test_pitfall_11_no_matrix_of_the_size_of_the_jacobian_is_made(make_map, gradient):
    layer = make_layer(make_map, gradient, tol=1e-4).float()
    x = torch.randn(1, 2, 32, 32)
    with LargestTensor() as largest:
        layer(x.requires_grad_()).sum().backward()
    state = 3 * 32 * 32
    # The longest history is that of GMRES: one vector for each of at most 60 steps.
    assert largest.entries <= 61 * state
    assert largest.entries < state**2 / 50


# 13: the norm of a convolution


def dense_jacobian(equation, state):
    size = state.numel()
    jacobian = torch.autograd.functional.jacobian(lambda z: equation(z), state)
    return jacobian.reshape(size, size)


@pytest.mark.parametrize("training", [False, True])
def test_pitfall_13_the_ceiling_holds_for_the_operator_and_from_the_first_call(training):
    operator = Conv2d(1, 1, 3)
    # The kernel reshaped to a matrix has norm 1; on an image the convolution has nearly norm 3.
    operator.weight.data.fill_(1 / 3)
    unit = OptEqUnit(operator, Conv2d(1, 1, 3), activation="identity", max_norm=0.9).double().train(training)
    assert torch.linalg.matrix_norm(operator.weight.detach().flatten(1), 2) == pytest.approx(1)
    equation = unit.bind(torch.randn(1, 1, 8, 8, dtype=torch.float64)).detach()
    jacobian = dense_jacobian(equation, torch.zeros(1, 1, 8, 8, dtype=torch.float64))
    # J = WᵀW for the identity, so its norm is that of W squared.
    assert torch.linalg.matrix_norm(jacobian, 2) == pytest.approx(0.81, rel=1e-3)


# 14: half precision


@each_solver
@pytest.mark.parametrize(("dtype", "tol"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_pitfall_14_solvers_run_on_half_precision_states(solver, dtype, tol):
    problem = Affine.random((0.5, 0.8), dtype=dtype)
    z, info = solve_fixed_point(problem, problem.start, dataclasses.replace(solver, tol=tol))
    assert z.dtype == dtype
    assert info.converged.all()
    wide = Affine(problem.matrix.double(), problem.offset.double())
    residual = (wide(z.double()) - z.double()).norm(dim=1) / wide(z.double()).norm(dim=1)
    assert (residual <= 1.5 * tol).all()


@each_map
@pytest.mark.parametrize(
    "gradient", [Implicit(tol=1e-3), Implicit(tol=1e-3, method="gmres"), Phantom(), OneStep()]
)
def test_pitfall_14_training_under_autocast_is_close_to_float32(make_map, gradient):
    layer = make_layer(make_map, gradient, tol=1e-2).float()
    x = images(dtype=torch.float32)
    expected_z, expected = layer(x), all_gradients(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        z, actual = layer(x), all_gradients(layer, x)
    assert z.dtype == torch.float32
    assert not torch.equal(z, expected_z)
    torch.testing.assert_close(z, expected_z, rtol=0, atol=0.05 * expected_z.abs().max().item())
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= 0.1 * b.norm()


@pytest.mark.parametrize("gradient", [Implicit(), Implicit(method="gmres"), Phantom(), OneStep()], ids=str)
def test_pitfall_14_the_backward_pass_keeps_full_precision_inside_autocast(gradient):
    layer = make_layer(gradient=gradient, tol=1e-2).float()
    parameters = tuple(layer.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(images(dtype=torch.float32)).square().sum()
        inside = torch.autograd.grad(loss, parameters, retain_graph=True)
    for a, b in zip(inside, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.equal(a, b)


@each_map
@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
def test_pitfall_14_a_model_in_bfloat16_trains(make_map, method):
    layer = make_layer(make_map, Implicit(tol=0.1, method=method), tol=0.1).bfloat16()
    for value in all_gradients(layer, images(dtype=torch.bfloat16)):
        assert value.dtype == torch.bfloat16
        assert torch.isfinite(value).all()
        assert value.abs().max() > 0


# 15: copies and second backward passes


@each_map
@each_gradient
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_pitfall_15_a_used_layer_can_be_copied_and_trains_on(make_map, gradient, make_copy):
    layer = make_layer(make_map, gradient).eval()
    layer(images()).sum().backward()
    twin = make_copy(layer)
    for a, b in zip(all_gradients(twin, images()), all_gradients(layer, images()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@each_map
def test_pitfall_15_a_state_dict_restores_the_model(make_map):
    layer = make_layer(make_map).eval()
    layer(images())
    other = EquilibriumLayer(make_map(), layer.solver).double().eval()
    other(images())
    other.load_state_dict(layer.state_dict(), strict=True)
    torch.testing.assert_close(other(images()), layer(images()), rtol=0, atol=1e-9)


@each_gradient
def test_pitfall_15_backward_again_needs_no_reset(gradient):
    layer = make_layer(gradient=gradient)
    for _ in range(2):
        layer.zero_grad()
        layer(images()).square().sum().backward()
        loss = layer(images()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    once = all_gradients(layer, images())[1:]
    for parameter, expected in zip(layer.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * expected, rtol=1e-7, atol=1e-9)


# 17: states of several tensors


@each_solver
def test_pitfall_17_every_solver_takes_a_state_of_several_tensors(solver):
    torch.manual_seed(0)
    layer = EquilibriumLayer(TwoBranches(), dataclasses.replace(solver, tol=1e-10, max_steps=1000))
    x = torch.randn(4, 6, dtype=torch.float64)
    z = layer(x)
    assert [tuple(branch.shape) for branch in z] == [(4, 3), (4, 2, 2, 2)]
    for branch, image in zip(z, layer.bind(x)(z), strict=True):
        torch.testing.assert_close(image, branch, rtol=0, atol=1e-8)


@each_gradient
def test_pitfall_17_every_gradient_takes_a_state_of_several_tensors(gradient):
    torch.manual_seed(0)
    solver = None if isinstance(gradient, DIRECT) else Anderson(tol=1e-10, max_steps=200)
    layer = EquilibriumLayer(TwoBranches(), solver, gradient)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    sum(branch.square().sum() for branch in layer(x)).backward()
    assert all(t.grad.abs().max() > 1e-6 for t in (x, *layer.parameters()))


# 18: a way out


def test_pitfall_18_the_message_names_the_switch_and_the_switch_works():
    def borderline():
        # ‖W‖ = 1 and the identity: I - J is singular, and the adjoint equation has no solution.
        unit = OptEqUnit(Dense(3, 3), Dense(3, 3), activation="identity", max_norm=None)
        unit.W.weight.data.copy_(torch.eye(3))
        return unit.double()

    x = torch.randn(2, 3, dtype=torch.float64)
    layer = EquilibriumLayer(borderline(), Anderson(tol=1.0), Implicit())
    z = layer(x)
    with pytest.warns(RuntimeWarning, match=r"or switch to gradient=Unrolled\(steps\)"):
        z.sum().backward()

    unrolled = EquilibriumLayer(borderline(), gradient=Unrolled(5))
    leaf = x.clone().requires_grad_()
    unrolled(leaf).sum().backward()
    # z = Σ_{k<5} (U x), so that every gradient is five times that of U x.
    weight = unrolled.map.injection.operator.weight
    torch.testing.assert_close(leaf.grad, 5 * weight.sum(0).expand(2, 3))


# 19: leaks


def live_tensors():
    # Not isinstance, which asks lazily loaded modules for their class and makes them load.
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("make_map", "shape", "gradient"),
    [
        (optequnit, (2, 2, 4, 6), Implicit()),
        (gaussian, (2, 2, 4, 6), Implicit()),
        (TwoBranches, (2, 6), Implicit()),  # differentiates by autograd inside the backward pass
        (TwoBranches, (2, 6), Phantom()),
    ],
)
def test_pitfall_19_200_steps_of_training_leave_no_tensor_behind(make_map, shape, gradient):
    layer = EquilibriumLayer(make_map().double(), Anderson(tol=1e-2), gradient, "count")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    x = torch.randn(shape, dtype=torch.float64)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            z = layer(x)
            sum(branch.square().mean() for branch in (z if isinstance(z, tuple) else (z,))).backward()
            optimizer.step()

    train(20)
    gc.collect()
    before = live_tensors()
    gc.disable()  # what waits for the cyclic collector is behind as well
    try:
        train(200)
        assert live_tensors() == before
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
@pytest.mark.parametrize("gradient", [Implicit(tol=1e-1), Phantom(steps=2), Unrolled(3)], ids=str)
@pytest.mark.parametrize("closed_form", [True, False])
def test_pitfall_19_memory_does_not_grow(gradient, closed_form, monkeypatch):
    if not closed_form:
        monkeypatch.setattr(OptEqEquation, "linearize", Equation.linearize)
    solver = None if isinstance(gradient, DIRECT) else Anderson(tol=1e-1)
    layer = EquilibriumLayer(OptEqUnit(Dense(512, 8), Dense(4, 8)), solver, gradient, "count")
    x = torch.randn(512, 4)
    state_bytes = 512 * 512 * 4

    def train(steps):
        for _ in range(steps):
            layer.zero_grad()
            layer(x).square().mean().backward()

    train(20)
    gc.collect()
    before = resident_bytes()
    train(200)
    gc.collect()
    assert resident_bytes() - before < 60 * state_bytes
