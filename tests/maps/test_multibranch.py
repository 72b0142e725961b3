"""Coupled branches: objective, equilibria, sweeps, gradients and perturbations."""

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from opteq import (
    Anderson,
    AveragePool,
    Compose,
    Conv2d,
    Dense,
    EquilibriumLayer,
    HeritageDiversity,
    Implicit,
    MOptEq,
    OneStep,
    OptEqUnit,
    Parallel,
    Phantom,
    Picard,
    Unrolled,
)
from opteq.errors import ConfigError, ShapeError
from opteq.maps.multibranch import MultiBranchEquation
from opteq.results import map_state, tensors_of
from opteq.solvers.base import solve_fixed_point
from opteq.theory.certificates import certify
from tests.conformance.instances import seeded
from tests.conformance.reference import random
from tests.maps.branches import branch_units, ring_objective, single_view, sweep_gradients

EXACT = Anderson(tol=1e-12, max_steps=500)
SIZES = {
    "two": ((4, 4), (3, 5)),
    "three": ((4, 4, 4), (4, 3, 5)),
    "two-scales": ((4, 2), (3, 4)),
    "scales": ((8, 4, 2, 2), (2, 3, 4, 3)),
}
every_size = pytest.mark.parametrize(("sizes", "mids"), SIZES.values(), ids=SIZES)


def model(sizes, mids, activation="relu", **options) -> MOptEq:
    """Three channels, a coupling strong enough to matter, `q = .64·1.4`."""
    sweep = options.pop("sweep", "jacobi")
    coupling = HeritageDiversity(**({"weight": 0.2, "tau": 0.02} | options))
    return MOptEq(branch_units(sizes, 3, mids, activation), coupling, sweep)


def inputs(sizes, channels: int = 3, batch: int = 2, seed: int = 0) -> Tensor:
    return 2 * random(batch, channels, sizes[0], sizes[0], seed=seed)


def solved(module: MOptEq, x: Tensor, solver=EXACT) -> tuple[MultiBranchEquation, tuple[Tensor, ...]]:
    equation = module.bind(x).detach()
    assert isinstance(equation, MultiBranchEquation)
    z = EquilibriumLayer(module, solver, on_unconverged="raise")(x)
    return equation, tuple(t.detach() for t in tensors_of(z))


def hidden(equation: MultiBranchEquation, z: tuple[Tensor, ...]) -> list[Tensor]:
    """`y_i = σ(W_i h_i(z) + c_i)`, with `h` from the naive objective."""
    z = tuple(t.detach().requires_grad_() for t in z)
    value = ring_objective(z, equation.coupling.options.weight, equation.coupling.width)
    h = [-0.5 * slope for slope in torch.autograd.grad(value.sum(), z)]
    pairs = zip(equation.branches.branches, h, strict=True)
    return [unit.activation(unit.preactivation(a)).detach() for unit, a in pairs]


def objective(equation: MultiBranchEquation, y: list[Tensor]) -> Tensor:
    """Equation 5 of the paper in `y`, with penalties."""
    total, z = torch.zeros(len(y[0]), dtype=y[0].dtype), []
    for unit, v in zip(equation.branches.branches, y, strict=True):
        terms = unit.activation.penalty(v) + 0.5 * v.square() - unit.injection * v
        total = total + terms.flatten(1).sum(1)
        z.append(unit.W.adjoint(v))
    return total + 0.5 * ring_objective(z, equation.coupling.options.weight, equation.coupling.width)


