"""Every map gives equations that keep the promises of `Equation` and `Linearization`."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from opteq import OptEqUnit
from opteq.equation import AutogradLinearization, Equation
from opteq.errors import NonFiniteError, ShapeError
from opteq.layer import EquilibriumLayer
from opteq.solvers.picard import Picard
from tests.conformance.instances import COMPOSED_MAPS, ESTIMATED_MAPS, MAPS, MapCase
from tests.conformance.reference import jacobian, matrix_of, random, spectral_norm

BOUNDED = MAPS | COMPOSED_MAPS
EVERY = BOUNDED | ESTIMATED_MAPS
every_map = pytest.mark.parametrize("case", EVERY.values(), ids=EVERY)
every_bounded_map = pytest.mark.parametrize("case", BOUNDED.values(), ids=BOUNDED)
every_single_map = pytest.mark.parametrize("case", MAPS.values(), ids=MAPS)
# Where the proximal step of the penalty is the activation.
GRADIENT_STEPS = {
    name: case
    for name, case in MAPS.items()
    if isinstance(case.map(), OptEqUnit) or case.map().activation.indicator
}
seeds = st.integers(0, 10_000)


def state(equation: Equation, seed: int = 0) -> torch.Tensor:
    return random(*equation.initial().shape, seed=seed)


def apply(matrices: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.bmm(matrices, v.flatten(1)[..., None])[..., 0].reshape(v.shape)


@every_map
@given(seed=seeds)
@settings(max_examples=5)
@pytest.mark.spec("R3.1")
def test_products_with_the_jacobian(case: MapCase, seed: int):
    equation = case.equation(seed).detach()
    z, v = state(equation, seed), state(equation, seed + 1)
    dense = jacobian(equation, z)
    for linearization in (equation.linearize(z), AutogradLinearization(equation, z)):
        torch.testing.assert_close(linearization.jvp(v), apply(dense, v), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(linearization.vjp(v), apply(dense.mT, v), rtol=1e-10, atol=1e-12)


@every_map
@given(seed=seeds)
@settings(max_examples=5)
@pytest.mark.spec("R3.1")
def test_pullback_to_input_and_parameters_is_that_of_autograd(case: MapCase, seed: int):
    module, x = case.map(seed), case.inputs(seed=seed).requires_grad_()
    leaves = (x, *module.parameters())
    equation = module.bind(x)
    z, u = state(equation, seed), state(equation, seed + 1)
    expected = torch.autograd.grad((u * equation(z)).sum(), leaves)
    detached = equation.detach()
    for linearization in (detached.linearize(z), AutogradLinearization(detached, z)):
        attached = module.bind(x)
        gradients = linearization.pullback(u)
        pairs = [(t, g) for t, g in zip(attached.tensors, gradients, strict=True) if t.requires_grad]
        computed = torch.autograd.grad([t for t, _ in pairs], leaves, [g for _, g in pairs])
        for c, e in zip(computed, expected, strict=True):
            torch.testing.assert_close(c, e, rtol=1e-9, atol=1e-12)


@every_map
@given(seed=seeds)
@settings(max_examples=3)
@pytest.mark.spec("R3.1")
def test_pullback_and_product_together_are_those_apart(case: MapCase, seed: int):
    equation = case.equation(seed).detach()
    z, u = state(equation, seed), state(equation, seed + 1)
    linearization = equation.linearize(z)
    gradients, product = linearization.pullback_and_vjp(u)
    torch.testing.assert_close(gradients, linearization.pullback(u), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(product, linearization.vjp(u), rtol=1e-10, atol=1e-12)


@every_map
@given(seed=seeds)
@settings(max_examples=5)
@pytest.mark.spec("R3.1")
def test_the_symmetric_form_solves_the_adjoint_equation(case: MapCase, seed: int):
    equation = case.map(seed).bind(case.inputs(batch=1, seed=seed + 100)).detach()
    z, g = state(equation, seed), state(equation, seed + 1)
    linearization = equation.linearize(z)
    form = linearization.symmetric
    if form is None:
        pytest.skip("has no symmetric form")
    dense = jacobian(equation, z)[0]
    right = form.enter(g)
    symmetric = matrix_of(form.matvec, tuple(right.shape[1:]))
    torch.testing.assert_close(symmetric, symmetric.mT, rtol=0, atol=1e-12)
    if form.metric is not None:
        metric = matrix_of(form.metric, tuple(right.shape[1:]))
        torch.testing.assert_close(metric, metric.mT, rtol=0, atol=1e-12)
        symmetric = symmetric @ metric
    if equation.structure == "proximal":
        torch.testing.assert_close(dense, dense.mT, rtol=0, atol=1e-12)
        assert torch.linalg.eigvalsh(dense).min() >= -1e-13

    def solved(matrix: Tensor, b: Tensor) -> Tensor:
        identity = torch.eye(len(matrix), dtype=torch.float64)
        return torch.linalg.solve(identity - matrix, b.flatten()).reshape(b.shape)

    v, expected = solved(symmetric, right), solved(dense.mT, g)
    torch.testing.assert_close(form.leave(v, g), expected, rtol=1e-9, atol=1e-11)
    if form.pullback is not None:
        gradients = linearization.pullback(expected)
        torch.testing.assert_close(form.pullback(v, g), gradients, rtol=1e-9, atol=1e-11)


@every_bounded_map
@given(seed=seeds)
@settings(max_examples=8)
@pytest.mark.spec("R1.1", "R6.4")
def test_the_contraction_bounds_dominate(case: MapCase, seed: int):
    equation = case.equation(seed).detach()
    z, other = state(equation, seed), 2 * state(equation, seed + 1)
    rise = (equation(z) - equation(other)).flatten(1).norm(dim=1) / (z - other).flatten(1).norm(dim=1)
    everywhere = equation.contraction()
    assert everywhere.kind == "bound"
    assert everywhere.assumptions
    assert everywhere.value.shape == (len(z),)
    assert (everywhere.value >= rise).all()
    here = equation.contraction(z).value
    assert (here >= spectral_norm(jacobian(equation, z))).all()
    assert (here <= everywhere.value).all()


@every_single_map
@pytest.mark.spec("R1.6", "R6.4")
def test_the_ceiling_makes_a_contraction(case: MapCase):
    module = case.map()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # A larger injection would switch a Gaussian kernel with fixed γ off.
            if not name.startswith("injection"):
                parameter.mul_(5)
    equation = module.eval().bind(case.inputs()).detach()
    ceiling = module.activation.lipschitz * module.max_norm**2 / getattr(module, "mu", 1.0)
    assert ceiling < 1
    for seed in range(20):
        norms = spectral_norm(jacobian(equation, 0.3 * state(equation, seed)))
        assert norms.max() <= ceiling * (1 + 1e-4)


@every_map
def test_the_first_iterate_is_the_map_at_the_initial_state(case: MapCase):
    equation = case.equation()
    assert not equation.initial().any()
    torch.testing.assert_close(equation.first_iterate(), equation(equation.initial()), rtol=1e-13, atol=1e-13)


@every_map
def test_energy_is_one_number_per_sample(case: MapCase):
    module, x = case.map().eval(), case.inputs()
    equation = module.bind(x).detach()
    if equation.objective is None:
        pytest.skip("has no scalar objective")
    z = state(equation)
    energy = equation.objective(z)
    assert energy.shape == (len(x),)
    for i in range(len(x)):
        alone = module.bind(x[i : i + 1]).detach()
        torch.testing.assert_close(alone.objective(z[i : i + 1]), energy[i : i + 1], rtol=1e-12, atol=1e-12)


@every_map
def test_equilibria_have_the_least_energy(case: MapCase):
    equation = case.equation().detach()
    if equation.objective is None:
        pytest.skip("has no scalar objective")
    layer = EquilibriumLayer(case.map(), Picard(tol=1e-13, max_steps=2000))
    star = layer.solve(case.inputs(seed=100)).state.detach()
    least = equation.objective(star)
    for seed in range(20):
        other = star + 10.0 ** (-seed % 4) * state(equation, seed)
        assert (equation.objective(other) > least).all()


@every_map
def test_samples_do_not_see_each_other(case: MapCase):
    module, x = case.map().eval(), case.inputs(batch=4)
    equation = module.bind(x)
    z = state(equation)
    alone = torch.cat([module.bind(x[i : i + 1])(z[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(equation(z), alone, rtol=1e-12, atol=1e-13)


@every_map
def test_a_detached_equation_is_the_same_without_a_graph(case: MapCase):
    equation = case.equation()
    z = state(equation)
    detached = equation.detach()
    assert equation(z).requires_grad
    assert not any(t.requires_grad for t in detached.tensors)
    torch.testing.assert_close(detached(z), equation(z).detach(), rtol=0, atol=0)
    torch.testing.assert_close(detached.with_tensors(equation.tensors)(z), equation(z), rtol=0, atol=0)


@every_map
def test_other_tensors_change_the_map(case: MapCase):
    equation = case.equation().detach()
    z = 0.5 * state(equation)
    for index in range(len(equation.tensors)):
        tensors = list(equation.tensors)
        tensors[index] = 1.5 * tensors[index]
        assert not torch.allclose(equation.with_tensors(tuple(tensors))(z), equation(z))


@pytest.mark.parametrize("case", GRADIENT_STEPS.values(), ids=GRADIENT_STEPS)
def test_the_gradient_step_has_the_same_fixed_points(case: MapCase):
    module, x = case.map(), case.inputs()
    equation = module.bind(x).detach()
    star = EquilibriumLayer(module, Picard(tol=1e-13, max_steps=2000))(x).detach()
    form = equation.reformulate(gradient=True)
    assert form.recover is None
    torch.testing.assert_close(form.function(star), star, rtol=1e-11, atol=1e-11)
    # The scale carries the residual of the step to a bound on that of the map.
    z = star + 0.1 * state(equation)
    step = form.function(z) - z
    full = equation(z) - z
    assert (form.scale * step.flatten(1).norm(dim=1) >= full.flatten(1).norm(dim=1) * (1 - 1e-12)).all()


@every_map
def test_copies(case: MapCase):
    module, x = case.map().eval(), case.inputs()
    equation = module.bind(x)
    z = state(equation)
    equation.contraction()
    loaded = case.map(seed=1).eval()
    loaded.bind(x)
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        torch.testing.assert_close(other.bind(x)(z), equation(z), rtol=0, atol=0)


@every_map
def test_certificates_belong_to_the_weights_of_the_equation(case: MapCase):
    # Not to those that the module holds by the time somebody asks.
    module, x = case.map(), case.inputs()
    equation = module.bind(x)
    equation = equation.with_tensors(tuple(t.detach().clone() for t in equation.tensors))
    before = equation.contraction().value
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.1)
    torch.testing.assert_close(equation.contraction().value, before)


@every_map
def test_wrong_inputs_are_named(case: MapCase):
    module = case.map()
    wrong = (case.input[0] + 1, *case.input[1:])
    with pytest.raises(ShapeError, match=r"Expected `x` of shape \(batch, .*got \(2, "):
        module.bind(random(2, *wrong))
    with pytest.raises(ShapeError, match="one tensor, got tuple"):
        module.bind((case.inputs(), case.inputs()))
    x = case.inputs()
    x[1].view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError, match="samples 1;"):
        EquilibriumLayer(module)(x)
