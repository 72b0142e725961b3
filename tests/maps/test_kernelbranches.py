"""Coupled branches with kernels: formula, objective, equilibria, gradients and what makes them unique."""

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
    GaussianMap,
    HeritageDiversity,
    Implicit,
    KernelMap,
    KernelMOptEq,
    MOptEq,
    OneStep,
    OptEqUnit,
    Phantom,
    Picard,
    PolynomialKernel,
    Unrolled,
    certify,
)
from opteq.errors import ConfigError
from opteq.maps.kernelbranches import KernelBranchesEquation
from opteq.results import distance, map_state, tensors_of
from opteq.solvers.base import solve_fixed_point
from tests.conformance.instances import seeded
from tests.conformance.reference import jacobian, random, spectral_norm
from tests.maps.branches import ring_objective, sweep_gradients

EXACT = Anderson(tol=1e-12, max_steps=500)
# `k` and `k'` written out once more.
KERNELS = {
    "linear": (lambda t: t, lambda t: torch.ones_like(t)),
    "polynomial": (lambda t: (1 + t) ** 2, lambda t: 2 * (1 + t)),
    "sigmoid": (torch.tanh, lambda t: 1 / torch.cosh(t) ** 2),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
steep_kernel = pytest.mark.parametrize("kernel", ["polynomial", "sigmoid"])
every_sweep = pytest.mark.parametrize("sweep", ["jacobi", "gauss-seidel"])
SIZES, MIDS, WEIGHT = (4, 4, 2), (4, 3, 5), 0.2


def kernel_units(
    kernel, activation: str = "relu", max_norm: float | None = 0.8, **options
) -> list[KernelMap]:
    """Convolutional branches of three sizes whose weights start well above the ceiling, with biases."""

    def unit(size: int, mid: int) -> KernelMap:
        U = Conv2d(3, mid, 3)
        if size < SIZES[0]:
            U = Compose(AveragePool(3, SIZES[0] // size), U)
        return KernelMap(Conv2d(mid, 3, 3), U, kernel, activation=activation, max_norm=max_norm, **options)

    units = []
    for i, (size, mid) in enumerate(zip(SIZES, MIDS, strict=True)):
        module = seeded(lambda size=size, mid=mid: unit(size, mid), i)
        with torch.no_grad():
            module.W.weights[0].mul_(4)
            module.injection.bias.copy_(0.3 * random(mid, seed=i))
        units.append(module)
    return units


def model(kernel, activation: str = "relu", sweep: str = "jacobi", **options) -> KernelMOptEq:
    coupling = HeritageDiversity(WEIGHT, tau=0.02)
    return KernelMOptEq(kernel_units(kernel, activation, **options), coupling, sweep)


def inputs(batch: int = 2, seed: int = 0) -> Tensor:
    return 2 * random(batch, 3, SIZES[0], SIZES[0], seed=seed)


def solved(module: KernelMOptEq, x: Tensor) -> tuple[KernelBranchesEquation, tuple[Tensor, ...]]:
    equation = module.bind(x).detach()
    assert isinstance(equation, KernelBranchesEquation)
    y, info = solve_fixed_point(equation, equation.first_iterate(), EXACT)
    assert info.converged.all()
    return equation, tensors_of(y)


def lifted(equation: KernelBranchesEquation, y) -> list[Tensor]:
    return [s.W(v) for s, v in zip(equation.similarities, y, strict=True)]


def objective(equation: KernelBranchesEquation, kernel: str, y) -> Tensor:
    """`Σ 1ᵀf(y) + ½‖y‖² - n k(⟨c, y⟩/n) + ½(λD_τ - H)`, term by term."""
    k, _ = KERNELS[kernel]
    total = 0.5 * ring_objective(lifted(equation, y), WEIGHT, equation.coupling.width)
    for s, activation, v in zip(equation.similarities, equation.activations, y, strict=True):
        n = torch.ones(len(v), dtype=v.dtype) if s.unit is None else s.unit
        inner = torch.einsum("bchw,bchw->b", s.injection, v)
        total = total + (activation.penalty(v) + 0.5 * v.square()).sum((1, 2, 3)) - n * k(inner / n)
    return total


@every_kernel
@pytest.mark.spec("R5.3", "R6.1")
def test_the_map_is_the_formula(kernel: str):
    equation = model(kernel).bind(inputs()).detach()
    y = map_state(lambda t: random(*t.shape, seed=t.shape[1]), equation.initial())
    z = [v.requires_grad_() for v in lifted(equation, y)]
    slopes = torch.autograd.grad(ring_objective(z, WEIGHT, equation.coupling.width).sum(), z)
    rows = zip(equation.similarities, y, slopes, equation(y), strict=True)
    for s, v, slope, computed in rows:
        n = torch.ones(len(v), dtype=v.dtype) if s.unit is None else s.unit
        weight = KERNELS[kernel][1](torch.einsum("bchw,bchw->b", s.injection, v) / n)
        message = s.W.adjoint(-0.5 * slope)
        expected = torch.relu(weight[:, None, None, None] * s.injection + message)
        torch.testing.assert_close(computed, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.spec("R5.3", "R6.1")
def test_with_the_linear_kernel_they_are_coupled_optequs():
    # The `W` of a kernel map is the transpose of that of a unit.
    maps = [seeded(lambda n=n: KernelMap(Dense(n, 4), Dense(3, n), max_norm=0.7), n) for n in (3, 5)]
    units = [OptEqUnit(Dense(4, m.W.in_channels), m.injection.operator, max_norm=0.7) for m in maps]
    with torch.no_grad():
        for unit, m in zip(units, maps, strict=True):
            m.W.weight.mul_(3)
            m.injection.bias.copy_(random(m.W.in_channels, seed=3))
            unit.double().W.weight.copy_(m.W.weight.mT)
            unit.injection.bias.copy_(m.injection.bias)
    x, coupling = random(6, 3), HeritageDiversity(0.1, tau=0.1)
    kernels = EquilibriumLayer(KernelMOptEq(maps, coupling), EXACT)
    plain = EquilibriumLayer(MOptEq(units, coupling), EXACT)
    for a, b in zip(kernels(x), plain(x), strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@every_kernel
@pytest.mark.parametrize("activation", ["tanh", "softplus"])
@pytest.mark.spec("R5.3", "R6.1")
def test_equilibria_are_stationary(kernel: str, activation: str):
    equation, star = solved(model(kernel, activation), inputs())
    y = [v.requires_grad_() for v in star]
    value = objective(equation, kernel, y)
    torch.testing.assert_close(equation.objective(star), value.detach(), rtol=1e-10, atol=1e-10)
    for slope in torch.autograd.grad(value.sum(), y):
        assert slope.abs().max() < 1e-9
    other = [(0.9 * v.detach()).requires_grad_() for v in star]
    slopes = torch.autograd.grad(objective(equation, kernel, other).sum(), other)
    assert max(slope.abs().max() for slope in slopes) > 1e-2


@every_kernel
@pytest.mark.spec("R5.3", "R6.1")
def test_equilibria_with_relu_meet_the_optimality_conditions(kernel: str):
    equation, star = solved(model(kernel), inputs())
    y = [v.requires_grad_() for v in star]
    slopes = torch.autograd.grad(objective(equation, kernel, y).sum(), y)
    for v, slope in zip(y, slopes, strict=True):
        assert (v == 0).any()
        assert (v > 0).any()
        assert slope[v > 0].abs().max() < 1e-9
        assert (slope[v == 0] > -1e-9).all()


@every_sweep
@every_kernel
@pytest.mark.spec("R5.3")
def test_the_energy_is_the_objective_at_the_feasible_point(kernel: str, sweep: str):
    module = model(kernel, "softplus")
    equation = module.bind(inputs()).detach()
    y = map_state(lambda t: random(*t.shape, seed=t.shape[1]), equation.initial())
    expected = objective(equation, kernel, equation(y))
    module.sweep = sweep
    torch.testing.assert_close(module.bind(inputs()).objective(y), expected, rtol=1e-10, atol=1e-10)


@steep_kernel
@pytest.mark.spec("R5.5", "R6.1")
def test_below_one_the_equilibrium_is_reached_from_anywhere(kernel: str):
    module, x = model(kernel), inputs()
    assert module.kept_unique
    equation, star = solved(module, x)
    for start in range(3):
        y = map_state(lambda t, start=start: start * random(*t.shape, seed=start), equation.initial())
        found, info = solve_fixed_point(equation, y, EXACT)
        assert info.converged.all()
        for a, b in zip(star, tensors_of(found), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@steep_kernel
@pytest.mark.spec("R5.5", "R6.1")
def test_the_objective_is_as_convex_as_is_claimed(kernel: str):
    # Hessian of G without penalties: at least 1 - q, at any state and for any injection.
    module = model(kernel)
    x = 10 * inputs(batch=1)
    equation = module.bind(x).detach()
    q = equation.uniqueness().value.item()
    assert 0.7 < q < 0.8
    parts = [v.flatten() for v in equation.initial()]
    shapes = [v.shape for v in equation.initial()]

    def smooth(flat: Tensor) -> Tensor:
        y = [v.view(s) for v, s in zip(flat.split([len(p) for p in parts]), shapes, strict=True)]
        penalties = sum(a.penalty(v).sum() for a, v in zip(equation.activations, y, strict=True))
        return objective(equation, kernel, y).sum() - penalties

    smallest = []
    for seed in range(4):
        y = (0.3 * 3.0**seed * random(sum(map(len, parts)), seed=seed)).abs()
        hessian = torch.autograd.functional.hessian(smooth, y)
        smallest.append(torch.linalg.eigvalsh(hessian).min().item())
    assert min(smallest) >= 1 - q
    assert min(smallest) < 1


@steep_kernel
@pytest.mark.spec("R5.3")
def test_both_sweeps_reach_the_same_equilibrium(kernel: str):
    jacobi, y = solved(model(kernel), inputs())
    sweep, other = solved(model(kernel, sweep="gauss-seidel"), inputs())
    for a, b in zip(y, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    # On the way there they differ: the second branch already hears of the new first one.
    start = jacobi.first_iterate()
    first, second = jacobi(start), sweep(start)
    torch.testing.assert_close(first[0], second[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(first[1], second[1])
    torch.testing.assert_close(second[1], jacobi((first[0], *start[1:]))[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sweep.first_iterate()[1], sweep(sweep.initial())[1], rtol=0, atol=0)


@pytest.mark.spec("R5.3")
def test_the_readout_is_what_the_coupling_sees():
    module, x = model("sigmoid"), inputs()
    equation, star = solved(module, x)
    z = EquilibriumLayer(module, EXACT)(x)
    for a, b, size in zip(z, lifted(equation, star), SIZES, strict=True):
        assert a.shape == (2, 3, size, size)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def gradients(module: KernelMOptEq, x: Tensor, method, solver=None) -> list[Tensor]:
    layer = EquilibriumLayer(module, solver, method, on_unconverged="raise")
    x = x.clone().requires_grad_()
    value = sum((z * random(*z.shape, seed=i)).sum() for i, z in enumerate(layer(x)))
    return list(torch.autograd.grad(value, [x, *module.parameters()]))


@every_sweep
@steep_kernel
@pytest.mark.parametrize("method", ["cg", "anderson", "gmres"])
@pytest.mark.spec("R3.1", "R5.3")
def test_implicit_is_unrolled(kernel: str, sweep: str, method: str):
    module, x = model(kernel, sweep=sweep), inputs()
    implicit = gradients(module, x, Implicit(1e-12, 300, method), EXACT)
    for a, b in zip(implicit, gradients(module, x, Unrolled(300)), strict=True):
        assert a.any()
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@steep_kernel
@pytest.mark.parametrize("method", [OneStep(), Phantom(), Phantom(form="neumann")], ids=repr)
@pytest.mark.spec("R3.3", "R3.4")
def test_cheap_gradients_point_the_right_way(kernel: str, method):
    module, x = model(kernel, "tanh"), inputs()
    exact = gradients(module, x, Implicit(1e-12, 300), EXACT)
    for a, b in zip(gradients(module, x, method, EXACT), exact, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.8


@pytest.mark.spec("R3.3", "R3.4", "R5.3")
def test_cheap_gradients_of_a_sweep_are_those_of_the_whole_sweep():
    module, x = model("sigmoid", "tanh", sweep="gauss-seidel"), inputs()
    x.requires_grad_()
    one, two = sweep_gradients(module.bind(x), solved(module, x)[1], [x, *module.parameters()], 0.8)
    for method, expected in ((OneStep(), one), (Phantom(2, 0.8, "neumann"), two)):
        for a, b in zip(gradients(module, x, method, EXACT), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.spec("R5.5", "R6.1")
def test_uniqueness_is_the_formula():
    # L_σ ζ² (½ (1 + λ(C-1)) + ½) once both ceilings bind, each injection large enough.
    module, x = model("sigmoid", "sigmoid", max_norm=0.75).eval(), 10 * inputs()
    equation = module.bind(x)
    expected = 0.25 * 0.75**2 * (0.5 * (1 + WEIGHT * 2) + 0.5)
    assert module.check_uniqueness(equation.initial()) == pytest.approx(expected, rel=1e-6)
    assert equation.uniqueness().value.tolist() == pytest.approx([expected] * 2, rel=1e-6)
    assert equation.uniqueness().kind == "bound"
    # A small injection leaves its room unused.
    assert (module.bind(0.01 * x).uniqueness().value <= expected + 1e-6).all()


def random_branches(kernel: str, activation: str, seed: int) -> KernelMOptEq:
    """Two or three branches whose weights the ceiling reduces, with any coupling."""

    def unit(n: int) -> KernelMap:
        U, ceiling = Dense(4, n), 0.4 + 0.04 * seed
        return KernelMap(Dense(n, 3), U, kernel, activation=activation, max_norm=ceiling)

    units = [seeded(lambda n=n: unit(n), n) for n in (5, 6, 4)[: 2 + seed % 2]]
    for module in units:
        with torch.no_grad():
            module.W.weight.copy_(random(*module.W.weight.shape, seed=seed))
    coupling = HeritageDiversity(0.05 * (seed % 4), tau=0.02 * (1 + seed % 3), heritage=seed % 5 != 0)
    return KernelMOptEq(units, coupling)


@every_kernel
@pytest.mark.parametrize("activation", ["relu", "tanh", "softplus"])
@pytest.mark.spec("R5.5", "R6.1")
def test_the_distance_bound_holds_on_random_branches(kernel: str, activation: str):
    exact, ratios = Anderson(tol=1e-13, max_steps=3000, damping=0.5), []
    for seed in range(12):
        module = random_branches(kernel, activation, seed)
        equation = module.bind(3 * random(3, 4, seed=seed)).detach()
        start = equation.first_iterate()
        star, info = solve_fixed_point(equation, start, exact)
        assert info.converged.all()
        step = map_state(lambda t: random(*t.shape, seed=t.shape[1]), star)
        places = [equation.initial(), start, solve_fixed_point(equation, start, Anderson(tol=1e-2))[0]]
        for scale in (1e-4, 1e-1, 10.0):
            places.append(map_state(lambda t, s, scale=scale: t + scale * s, star, step))
        assert (equation.uniqueness().value < 1).all()
        for y in places:
            error = distance(equation.readout(y), equation.readout(star))
            bound = equation.distance_bound(y)
            assert bound.kind == "bound"
            # Smaller errors are those of the reference.
            ratios.append((bound.value / error)[error > 1e-8])
    assert torch.cat(ratios).min() >= 1
    assert torch.cat(ratios).median() < 3


@pytest.mark.spec("R5.5", "R6.1")
def test_the_distance_bound_is_attained():
    # Linear and symmetric in the two branches: the error shrinks by q in every step.
    units = [
        KernelMap(Dense(3, 3), Dense(3, 3), activation="identity", max_norm=None).double() for _ in range(2)
    ]
    for unit in units:
        unit.W.weight.data.copy_(0.8 * torch.eye(3, dtype=torch.float64))
    equation, star = solved(KernelMOptEq(units, HeritageDiversity(diversity=False)), random(2, 3))
    e = random(2, 3, seed=1)
    bound = equation.distance_bound((star[0] + e, star[1] + e)).value
    torch.testing.assert_close(bound, 0.8 * 2**0.5 * e.norm(dim=1), rtol=1e-9, atol=0)


@steep_kernel
@every_sweep
@pytest.mark.spec("R5.3", "R5.5")
def test_layers_are_certified(kernel: str, sweep: str):
    module, x = model(kernel, sweep=sweep).float(), inputs().float()
    layer = EquilibriumLayer(module, Anderson(1e-3, 200)).eval()
    certificate = certify(layer, x)
    solution = layer.solve(x)
    assert all(map(torch.equal, tensors_of(certificate.state), tensors_of(solution.state)))
    # The distance of what the layer returns.
    equation = module.bind(x).detach()
    equation = equation.with_tensors(tuple(t.double() for t in equation.tensors))
    star, info = solve_fixed_point(equation, equation.first_iterate(), EXACT)
    assert info.converged.all()
    error = distance(map_state(Tensor.double, solution.value), equation.readout(star))
    torch.testing.assert_close(certificate.distance_to_reference.value, error, rtol=1e-3, atol=1e-6)
    assert (error > 1e-5).all()
    assert (error <= certificate.distance.value).all()
    assert (certificate.distance.value < 100 * error).all()
    assert (certificate.objective >= certificate.objective_at_reference - 1e-9).all()


@pytest.mark.parametrize(
    ("kernel", "options"), [(PolynomialKernel(3), {}), ("sigmoid", {"max_norm": 1.1})], ids=repr
)
@pytest.mark.spec("R5.5")
def test_no_distance_bound_without_convexity(kernel, options):
    module = model(kernel, **options)
    module.uniqueness_checked = True
    certificate = certify(EquilibriumLayer(module, EXACT, on_unconverged="count"), 3 * inputs())
    assert torch.isposinf(certificate.distance.value).all()


@pytest.mark.spec("R5.5", "R6.1")
def test_the_warning_says_what_to_do():
    with pytest.warns(
        RuntimeWarning, match=r"\+ \|k''\|‖c‖²/n\) = 1\.2 is not below 1, with λ = 0\.2 and .* below 0\.913,"
    ):
        model("sigmoid", max_norm=1.0).bind(inputs())
    for kernel, options in (
        ("sigmoid", {"normalise": False}),
        ("sigmoid", {"max_norm": None}),
        (PolynomialKernel(3), {}),
    ):
        module = model(kernel, **options)
        with pytest.warns(RuntimeWarning, match=r"= inf is not .* the units `normalise`, a `max_norm` and"):
            module.bind(inputs())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            module.bind(inputs())  # said once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model("polynomial", max_norm=0.91).bind(inputs())
        model("linear", normalise=False, max_norm=0.8).bind(inputs())


@pytest.mark.parametrize("kernel", ["sigmoid", PolynomialKernel(3)], ids=repr)
def test_the_local_bound_dominates_where_the_curvature_is_large(kernel):
    units = [
        seeded(lambda n=n: KernelMap(Dense(n, 4), Dense(3, n), kernel, normalise=False), n) for n in (3, 5)
    ]
    module, x = KernelMOptEq(units, HeritageDiversity(0.2, tau=0.1)), 2 * random(1, 3)
    module.uniqueness_checked = True
    equation = module.bind(x).detach()

    def flat(y: Tensor) -> Tensor:
        return torch.cat(equation((y[:, :3], y[:, 3:])), 1)

    for seed in range(10):
        y = random(1, 8, seed=seed)
        bound = equation.contraction((y[:, :3], y[:, 3:])).value
        assert torch.isfinite(bound).all()
        assert (bound >= spectral_norm(jacobian(flat, y))).all()


@steep_kernel
@pytest.mark.spec("R5.4", "R6.1")
def test_perturbations_raise_the_objective_of_the_branch_before(kernel: str):
    units = kernel_units(kernel)
    module, x = KernelMOptEq(units, HeritageDiversity(WEIGHT), perturbation=0.3), inputs()
    equation = module.bind(x).detach()
    delta = torch.zeros_like(x)
    for unit, similarity in zip(units, equation.similarities, strict=True):
        probe = (x - delta).requires_grad_()
        c = unit.injection(probe)
        torch.testing.assert_close(similarity.injection, c.detach(), rtol=1e-12, atol=1e-12)
        y = torch.relu(KERNELS[kernel][1](torch.zeros(())) * c).detach()
        n = torch.ones(len(y), dtype=y.dtype) if similarity.unit is None else similarity.unit
        value = -(n * KERNELS[kernel][0]((c * y).sum((1, 2, 3)) / n)).sum()
        delta = -0.3 * torch.autograd.grad(value, probe)[0].sign()
        assert (delta != 0).any()
    module.eval()
    torch.testing.assert_close(module.bind(x).similarities[1].injection, units[1].injection(x))


def test_low_precision_and_float32():
    module, x = model("sigmoid").float(), inputs().float()
    exact = EquilibriumLayer(module, Anderson(1e-5, 100), on_unconverged="raise")(x)
    assert all(z.dtype == torch.float32 for z in exact)
    with torch.autocast("cpu", torch.bfloat16):
        rough = EquilibriumLayer(module, Anderson(1e-2, 100), on_unconverged="raise")(x)
    sum(z.sum() for z in rough).backward()
    for a, b in zip(rough, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.05 * b.norm()


def test_plain_iteration_converges_without_diversity():
    module = KernelMOptEq(kernel_units("sigmoid"), HeritageDiversity(diversity=False))
    equation = module.bind(inputs())
    assert (equation.contraction().value < 1).all()
    layer = EquilibriumLayer(module, Picard(1e-10, 1000), on_unconverged="raise")
    assert all(z.any() for z in layer(inputs()))


def test_errors():
    kernels = [KernelMap(Dense(n, 4), Dense(3, n), "sigmoid") for n in (3, 5)]
    unit, other = OptEqUnit(Dense(4, 3), Dense(3, 3)), KernelMap(Dense(4, 5), Dense(3, 4))
    for build, message in [
        (
            lambda: KernelMOptEq([kernels[0], unit]),
            "to be KernelMaps, got KernelMap, OptEqUnit; MOptEq takes",
        ),
        (
            lambda: KernelMOptEq([GaussianMap(Dense(4, 4), Dense(3, 4))] * 2),
            "KernelMaps, got GaussianMap, Ga",
        ),
        (
            lambda: MOptEq(kernels),
            "MOptEq to be OptEqUnits, got KernelMap, KernelMap; .* KernelMOptEq kernel",
        ),
        (lambda: KernelMOptEq(kernels, None), "independent; use Parallel instead of KernelMOptEq"),
        (lambda: KernelMOptEq([kernels[0], other]), r"equal channels, got \[4, 5\]"),
        (lambda: KernelMOptEq(kernels[:1]), "of which there is one"),
        (
            lambda: KernelMOptEq([KernelMap(Dense(3, 4), nn.Linear(3, 3)), kernels[1]], perturbation=math.pi),
            "for `U`, got torch.nn.modules.linear.Linear",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            build()


@pytest.mark.spec("R5.3")
def test_a_solution_has_the_state_behind_its_readout():
    units = [KernelMap(Dense(n, 3), Dense(4, n), "sigmoid", max_norm=0.8).double() for n in (5, 6)]
    layer = EquilibriumLayer(KernelMOptEq(units, HeritageDiversity(0.1)), EXACT)
    x = random(2, 4)
    solution = layer.solve(x)
    assert [y.shape[1] for y in tensors_of(solution.state)] == [5, 6]
    for y, image in zip(solution.state, layer.bind(x)(solution.state), strict=True):
        torch.testing.assert_close(image, y, rtol=1e-9, atol=1e-11)
    for z, y, unit in zip(solution.value, solution.state, units, strict=True):
        W = unit.W.weight
        W = W * (0.8 * 0.5**0.5 / torch.linalg.matrix_norm(W, 2)).clamp(max=1)
        torch.testing.assert_close(z, y @ W.mT, rtol=1e-6, atol=1e-9)
    linear = EquilibriumLayer(OptEqUnit(Dense(3, 5), Dense(4, 5)).double(), EXACT).solve(x)
    assert linear.state is linear.value