@every_size
@pytest.mark.spec("R5.3")
def test_the_map_is_the_formula(sizes, mids):
    module, x = model(sizes, mids), inputs(sizes)
    equation = module.bind(x).detach()
    z = map_state(lambda t: random(*t.shape, seed=t.shape[2]), equation.initial())
    units = zip(equation.branches.branches, hidden(equation, z), strict=True)
    expected = [unit.W.adjoint(y) for unit, y in units]
    for a, b in zip(equation(z), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@every_size
@pytest.mark.parametrize("activation", ["tanh", "softplus"])
@pytest.mark.spec("R5.3")
def test_equilibria_are_stationary(sizes, mids, activation):
    equation, z = solved(model(sizes, mids, activation), inputs(sizes))
    y = [v.requires_grad_() for v in hidden(equation, z)]
    value = objective(equation, y)
    torch.testing.assert_close(equation.objective(z), value.detach(), rtol=1e-10, atol=1e-10)
    for slope in torch.autograd.grad(value.sum(), y):
        assert slope.abs().max() < 1e-9
    # ... which other points are not.
    other = [(0.9 * v.detach()).requires_grad_() for v in y]
    slopes = torch.autograd.grad(objective(equation, other).sum(), other)
    assert max(slope.abs().max() for slope in slopes) > 1e-2


@every_size
@pytest.mark.spec("R5.3")
def test_equilibria_with_relu_meet_the_optimality_conditions(sizes, mids):
    equation, z = solved(model(sizes, mids), inputs(sizes))
    y = [v.requires_grad_() for v in hidden(equation, z)]
    slopes = torch.autograd.grad(objective(equation, y).sum(), y)
    for v, slope in zip(y, slopes, strict=True):
        assert (v == 0).any()
        assert (v > 0).any()
        assert slope[v > 0].abs().max() < 1e-9
        assert (slope[v == 0] > -1e-9).all()


@every_size
@pytest.mark.spec("R5.3")
def test_the_energy_is_the_objective_at_the_feasible_point(sizes, mids):
    equation, _ = solved(model(sizes, mids, "softplus"), inputs(sizes))
    z = map_state(lambda t: random(*t.shape, seed=t.shape[2]), equation.initial())
    expected = objective(equation, hidden(equation, tensors_of(z)))
    torch.testing.assert_close(equation.objective(z), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("solver", [Anderson(1e-10, 200), Picard(1e-10, 200)], ids=repr)
@pytest.mark.spec("R5.2", "R5.5")
def test_convergence_from_anywhere(seed: int, solver):
    module = single_view(seed)
    x = random(2, 32, 4, 4, seed=seed).relu()
    equation = module.bind(x).detach()
    found = []
    for start in range(3):
        z = map_state(lambda t, start=start: start * random(*t.shape, seed=start), equation.initial())
        state, info = solve_fixed_point(equation, z, solver)
        assert info.converged.all()
        found.append(state)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@pytest.mark.spec("R5.2", "R5.5")
@pytest.mark.parametrize("max_norm", [0.8, 0.97])
def test_a_steep_diversity_keeps_no_sample_from_its_equilibrium(max_norm: float):
    """With λ = 0.1 and τ = 0.001 the Jacobian has eigenvalues down to about -40: plain steps lead away."""
    units = [
        seeded(lambda: OptEqUnit(Dense(5, 8), Dense(6, 8), max_norm=max_norm).double(), seed)
        for seed in range(3)
    ]
    module = MOptEq(units, HeritageDiversity(0.1)).eval()
    module.uniqueness_checked = True
    equation = module.bind(random(64, 6)).detach()
    z, info = solve_fixed_point(equation, equation.initial(), Anderson(1e-10, 600))
    assert info.converged.all()
    # z_i = W_iᵀ relu(W_i h_i + c_i) with h = -½∇(λD_τ - H) by hand: N = z_i z_jᵀ between channels.
    width = 1e-3 * torch.stack([t.square().sum(1) for t in equation.first_iterate()]).mean(0)[:, None, None]
    z = tensors_of(z)
    for i, unit in enumerate(equation.units):
        h = torch.zeros_like(z[i])
        for other in (z[i - 1], z[(i + 1) % 3]):
            products = z[i][:, :, None] * other[:, None]
            slope = 0.1 * (products / width).clamp(-1, 1) * (1 - torch.eye(5, dtype=torch.float64))
            h += 0.5 * (other - (slope * other[:, None]).sum(2))
        W = unit.W.tensors[0]
        expected = (h @ W.mT + unit.injection).relu() @ W
        torch.testing.assert_close(z[i], expected, rtol=0, atol=1e-9)


@pytest.mark.spec("R5.2")
def test_the_hard_sign_stalls():
    x = random(2, 32, 4, 4).relu()
    with pytest.warns(RuntimeWarning, match="no fixed point.*positive `tau`"):
        module = single_view(tau=0.0)
    equation = module.bind(x).detach()
    _, info = solve_fixed_point(equation, equation.first_iterate(), Anderson(1e-10, 300))
    assert (info.residuals.nan_to_num(1.0).amin(1) > 1e-6).all()


@every_size
@pytest.mark.spec("R5.3")
def test_both_sweeps_reach_the_same_equilibrium(sizes, mids):
    x = inputs(sizes)
    jacobi, z = solved(model(sizes, mids), x)
    sweep, other = solved(model(sizes, mids, sweep="gauss-seidel"), x)
    for a, b in zip(z, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    # On the way there they differ: the second branch already hears of the new first one.
    start = jacobi.first_iterate()
    first, second = jacobi(start), sweep(start)
    torch.testing.assert_close(first[0], second[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(first[1], second[1])
    mixed = (first[0], *start[1:])
    torch.testing.assert_close(second[1], jacobi(mixed)[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sweep.first_iterate()[1], sweep(sweep.initial())[1], rtol=0, atol=0)


def test_a_start_that_is_known_stays_known_when_cut_off_and_goes_with_its_tensors():
    equation = model((4, 2), (3, 3)).bind(inputs((4, 2)))
    assert isinstance(equation, MultiBranchEquation)
    cut = equation.detach()
    for a, b in zip(cut.first_iterate(), equation.first_iterate(), strict=True):
        assert a.data_ptr() == b.data_ptr()
        assert not a.requires_grad
    assert cut.with_tensors(cut.tensors).start is None


def gradients(module: MOptEq, x: Tensor, method, solver=None) -> list[Tensor]:
    layer = EquilibriumLayer(module, solver, method, on_unconverged="raise")
    x = x.clone().requires_grad_()
    value = sum((z * random(*z.shape, seed=i)).sum() for i, z in enumerate(layer(x)))
    return list(torch.autograd.grad(value, [x, *module.parameters()]))


@pytest.mark.parametrize("sweep", ["jacobi", "gauss-seidel"])
@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
@pytest.mark.spec("R3.1", "R5.3")
def test_implicit_is_unrolled(sweep: str, method: str):
    sizes, mids = SIZES["scales"]
    module, x = model(sizes, mids, sweep=sweep), inputs(sizes)
    implicit = gradients(module, x, Implicit(1e-12, 300, method), EXACT)
    for a, b in zip(implicit, gradients(module, x, Unrolled(200)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.spec("R3.1", "R5.3")
def test_implicit_is_unrolled_for_the_small_model():
    module, x = single_view(), random(2, 32, 4, 4).relu()
    implicit = gradients(module, x, Implicit(1e-11, 300), EXACT)
    for a, b in zip(implicit, gradients(module, x, Unrolled(60)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("sweep", ["jacobi", "gauss-seidel"])
@pytest.mark.parametrize("method", [OneStep(), Phantom(), Phantom(form="neumann")], ids=repr)
@pytest.mark.spec("R3.3", "R3.4")
def test_cheap_gradients_point_the_right_way(sweep: str, method):
    sizes, mids = SIZES["two-scales"]
    module, x = model(sizes, mids, "tanh", sweep=sweep), inputs(sizes)
    exact = gradients(module, x, Implicit(1e-12, 300), EXACT)
    for a, b in zip(gradients(module, x, method, EXACT), exact, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.8


@pytest.mark.spec("R3.3", "R3.4", "R5.3")
def test_cheap_gradients_of_a_sweep_are_those_of_the_whole_sweep():
    module, x = model(*SIZES["two-scales"], "tanh", sweep="gauss-seidel"), inputs(SIZES["two-scales"][0])
    x.requires_grad_()
    one, two = sweep_gradients(module.bind(x), solved(module, x)[1], [x, *module.parameters()], 0.8)
    for method, expected in ((OneStep(), one), (Phantom(2, 0.8, "neumann"), two)):
        for a, b in zip(gradients(module, x, method, EXACT), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.spec("R5.5")
def test_uniqueness_is_the_formula():
    units = [
        seeded(lambda: OptEqUnit(Conv2d(3, 4), Conv2d(3, 4), "sigmoid", mu=0.5, max_norm=None), 1),
        seeded(lambda: OptEqUnit(Conv2d(3, 4), Conv2d(3, 4), "tanh", max_norm=0.6), 2),
    ]
    module = MOptEq(units, HeritageDiversity(0.2)).eval()
    with torch.no_grad():
        for unit, norm in zip(units, (0.7, 2.0), strict=True):
            unit.W.weights[0].mul_(norm / unit.W.norm((3, 4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        equation = module.bind(inputs((4, 4)))
    expected = max(0.25 * 0.7**2 / 0.5, 0.6**2) * (1 + 0.2 * 2)
    assert module.check_uniqueness(equation.initial()) == pytest.approx(expected, rel=1e-9)
    assert equation.uniqueness().kind == "bound"
    assert (equation.uniqueness().value >= expected).all()
    assert equation.uniqueness().value.tolist() == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.spec("R5.5")
def test_the_warning_says_what_to_do():
    units = branch_units((4, 4), 3, (3, 3), max_norm=0.97)
    module = MOptEq(units, HeritageDiversity(0.5))
    with pytest.warns(
        RuntimeWarning, match=r"= 1\.88 is not below 1, with λ = 0\.5 and C = 3: .* below 0\.707"
    ):
        module.bind(inputs((4, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.bind(inputs((4, 4)))  # said once
        MOptEq(branch_units((4, 4), 3, (3, 3), max_norm=0.7), HeritageDiversity(0.5)).bind(inputs((4, 4)))


@every_size
@pytest.mark.parametrize("tau", [0.2, 1e-3])
@pytest.mark.spec("R5.5")
def test_the_distance_bound_holds(sizes, mids, tau):
    module = model(sizes, mids, tau=tau)
    equation, star = solved(module, inputs(sizes))
    assert (equation.uniqueness().value < 1).all()
    for scale in (0.0, 1e-6, 1e-2, 1.0):
        z = tuple(t + scale * random(*t.shape, seed=t.shape[2]) for t in star)
        distance = sum((a - b).square().sum((1, 2, 3)) for a, b in zip(z, star, strict=True)).sqrt()
        bound = equation.distance_bound(z)
        assert bound.kind == "bound"
        assert (bound.value >= distance).all()
        assert (bound.value < 1e-8 if scale == 0 else torch.isfinite(bound.value)).all()


@pytest.mark.spec("R5.5")
def test_the_distance_bound_is_attained():
    # Linear and symmetric in the two branches: the error shrinks by q in every step.
    units = [OptEqUnit(Dense(3, 3), Dense(3, 3), "identity", max_norm=None).double() for _ in range(2)]
    with torch.no_grad():
        for unit in units:
            unit.W.weights[0].copy_(0.8 * torch.eye(3))
    module, x = MOptEq(units, HeritageDiversity(diversity=False)), random(2, 3)
    equation, star = solved(module, x)
    e = random(2, 3, seed=1)
    bound = equation.distance_bound((star[0] + e, star[1] + e)).value
    torch.testing.assert_close(bound, 2**0.5 * e.norm(dim=1), rtol=1e-9, atol=0)


@pytest.mark.spec("R5.5")
def test_layers_are_certified():
    layer = EquilibriumLayer(model(*SIZES["scales"]), Anderson(1e-4, 200))
    certificate = certify(layer, inputs((8,)))
    assert (certificate.distance.value >= certificate.distance_to_reference.value).all()
    assert (certificate.distance.value < 0.1).all()
    assert (certificate.contraction.value == math.inf).all()
    assert torch.isfinite(certificate.local_contraction.value).all()


def test_no_distance_bound_without_convexity():
    module = MOptEq(branch_units((4, 4), 3, (3, 3), max_norm=0.97), HeritageDiversity(0.5))
    module.uniqueness_checked = True
    equation = module.bind(inputs((4, 4)))
    assert torch.isposinf(equation.distance_bound(equation.initial()).value).all()


def perturbed(sizes, mids, **options) -> MOptEq:
    return MOptEq(branch_units(sizes, 3, mids), HeritageDiversity(0.1), perturbation=0.3, **options)


@every_size
@pytest.mark.spec("R5.4")
def test_perturbations_are_those_of_the_branch_before(sizes, mids):
    module, x = perturbed(sizes, mids), inputs(sizes)
    equation = module.bind(x).detach()
    delta = torch.zeros_like(x)
    for unit, bound in zip(module.units, equation.branches.branches, strict=True):
        probe = (x - delta).requires_grad_()
        c = unit.injection(probe)
        torch.testing.assert_close(bound.injection, c.detach(), rtol=1e-12, atol=1e-12)
        # Uᵀy is the gradient of ⟨y, U x⟩.
        delta = 0.3 * torch.autograd.grad((unit.activation(c).detach() * c).sum(), probe)[0].sign()
        assert (delta != 0).any()


@pytest.mark.spec("R5.4")
def test_perturbations_are_for_training():
    sizes, mids = SIZES["two-scales"]
    x = inputs(sizes)
    plain = MOptEq(branch_units(sizes, 3, mids), HeritageDiversity(0.1)).bind(x)
    module = perturbed(sizes, mids)
    for mode, same in ((True, False), (False, True)):
        c = module.train(mode).bind(x).branches.branches
        assert torch.equal(c[0].injection, plain.branches.branches[0].injection)
        assert torch.equal(c[1].injection, plain.branches.branches[1].injection) is same
    asked = perturbed(sizes, mids, perturb_at_inference=True).eval().bind(x)
    assert not torch.equal(asked.branches.branches[1].injection, plain.branches.branches[1].injection)


@pytest.mark.spec("R5.4")
def test_perturbations_are_constant_in_the_backward_pass():
    sizes, mids = SIZES["two"]
    module = MOptEq(branch_units(sizes, 3, mids), None, perturbation=0.3)
    x = inputs(sizes).requires_grad_()
    second = module.bind(x).branches[1].injection
    gradient = torch.autograd.grad(second.sum(), [x, *module.units[0].parameters()], allow_unused=True)
    U = module.units[1].injection.operator.bind(tuple(x.shape[1:]))
    torch.testing.assert_close(gradient[0], U.adjoint(torch.ones_like(second)).detach())
    assert all(g is None for g in gradient[1:])


@pytest.mark.spec("R5.1")
def test_without_a_coupling_the_branches_are_parallel():
    sizes, mids = SIZES["scales"]
    x, units = inputs(sizes), branch_units(sizes, 3, mids)
    coupled = EquilibriumLayer(MOptEq(units, None), EXACT)(x)
    for a, b in zip(coupled, EquilibriumLayer(Parallel(units), EXACT)(x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    # One branch has no neighbours, and alone it is an OptEq.
    alone = EquilibriumLayer(MOptEq(units[:1], None), EXACT)(x)
    torch.testing.assert_close(alone[0], EquilibriumLayer(units[0], EXACT)(x), rtol=0, atol=1e-11)


def test_low_precision_and_float32():
    module, x = single_view().float(), random(2, 32, 4, 4).relu().float()
    layer = EquilibriumLayer(module, Anderson(1e-5, 100), on_unconverged="raise")
    exact = layer(x)
    assert all(z.dtype == torch.float32 for z in exact)
    with torch.autocast("cpu", torch.bfloat16):
        rough = EquilibriumLayer(module, Anderson(1e-2, 100), on_unconverged="raise")(x)
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.05 * b.norm()


def test_errors():
    units = branch_units((4, 4), 3, (3, 3))
    other = OptEqUnit(Conv2d(4, 3), Conv2d(3, 3))
    dense = OptEqUnit(Dense(3, 3), nn.Linear(3, 3))
    for build, message in [
        (lambda: MOptEq([]), "at least one branch"),
        (lambda: MOptEq(units[:1]), "of which there is one; add a branch, or use Parallel"),
        (lambda: MOptEq([units[0], other]), r"equal channels, got \[3, 4\]"),
        (lambda: MOptEq(units, sweep="sor"), "one of jacobi, gauss-seidel, got 'sor'"),
        (lambda: MOptEq(units[0]), "Expected a list of branches, got OptEqUnit"),
        (lambda: MOptEq([units[0], nn.Identity()]), "branch 2 to be an EquilibriumMap, got Identity"),
        (lambda: MOptEq(units, 0.01), r"`coupling` to be HeritageDiversity\(...\) or None, got 0.01"),
        (lambda: MOptEq(units, perturbation=-0.1), "`perturbation` to be a number of at least 0, got -0.1"),
        (lambda: MOptEq(units, perturbation="a"), "`perturbation` to be a number of at least 0, got 'a'"),
        (lambda: MOptEq(units, perturb_at_inference=1), "`perturb_at_inference` to be True or False, got 1"),
        (lambda: MOptEq(units, perturbation=math.inf), "`perturbation` .* got inf"),
        (lambda: MOptEq(units, perturbation=math.nan), "`perturbation`"),
        (lambda: MOptEq([dense, dense], perturbation=0.1), "for `U`, got torch.nn.modules.linear.Linear"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build()


def test_sizes_that_do_not_divide():
    third = OptEqUnit(Conv2d(3, 3), Compose(AveragePool(3, 3), Conv2d(3, 3)), max_norm=0.7)
    half = OptEqUnit(Conv2d(3, 3), Compose(AveragePool(3, 2), Conv2d(3, 3)), max_norm=0.7)
    module = MOptEq([half, third])
    with pytest.raises(ShapeError, match=r"one factor, got \(3, 3\) for branch 1 and \(2, 2\) for branch 2"):
        module.bind(torch.randn(1, 3, 6, 6))
    with pytest.raises(ShapeError, match="divisible by 2"):
        module.bind(torch.randn(1, 3, 5, 5))


@pytest.mark.parametrize("sweep", ["jacobi", "gauss-seidel"])
def test_an_empty_batch(sweep):
    layer = EquilibriumLayer(model((4, 2), (3, 4), sweep=sweep))
    z = layer(inputs((4, 2), batch=0))
    assert [tuple(t.shape) for t in z] == [(0, 3, 4, 4), (0, 3, 2, 2)]
    sum(t.sum() for t in z).backward()


def test_units_whose_weights_vanish_contract():
    module = model((4, 4), (3, 4))
    for unit in module.units:
        unit.W.weights[0].data.zero_()
    assert (module.bind(inputs((4, 4))).contraction().value == 0).all()
