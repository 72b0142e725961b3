import math

import pytest
import torch
from torch import nn

from opteq import (
    AbsoluteNorm,
    AffineChange,
    Anderson,
    AveragePool,
    Compose,
    Conv2d,
    Decorrelation,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    HeritageDiversity,
    Incay,
    KernelMap,
    KernelMOptEq,
    LinearMixing,
    MOptEq,
    MoreauSkip,
    MultiBlockOptEq,
    OptEqUnit,
    Parallel,
    Patches,
    Picard,
    PolynomialKernel,
    Regularised,
    SimilarityMap,
    SquaredNorm,
    WideOptEq,
)
from opteq.errors import ConfigError, NonFiniteError
from opteq.results import tensors_of
from opteq.theory.lipschitz import equilibrium_lipschitz, lipschitz_bound, published_lipschitz
from tests.conformance.reference import random


def steepest_ratio(function, shape, scale, starts=8, steps=40):
    """The largest `‖f(a) - f(b)‖ / ‖a - b‖` that sampling and gradient ascent find."""
    a = (scale * torch.randn(starts, *shape, dtype=torch.float64)).requires_grad_()
    b = (a.detach() + 0.1 * scale * torch.randn_like(a)).requires_grad_()
    optimizer = torch.optim.Adam([a, b], lr=0.03 * scale)
    best = 0.0
    for _ in range(steps):
        optimizer.zero_grad()
        left, right = function(torch.cat([a, b])).flatten(1).chunk(2)
        ratio = (left - right).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
        best = max(best, ratio.max().item())
        (-(ratio + 1e-9).log().sum()).backward()
        optimizer.step()
    return best


def solved(equilibrium_map, tol=1e-12):
    return EquilibriumLayer(
        equilibrium_map.double(), Picard(tol=tol, max_steps=2000, damping=0.6), on_unconverged="raise"
    )


@pytest.mark.spec("R1.1")
@pytest.mark.parametrize(
    ("activation", "mu"), [("relu", 1.0), ("tanh", 1.0), ("softplus", 2.5), ("sigmoid", 1.0)]
)
def test_no_pair_of_inputs_beats_the_bound_of_an_optequnit(activation, mu):
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 6), Dense(3, 6), activation, mu=mu, max_norm=0.8)
    unit.W.weight.data *= 10
    layer = solved(unit, 1e-8)
    bound = equilibrium_lipschitz(unit, torch.zeros(1, 3, dtype=torch.float64))
    assert bound.kind == "bound"
    found = steepest_ratio(layer, (3,), 1.0)
    assert 0.2 * bound.value < found <= bound.value


@pytest.mark.spec("R1.5")
def test_the_bound_of_a_linear_mixing_against_its_closed_form():
    torch.manual_seed(0)
    matrix = torch.randn(6, 6).double()
    unit = LinearMixing(Dense(4, 6), Dense(3, 6), matrix @ matrix.mT + torch.eye(6), max_norm=0.8).double()
    W, root = unit.bind(torch.zeros(1, 3).double()).W.tensors
    U, S = unit.injection.operator[0].operator.weight, root.mT @ root
    derivative = torch.linalg.solve(torch.eye(4).double() - W.mT @ S @ W, W.mT @ S @ U)
    bound = equilibrium_lipschitz(unit, torch.zeros(1, 3, dtype=torch.float64)).value
    norm = torch.linalg.matrix_norm(derivative, 2)
    assert 0.2 * bound < norm <= bound


@pytest.mark.spec("R2.1")
@pytest.mark.parametrize("alpha", [1.0, (0.9, 0.6, 0.8)])
def test_no_pair_of_inputs_beats_the_bound_of_a_deep_map(alpha):
    torch.manual_seed(0)
    units = [OptEqUnit(Dense(4, n), Dense(3, n), max_norm=0.8) for n in (5, 7, 6)]
    for unit in units:
        unit.W.weight.data *= 10
    deep = DeepOptEq(units, alpha)
    layer = solved(deep, 1e-8)
    bound = equilibrium_lipschitz(deep, torch.zeros(1, 3, dtype=torch.float64)).value
    found = steepest_ratio(layer, (3,), 1.0)
    assert 0.1 * bound < found <= bound


@pytest.mark.spec("R2.1")
@pytest.mark.parametrize("alpha", [1.0, (0.9, 0.6, 0.8)])
def test_the_bound_of_a_deep_map_is_attained(alpha):
    # On the line, with positive weights, the equilibrium is linear in x and nothing is lost.
    units = [OptEqUnit(Dense(1, 1), Dense(1, 1), "identity") for _ in range(3)]
    for index, unit in enumerate(units):
        unit.W.weight.data.fill_(0.5 + 0.1 * index)
        unit.injection.operator.weight.data.fill_(1.0 + index)
    deep = DeepOptEq(units, alpha)
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    z = solved(deep)(x)
    slope = (z[1, 0] - z[0, 0]) / 2
    torch.testing.assert_close(equilibrium_lipschitz(deep, x).value, slope.detach(), rtol=1e-8, atol=0)


@pytest.mark.spec("R1.1")
def test_the_bound_of_an_optequnit_is_attained():
    # All units active, and U lifts along the leading left singular vector of W.
    torch.manual_seed(0)
    unit = OptEqUnit(Dense(4, 6), Dense(1, 6), mu=1.5, max_norm=0.9).double()
    left, values, _ = torch.linalg.svd(unit.W.weight.data)
    unit.W.weight.data *= 0.9 / values[0]
    unit.injection.operator.weight.data = 2 * left[:, :1]
    unit.injection.bias.data += 50.0
    x = torch.tensor([[0.0], [0.1]], dtype=torch.float64)
    z = solved(unit)(x)
    ratio = (z[1] - z[0]).norm() / 0.1
    torch.testing.assert_close(ratio, equilibrium_lipschitz(unit, x).value, rtol=1e-6, atol=0)


def dense_units(count, activation="relu", mu=1.0):
    units = [
        OptEqUnit(Dense(3, n), Dense(2, n), activation, mu=mu, max_norm=0.7) for n in range(4, 4 + count)
    ]
    for unit in units:
        unit.W.weight.data *= 10
    return units


def coupled(count=2, sweep="jacobi", activation="relu", mu=1.0, **coupling):
    return MOptEq(dense_units(count, activation, mu), HeritageDiversity(**coupling), sweep), (2,)


def pyramid():
    halved = Compose(AveragePool(2, 2), Conv2d(2, 3))
    units = [OptEqUnit(Conv2d(2, 3), U, max_norm=0.7) for U in (Conv2d(2, 3), halved)]
    for unit in units:
        unit.W.weight.data *= 10
    return MOptEq(units, HeritageDiversity(0.3, tau=0.05)), (2, 4, 6)


def mixed():
    gaussian = GaussianMap(Dense(4, 6), Dense(2, 6), gamma=0.7, max_norm=1.3)
    gaussian.W.weight.data *= 10
    return Parallel([*dense_units(1), gaussian]), (2,)


def steep_unit(hidden=6, activation="relu", max_norm=0.8):
    unit = OptEqUnit(Dense(4, hidden), Dense(3, hidden), activation, max_norm=max_norm)
    unit.W.weight.data *= 10
    return unit


def change(condition):
    """A matrix of that condition number, far from symmetric."""
    left, _, right = torch.linalg.svd(torch.randn(4, 4, dtype=torch.float64))
    return left @ torch.diag(torch.linspace(1, condition, 4).double()) @ right / 2


def rotation():
    return torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]


def deep(count=3):
    return DeepOptEq([steep_unit(n) for n in (5, 7, 6)[:count]], 0.7)


WRAPPED = {
    "skip": (lambda: MoreauSkip(steep_unit(), 0.4), 0.2),
    "skip of a deep map": (lambda: MoreauSkip(deep(), 0.6), 0.1),
    "rotation": (lambda: AffineChange(steep_unit(), rotation(), torch.ones(4)), 0.2),
    "affine": (lambda: AffineChange(steep_unit(activation="tanh"), change(3.0), torch.ones(4)), 0.1),
    "affine of a skip": (lambda: AffineChange(MoreauSkip(steep_unit(), 0.5), change(3.0)), 0.1),
    "wide": (lambda: WideOptEq([steep_unit(n, a) for n, a in ((5, "relu"), (7, "tanh"), (6, "elu"))]), 0.1),
    "blocks": (lambda: MultiBlockOptEq(deep()), 0.1),
    "gradient step": (lambda: Regularised(steep_unit(), SquaredNorm(), 0.4), 0.2),
    "step beyond": (lambda: Regularised(steep_unit(), SquaredNorm(), 1.6), 0.1),
    "prox": (lambda: Regularised(steep_unit(), SquaredNorm(), 0.4, "prox"), 0.2),
    "kink": (lambda: Regularised(steep_unit(), AbsoluteNorm(), 0.05, "prox"), 0.2),
    "incay": (lambda: Regularised(steep_unit(), Incay(), 0.1), 0.1),
    "deep and regularised": (lambda: Regularised(deep(2), SquaredNorm(), 0.3), 0.1),
    "parallel": (
        lambda: Parallel(
            [
                MoreauSkip(steep_unit(), 0.5),
                AffineChange(steep_unit(), change(2.0)),
                Regularised(steep_unit(), AbsoluteNorm(), 0.05, "prox"),
                GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.7, max_norm=1.3),
                WideOptEq([steep_unit(5), steep_unit(6, "tanh")]),
                KernelMap(Dense(4, 6), Dense(3, 4), "sigmoid", activation="tanh", max_norm=0.7),
            ]
        ),
        0.1,
    ),
}


@pytest.mark.spec("R1.5", "R2.2", "R2.5", "R4.2", "R5.1")
@pytest.mark.parametrize(("make", "share"), WRAPPED.values(), ids=WRAPPED)
def test_no_pair_of_inputs_beats_the_bound_of_what_wraps_maps(make, share):
    torch.manual_seed(0)
    module = make().double()
    layer = EquilibriumLayer(module, Anderson(1e-9, 2000, damping=0.7), on_unconverged="raise")
    bound = equilibrium_lipschitz(module, torch.zeros(1, 3, dtype=torch.float64))
    assert bound.kind == "bound"

    def joined(x):
        return torch.cat([z.flatten(1) for z in tensors_of(layer(x))], 1)

    largest = 0.0
    for distance in (1e-2, 0.3, 3.0):
        a = 2 * torch.randn(300, 3, dtype=torch.float64)
        b = a + distance * torch.randn_like(a)
        with torch.no_grad():
            ratios = (joined(a) - joined(b)).norm(dim=1) / (a - b).norm(dim=1)
        largest = max(largest, ratios.max().item())
    largest = max(largest, steepest_ratio(joined, (3,), 1.0))
    assert share * bound.value < largest <= bound.value


@pytest.mark.spec("R1.5")
def test_what_does_not_move_the_equilibrium_any_faster_has_the_same_bound():
    torch.manual_seed(0)
    x = torch.zeros(1, 3, dtype=torch.float64)
    for inner in (steep_unit().double(), deep().double(), WideOptEq([steep_unit(), steep_unit(5)]).double()):
        expected = equilibrium_lipschitz(inner, x).value
        for same in (
            MoreauSkip(inner, 0.3),
            MoreauSkip(inner, 0.3, learn_alpha=True),
            AffineChange(inner, rotation(), torch.ones(4)),
            Parallel([inner]),
        ):
            torch.testing.assert_close(equilibrium_lipschitz(same, x).value, expected, rtol=1e-6, atol=0)
        # z = M⁻¹y: as much faster as the inverse stretches.
        M = change(3.0)
        stretch = 1 / torch.linalg.svdvals(M)[-1]
        changed = equilibrium_lipschitz(AffineChange(inner, M), x).value
        torch.testing.assert_close(changed, stretch * expected, rtol=1e-6, atol=0)


def line(w=0.8, u=2.0):
    """A linear unit on the line, `w(w z + u x)`."""
    unit = OptEqUnit(Dense(1, 1), Dense(1, 1), "identity")
    unit.W.weight.data.fill_(w)
    unit.injection.operator.weight.data.fill_(u)
    return unit


@pytest.mark.spec("R1.5", "R2.2", "R2.5", "R4.2", "R5.1")
@pytest.mark.parametrize(
    "make",
    [
        lambda: MoreauSkip(line(), 0.3),
        lambda: AffineChange(line(), torch.tensor([[0.25]]), torch.ones(1)),
        lambda: WideOptEq([line(), line(0.5, 3.0)]),
        lambda: MultiBlockOptEq(DeepOptEq([line(), line(), line()], 0.7)),
        lambda: Regularised(line(), SquaredNorm(), 0.4),
        lambda: Regularised(line(), SquaredNorm(), 0.4, "prox"),
        lambda: Parallel([MoreauSkip(line()), AffineChange(line(0.5), torch.tensor([[3.0]])), line(0.2)]),
    ],
    ids=["skip", "affine", "wide", "blocks", "gradient step", "prox", "parallel"],
)
def test_the_bounds_of_what_wraps_maps_are_attained_on_the_line(make):
    module = make().double()
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    z = torch.stack(tensors_of(solved(module)(x)))
    slope = (z[:, 1] - z[:, 0]).norm() / 2
    torch.testing.assert_close(equilibrium_lipschitz(module, x).value, slope.detach(), rtol=1e-7, atol=0)


class Louder(OptEqUnit):
    """Binds another equation than its base class, whose bound does not hold for it."""

    def bind(self, x, error=0.0):
        return super().bind(3 * x, error)


class Declared(Louder):
    @property
    def injections(self):
        return (nn.Sequential(Tripler(), self.injection.operator),)


class Tripler(nn.Module):
    def forward(self, x):
        return 3 * x

    def lipschitz(self, x):
        return 3.0


def test_a_bind_of_ones_own_needs_injections_of_its_own():
    torch.manual_seed(0)
    x = torch.zeros(1, 3, dtype=torch.float64)
    parts = Dense(4, 6), Dense(3, 6)
    louder = Louder(*parts).double()
    for module in (louder, MoreauSkip(louder), Parallel([louder]), WideOptEq([louder])):
        with pytest.raises(ConfigError, match=r"Louder overrides `bind`.*`injections` of its own"):
            equilibrium_lipschitz(module, x)
    plain = equilibrium_lipschitz(OptEqUnit(*parts).double(), x).value
    torch.testing.assert_close(equilibrium_lipschitz(Declared(*parts).double(), x).value, 3 * plain)


BRANCHES = {
    "heritage": (lambda: coupled(diversity=False), 0.2),
    "narrow": (lambda: coupled(weight=0.3, tau=0.03), 0.03),
    "wide": (lambda: coupled(3, activation="tanh", mu=1.3, weight=0.3, tau=0.5), 0.05),
    "diversity": (lambda: coupled(weight=0.4, tau=0.3, heritage=False), 0.1),
    "sweep": (lambda: coupled(sweep="gauss-seidel", weight=0.3, tau=0.1), 0.03),
    "pyramid": (pyramid, 0.05),
    "uncoupled": (lambda: (MOptEq(dense_units(2), None), (2,)), 0.2),
    "mixed": (mixed, 0.1),
}


@pytest.mark.spec("R5.1", "R5.5")
@pytest.mark.parametrize(("make", "share"), BRANCHES.values(), ids=BRANCHES)
def test_no_pair_of_inputs_beats_the_bound_of_branches(make, share):
    torch.manual_seed(0)
    branches, shape = make()
    # Undamped iterations overshoot where D_τ is narrow.
    solver = Anderson(1e-8, 500, damping=0.3)
    layer = EquilibriumLayer(branches.double(), solver, on_unconverged="raise")
    bound = equilibrium_lipschitz(branches, torch.zeros(1, *shape, dtype=torch.float64)).value

    def joined(x):
        return torch.cat([z.flatten(1) for z in layer(x)], 1)

    found = steepest_ratio(joined, shape, 0.5)
    assert share * bound < found <= bound


@pytest.mark.spec("R5.1", "R5.5")
@pytest.mark.parametrize("coupling", [HeritageDiversity(diversity=False), None], ids=repr)
def test_the_bound_of_equal_branches_is_attained(coupling):
    # The inner product of the branches' equal states adds its gain of 1 to the pull of each.
    units = [OptEqUnit(Dense(1, 1), Dense(1, 1), mu=1.5) for _ in range(3)]
    for unit in units:
        unit.W.weight.data.fill_(0.9)
        unit.injection.operator.weight.data.fill_(2.0)
    branches = MOptEq(units, coupling)
    x = torch.tensor([[1.0], [1.1]], dtype=torch.float64)
    z = torch.cat(solved(branches)(x), 1)
    slope = (z[1] - z[0]).norm() / 0.1
    torch.testing.assert_close(equilibrium_lipschitz(branches, x).value, slope, rtol=1e-8, atol=0)


@pytest.mark.spec("R5.5")
def test_the_bound_of_coupled_branches_in_closed_form():
    torch.manual_seed(0)
    branches, _ = coupled(activation="sigmoid", mu=0.6, weight=0.3)
    x = torch.zeros(1, 2, dtype=torch.float64)
    bound = equilibrium_lipschitz(branches.double(), x).value.item()
    # L_σ = ¼, ‖W‖ = 0.7, C = 3.
    r = 0.25 * 0.7**2 / 0.6
    q = r * (1 + 0.3 * 2)
    U = torch.cat([unit.injection.operator.weight for unit in branches.units])
    norms = [torch.linalg.matrix_norm(part, 2).item() for part in U.split([4, 5])]
    p = math.sqrt(0.25 / 0.6) * math.hypot(*norms)
    held = math.sqrt(r) * p / (1 - q)
    assert bound == pytest.approx(held * (1 + 2 * r * 0.3 * 2 / (1 - q)), rel=1e-9)
    # A width that does not move, or none, adds nothing.
    branches.coupling = HeritageDiversity(0.0)
    assert equilibrium_lipschitz(branches, x).value.item() == pytest.approx(
        math.sqrt(r) * p / (1 - r), rel=1e-9
    )


@pytest.mark.spec("R5.4", "R5.5")
def test_no_bound_for_coupled_branches_that_jump_or_pull_too_hard():
    x = torch.zeros(1, 2)
    branches, _ = coupled()
    branches.perturbation = 0.1
    with pytest.raises(ConfigError, match=r"signs, which jump.*eval\(\)"):
        equilibrium_lipschitz(branches, x)
    assert equilibrium_lipschitz(branches.eval(), x).value > 0
    branches.perturb_at_inference = True
    with pytest.raises(ConfigError, match="perturb_at_inference"):
        equilibrium_lipschitz(branches, x)
    with pytest.warns(RuntimeWarning, match="no fixed point"):
        hard, _ = coupled(tau=0.0)
    with pytest.raises(ConfigError, match="give the coupling a `tau`"):
        equilibrium_lipschitz(hard, x)
    steep, _ = coupled(weight=1.0)
    with pytest.warns(RuntimeWarning, match="not below 1"), pytest.raises(ConfigError, match="max_norm"):
        equilibrium_lipschitz(steep, x)


def gaussian_dense():
    return GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.7, bias=False, max_norm=1.3), (3,)


def gaussian_patches():
    unit = GaussianMap(Conv2d(2, 4), Conv2d(2, 4), Patches(2, 2), hidden=3, gamma=0.3, max_norm=0.9)
    return unit, (2, 2, 4)


def gaussian_tanh():
    return GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.7, activation="tanh", max_norm=1.3), (3,)


def gaussian_adaptive():
    return GaussianMap(Dense(4, 6), Dense(3, 6), max_norm=1.3), (3,)


def gaussian_adaptive_patches():
    return GaussianMap(Conv2d(2, 4), Conv2d(2, 4), Patches(2, 2), hidden=3, max_norm=0.9), (2, 2, 4)


def gaussian_mean_patches():
    unit, shape = gaussian_adaptive_patches()
    unit.gamma = "mean"
    return unit, shape


@pytest.mark.spec("R6.4", "R6.7")
@pytest.mark.parametrize(
    ("make", "share"),
    [
        (gaussian_dense, 0.05),
        (gaussian_patches, 0.05),
        (gaussian_tanh, 0.05),
        (gaussian_adaptive, 0.02),
        (gaussian_adaptive_patches, 0.02),
        (gaussian_mean_patches, 0.02),
    ],
)
def test_no_pair_of_inputs_beats_the_bound_of_a_gaussian_map(make, share):
    torch.manual_seed(0)
    unit, shape = make()
    unit.W.weight.data *= 10
    layer = solved(unit, 1e-8)
    bound = equilibrium_lipschitz(unit, torch.zeros(1, *shape, dtype=torch.float64)).value
    found = steepest_ratio(layer, shape, 0.5)
    assert share * bound < found <= bound


@pytest.mark.spec("R6.4")
def test_the_bound_of_a_gaussian_map_in_closed_form():
    torch.manual_seed(0)
    unit = GaussianMap(Conv2d(2, 4), Conv2d(3, 4), Patches(2, 2), hidden=3, gamma=0.3).double()
    x = torch.zeros(1, 3, 4, 4, dtype=torch.float64)
    s, u = (
        torch.linalg.matrix_norm(dense(op, (n, 4, 4)), 2)
        for op, n in ((unit.W, 2), (unit.injection.operator, 3))
    )
    s = s.clamp(max=0.97)
    h = torch.linalg.matrix_norm(unit.projection, 2).clamp(max=1.0)
    expected = u * s * h**2 / (1 - 2 * math.exp(-1.5) * (s * h) ** 2)
    torch.testing.assert_close(equilibrium_lipschitz(unit, x).value, expected.detach(), rtol=1e-5, atol=0)


@pytest.mark.spec("R6.4", "R6.7")
def test_an_adaptive_width_can_move_equilibria_more_than_a_fixed_one_allows():
    # W = 0.3, U = 1 on the line: y = σ(W r e^{-γ r²}) with r = x - W y and γ = 0.2/x², so that y is
    # proportional to x, and steeper than with the γ of any one input held fixed.
    unit = GaussianMap(Dense(1, 1), Dense(1, 1), bias=False, max_norm=None).double()
    unit.W.weight.data.fill_(0.3)
    unit.injection.operator.weight.data.fill_(1.0)
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    y = solved(unit)(x).detach()
    adaptive = (y[1] - y[0]).item()
    torch.testing.assert_close(y[1], 2 * y[0])
    unit.gamma = unit.bind(x[:1]).similarity.gamma.item()
    near = torch.tensor([[1.0], [1.0 + 1e-4]], dtype=torch.float64)
    z = solved(unit)(near).detach()
    fixed = ((z[1] - z[0]) / 1e-4).item()
    assert adaptive > 1.3 * fixed
    bound_of_fixed = equilibrium_lipschitz(unit, x).value
    unit.gamma = "adaptive"
    bound = equilibrium_lipschitz(unit, x).value
    # 1 + 2 √N (1.5/e)^{1.5} / √0.2, here for one patch.
    assert (bound / bound_of_fixed).item() == pytest.approx(1 + 1.8333, rel=1e-3)
    assert adaptive <= bound
    patched, shape = gaussian_adaptive_patches()
    x = torch.zeros(1, *shape)
    bound = equilibrium_lipschitz(patched, x).value
    patched.gamma = "mean"
    bound_of_mean = equilibrium_lipschitz(patched, x).value
    patched.gamma = 0.3
    fixed = equilibrium_lipschitz(patched, x).value
    assert (bound / fixed).item() == pytest.approx(1 + 2 * 1.8333, rel=1e-3)
    assert (bound_of_mean / fixed).item() == pytest.approx(1 + 1.8333, rel=1e-3)


@pytest.mark.spec("R6.4")
@pytest.mark.parametrize("rule", ["adaptive", "mean"])
def test_gamma_moves_no_more_with_the_input_than_its_part_of_the_bound_says(rule):
    """`‖dγ/dx‖ ≤ 0.4 M^{-3/2} ‖W_h‖ ‖U‖ κ/√N`, the gradient by autograd through the map."""
    torch.manual_seed(1)
    unit, shape = gaussian_adaptive_patches()
    unit.double().gamma = rule
    U = torch.linalg.matrix_norm(dense(unit.injection.operator, shape), 2)
    W_h = torch.linalg.matrix_norm(unit.projection, 2).clamp(max=1.0)
    spread = {"adaptive": 1.0, "mean": 4**-0.5}[rule]  # of four patches
    for seed in range(30):
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x = (x * 10.0 ** (seed % 3 - 1)).requires_grad_()
        gamma = unit.bind(x).similarity.gamma
        (slope,) = torch.autograd.grad(gamma, x)
        bound = 0.4 * (0.2 / gamma) ** -1.5 * W_h * U * spread
        assert slope.norm() <= bound * (1 + 1e-9)


@pytest.mark.spec("R6.1")
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize(
    ("kernel", "share"), [("linear", 0.5), ("sigmoid", 0.1), ("polynomial", 0.05)], ids=lambda v: v
)
def test_no_pair_of_inputs_beats_the_bound_of_a_kernel_map(kernel, share, activation):
    largest = 0.0
    for seed, size in enumerate((0.3, 1.0, 5.0)):  # below, at and above the unit of the inner products
        torch.manual_seed(seed)
        unit = KernelMap(Dense(4, 6), Dense(3, 4), kernel, activation=activation, max_norm=0.6 + 0.1 * seed)
        unit.W.weight.data *= 10
        unit.injection.operator.weight.data *= size
        bound = equilibrium_lipschitz(unit.double(), torch.zeros(1, 3, dtype=torch.float64))
        assert bound.kind == "bound"
        layer = EquilibriumLayer(unit, Anderson(1e-9, 500), on_unconverged="raise")
        for scale in (0.2, 1.0, 4.0):
            found = steepest_ratio(layer, (3,), scale, steps=20)
            assert found <= bound.value
            largest = max(largest, found / bound.value.item())
    assert largest > share


@pytest.mark.spec("R6.1")
def test_the_bound_of_kernel_maps_in_closed_form():
    x = torch.zeros(1, 3, dtype=torch.float64)
    torch.manual_seed(0)
    values = {}
    for kernel in ("sigmoid", "polynomial"):
        unit = KernelMap(Dense(4, 6), Dense(3, 4), kernel, max_norm=0.8).double()
        unit.W.weight.data *= 10
        size = torch.linalg.matrix_norm(unit.injection.operator.weight, 2).item()
        values[kernel] = equilibrium_lipschitz(unit, x).value.item() / size
    # Both halves of ζ² = 0.64 in use, k'(0) = sup|k'| = 1.
    assert values["sigmoid"] == pytest.approx((1 + 0.32 / (1 - 0.32)) / (1 - 0.64), rel=1e-5)
    # k'(0) = 2, and the slope is not bounded by itself.
    assert values["polynomial"] == pytest.approx(2 * (1 + 2 * 0.32 / (1 - 0.64)) / (1 - 0.64), rel=1e-5)


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        ("sigmoid", {"normalise": False}, "grows with the input"),
        ("sigmoid", {"activation": "softplus"}, "not 0 at 0"),
        (PolynomialKernel(3), {}, r"PolynomialKernel\(degree=3.*grows with the input"),
        ("sigmoid", {"max_norm": 1.2}, "not below 1"),
    ],
    ids=["not normalised", "softplus", "polynomial", "norm"],
)
def test_no_bound_for_kernel_maps_of_unbounded_curvature(kernel, options, message):
    unit = KernelMap(Dense(4, 6), Dense(3, 4), kernel, **options)
    unit.W.weight.data *= 10
    with pytest.raises(ConfigError, match=message):
        equilibrium_lipschitz(unit, torch.zeros(1, 3))


def trained(build, steps=40):
    """A small model after some steps of training on random labels, and the inputs it was trained on."""
    torch.manual_seed(1)
    unit = build().double()
    layer = EquilibriumLayer(unit, Anderson(tol=1e-6, max_steps=300), on_unconverged="count")
    head = nn.Linear(unit.W.in_channels, 2).double()
    x, labels = torch.randn(40, 3).double(), torch.randint(2, (40,))
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(head(layer(x)), labels).backward()
        optimizer.step()
    layer.solver = Anderson(tol=1e-9, max_steps=2000)
    return layer.eval(), x


TRAINED = {
    "optequnit": lambda: OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=0.9),
    "linear kernel": lambda: KernelMap(Dense(4, 6), Dense(3, 4), max_norm=0.9),
    "gaussian": lambda: GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.5, bias=False, max_norm=0.97),
    "gaussian adaptive": lambda: GaussianMap(Dense(4, 6), Dense(3, 6), max_norm=0.97),
}


@pytest.mark.parametrize("build", TRAINED.values(), ids=TRAINED)
@pytest.mark.spec("R6.4", "R6.7", "R1.1")
def test_ten_thousand_pairs_and_ascent_stay_below_the_bound_of_a_trained_model(build):
    layer, x = trained(build)
    bound = equilibrium_lipschitz(layer.map, x).value.item()
    largest = 0.0
    for scale in (1e-3, 0.1, 1.0, 3.0):
        a = 2 * torch.randn(2500, 3).double()
        b = a + scale * torch.randn(2500, 3).double()
        with torch.no_grad():
            ratio = (layer(a) - layer(b)).norm(dim=1) / (a - b).norm(dim=1)
        largest = max(largest, ratio.max().item())
    largest = max(largest, steepest_ratio(layer, (3,), 1.0))
    assert 0.03 * bound < largest <= bound


@pytest.mark.parametrize("name", ["optequnit", "gaussian"])
@pytest.mark.parametrize("gamma", [1e-3, 0.05, 0.3])
@pytest.mark.spec("R6.7")
def test_proposition_3_holds_on_trained_models_and_is_never_the_tighter_one(name, gamma):
    layer, x = trained(TRAINED[name], steps=10)
    unit = layer.map
    # μ = max(‖U‖, ‖W‖) has to be below 1, which training does not see to.
    unit.max_norm, unit.gamma = 0.7, gamma
    weight = unit.injection.operator.weight
    weight.data *= 0.7 / torch.linalg.matrix_norm(weight, 2)
    x = 0.5 * x
    printed, sharp = published_lipschitz(layer, x), equilibrium_lipschitz(unit, x)
    assert sharp.value <= printed.value
    with torch.no_grad():
        y = layer(x)
    change = torch.cdist(y, y) / (torch.cdist(x, x) + torch.eye(len(x)))
    assert 0.1 * sharp.value < change.max() <= sharp.value
    # The quantities of the proposition, once more: both norms are 0.7.
    if name == "optequnit":
        expected = 0.7 * 0.7 / (1 - 0.7**2)
    else:
        W = unit.W.weight.detach()
        r = x @ weight.mT - y @ (0.7 / torch.linalg.matrix_norm(W, 2) * W).mT
        largest = torch.exp(-gamma * r.square().sum(1)).max().item()
        size = max(t.norm(dim=1).max().item() for t in (x, y))
        rate = largest * 0.7**2 + gamma**0.5 * size * 0.7**3
        expected = rate / (1 - rate)
    assert printed.value.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.spec("R6.7")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GaussianMap(Dense(4, 6), Dense(3, 6)), "with fixed `gamma`"),
        (lambda: GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.5), "no bias; use bias=False"),
        (lambda: GaussianMap(Dense(4, 6), Dense(3, 6), gamma=0.5, activation="tanh"), "with ReLU"),
        (lambda: OptEqUnit(Dense(4, 6), Dense(3, 6), mu=2.0), "mu=1"),
    ],
)
def test_proposition_3_says_where_it_does_not_apply(build, message):
    with pytest.raises(ConfigError, match=message):
        published_lipschitz(EquilibriumLayer(build()), torch.zeros(1, 3))


def dense(operator, shape):
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    return operator(basis).flatten(1).mT


class Halved(nn.Module):
    def forward(self, x):
        return x / 2

    def lipschitz(self, x):
        return 0.5


def test_stages_may_know_their_own_constant():
    network = nn.Sequential(nn.Linear(3, 4), Halved()).double()
    norm = torch.linalg.matrix_norm(network[0].weight, 2).item()
    bound = lipschitz_bound(network, torch.zeros(1, 3, dtype=torch.float64)).value
    assert bound.item() == pytest.approx(0.5 * norm)


class Residual(nn.Sequential):
    def forward(self, input):
        return input + 3 * super().forward(input)


class Tripled(nn.Linear):
    def forward(self, input):
        return 3 * super().forward(input)


class Headed(nn.Module):
    """Lists some of what it applies as `stages`."""

    def __init__(self):
        super().__init__()
        self.stages, self.head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.stages(x))


class Paired(Headed):
    def forward(self, x):
        return self.stages(x), x


def test_a_forward_of_ones_own_is_not_taken_for_that_of_the_base_class():
    x = torch.zeros(1, 3)
    with pytest.raises(ConfigError, match="No Lipschitz constant is known for Residual"):
        lipschitz_bound(nn.Sequential(Residual(nn.Linear(3, 3)), nn.Linear(3, 2)), x)
    with pytest.raises(ConfigError, match="No Lipschitz constant is known for Tripled"):
        lipschitz_bound(Tripled(3, 3), x)
    for network in (Headed(), nn.Sequential(Headed(), nn.ReLU()), Paired()):
        with pytest.raises(ConfigError, match="something else than its `stages` do"):
            lipschitz_bound(network, x)
    with pytest.raises(ConfigError, match="something else than its `stages` do"):
        equilibrium_lipschitz(OptEqUnit(Dense(4, 4), Headed()), x)
    torch.nn.utils.parametrizations.spectral_norm(linear := nn.Linear(3, 3))
    assert lipschitz_bound(linear.eval(), x).value.item() == pytest.approx(1.0, rel=0.3)


def test_a_batch_without_samples_has_a_shape_all_the_same():
    unit = GaussianMap(Conv2d(3, 4), Conv2d(1, 4), Patches(2, 2), hidden=3)
    network = nn.Sequential(EquilibriumLayer(unit), nn.Flatten(), nn.Linear(48, 2))
    for function, module in ((equilibrium_lipschitz, unit), (lipschitz_bound, network)):
        one, none = (function(module, torch.randn(count, 1, 4, 4)).value for count in (1, 0))
        torch.testing.assert_close(none, one)


@pytest.mark.spec("R6.4")
def test_the_polynomial_of_degree_1_has_the_bound_of_the_linear_kernel():
    torch.manual_seed(0)
    maps = [KernelMap(Dense(3, 4), Dense(2, 3), kernel) for kernel in ("linear", PolynomialKernel(1))]
    maps[1].load_state_dict(maps[0].state_dict())
    linear, polynomial = (equilibrium_lipschitz(each, torch.zeros(1, 2)).value for each in maps)
    torch.testing.assert_close(polynomial, linear)


def test_refuses_weights_that_are_not_finite_and_what_is_no_module():
    broken = nn.Linear(3, 3)
    broken.weight.data[0, 0] = math.nan
    for module in (broken, nn.Sequential(nn.ReLU(), broken)):
        with pytest.raises(NonFiniteError, match=r"are NaN or infinite, as when a training diverges"):
            lipschitz_bound(module, torch.zeros(1, 3))
    with pytest.raises(ConfigError, match="Expected a torch module, got NoneType"):
        lipschitz_bound(None, torch.zeros(1, 3))


def test_refuses_what_has_no_bound():
    x = torch.zeros(1, 3)
    with pytest.raises(ConfigError, match="GELU"):
        equilibrium_lipschitz(OptEqUnit(Dense(4, 6), nn.Sequential(nn.Linear(3, 6), nn.GELU())), x)
    wide = OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=None)
    wide.W.weight.data *= 10
    wide.norm_checked = True
    with pytest.raises(ConfigError, match=r"No Lipschitz bound holds .*max_norm"):
        equilibrium_lipschitz(wide, x)
    kernels = [KernelMap(Dense(n, 3), Dense(4, n), "sigmoid", max_norm=0.8) for n in (5, 6)]
    with pytest.raises(ConfigError, match="coupled kernel maps: the width of D_τ"):
        equilibrium_lipschitz(KernelMOptEq(kernels), torch.zeros(1, 4))
    with pytest.raises(ConfigError, match=r"No Lipschitz bound holds .*max_norm"):
        equilibrium_lipschitz(MoreauSkip(wide), x)
    own = SimilarityMap(lambda y, c: (y * c).sum(1), Dense(3, 4), 4)
    for unknown in (own, MoreauSkip(own), Parallel([own])):
        with pytest.raises(ConfigError, match="No Lipschitz bound is known for SimilarityMap"):
            equilibrium_lipschitz(unknown, x)
    coupled = Regularised(OptEqUnit(Dense(4, 6), Dense(3, 6), max_norm=0.5), Decorrelation(), 1e-3)
    with pytest.raises(ConfigError, match=r"No Lipschitz bound is known: The curvature of .* is not bounded"):
        equilibrium_lipschitz(coupled.eval(), x)
    with pytest.raises(ConfigError, match=r"call eval\(\) first"):
        lipschitz_bound(nn.BatchNorm1d(3), x)
    with pytest.raises(ConfigError, match="Conv2d"):
        lipschitz_bound(nn.Conv2d(3, 3, 3, padding_mode="circular"), torch.zeros(1, 3, 4, 4))


STAGES = {
    "linear": (nn.Linear(5, 7), (5,), 1e-9),
    "operator": (Dense(5, 7), (5,), 1e-9),
    "pooling operator": (AveragePool(2, 2), (2, 4, 6), 1e-9),
    "strided convolution": (nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 5, 6), 1.0),
    "padded convolution": (nn.Conv2d(2, 4, (3, 5), padding=4, groups=2), (2, 5, 6), 0.5),
    "batch norm": (nn.BatchNorm2d(3), (3, 4, 4), 1e-9),
    "batch norm without weights": (nn.BatchNorm2d(3, affine=False), (3, 4, 4), 1e-9),
    "average pool": (nn.AvgPool2d(2), (2, 4, 6), 1e-9),
    "overlapping pool": (nn.AvgPool2d(3, 1, padding=1), (2, 4, 6), 0.5),
    "adaptive pool": (nn.AdaptiveAvgPool2d(1), (2, 4, 6), 1e-9),
    "uneven adaptive pool": (nn.AdaptiveAvgPool2d(2), (2, 5, 5), 0.6),
    "sequence": (nn.Sequential(nn.Flatten(), nn.Linear(8, 3), nn.Dropout()), (2, 2, 2), 1e-9),
}


@pytest.mark.parametrize(("stage", "shape", "slack"), STAGES.values(), ids=STAGES.keys())
def test_bounds_of_linear_stages_against_their_dense_norm(stage, shape, slack):
    torch.manual_seed(0)
    stage = stage.double().eval()
    if isinstance(stage, nn.BatchNorm2d):
        stage.running_var.uniform_(0.1, 2)
        if stage.affine:
            stage.weight.data.normal_()
    zero = torch.zeros(1, *shape, dtype=torch.float64)
    basis = torch.eye(zero.numel(), dtype=torch.float64).reshape(-1, *shape)
    matrix = (stage(basis) - stage(zero)).flatten(1)
    norm = torch.linalg.matrix_norm(matrix, 2).item()
    bound = lipschitz_bound(stage, zero)
    assert norm <= bound.value.item() <= (1 + slack) * norm
    assert bound.kind == "bound"
    assert bound.assumptions == ("Inputs are shaped like `x`.",)


STEADY = [
    nn.Identity(), nn.Flatten(), nn.ZeroPad2d(1), nn.Dropout(), nn.Dropout2d(), nn.ReLU(), nn.Tanh(),
    nn.Sigmoid(), nn.Hardtanh(), nn.Softshrink(), nn.Softplus(), nn.Softplus(threshold=20), nn.LeakyReLU(0.0),
    nn.LeakyReLU(0.3), nn.LeakyReLU(1.0), nn.ELU(0.0), nn.ELU(),
]  # fmt: skip
LOUD = [
    nn.Softplus(threshold=19.5), nn.LeakyReLU(-0.1), nn.LeakyReLU(1.1), nn.ELU(-0.1), nn.ELU(1.1), nn.GELU(),
]  # fmt: skip


@pytest.mark.parametrize("stage", STEADY, ids=repr)
def test_what_moves_no_farther_than_its_input_has_the_constant_1(stage):
    stage, (a, b) = stage.eval(), 3 * random(2, 300, 2, 3, 4)
    moved = (stage(a) - stage(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
    assert moved.max() <= 1 + 1e-12
    assert lipschitz_bound(stage, a).value.item() == 1.0


@pytest.mark.parametrize("stage", LOUD, ids=repr)
def test_what_may_move_farther_than_its_input_is_refused(stage):
    with pytest.raises(ConfigError, match=f"No Lipschitz constant is known for {type(stage).__name__}; give"):
        lipschitz_bound(stage, torch.zeros(1, 2, 3, 4))


class Listed(nn.Module):
    """Lists its stages, and does something more to what they give."""

    def __init__(self, factor):
        super().__init__()
        self.stages, self.factor = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), factor

    def forward(self, x):
        return self.factor * self.stages(x)


def test_stages_that_differ_by_rounding_alone_are_all_that_a_module_applies():
    x = torch.ones(1, 3)
    lipschitz_bound(Listed(1 + 1e-5), x)
    with pytest.raises(ConfigError, match="Listed gives something else than its `stages` do"):
        lipschitz_bound(Listed(1.01), x)


def test_a_part_with_a_hook_is_named():
    x = torch.zeros(1, 3)
    for index, name in ((None, "Sequential"), (1, "1")):
        network = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        part = network if index is None else network[index]
        part.register_forward_hook(lambda module, args, output: None)
        with pytest.raises(ConfigError, match=f"^{name} has a forward hook"):
            lipschitz_bound(network, x)


@pytest.mark.parametrize(
    ("pool", "constant"),
    [
        (nn.MaxPool2d(2), 1),
        (nn.MaxPool2d(3, 1, padding=1), 3),
        (nn.MaxPool2d((3, 2), (2, 1), ceil_mode=True), 2),
        (nn.MaxPool2d(2, 3), 1),
    ],
    ids=str,
)
def test_maxima_move_as_far_as_a_pixel_in_all_of_its_windows(pool, constant):
    x = torch.zeros(1, 1, 7, 7, dtype=torch.float64)
    assert lipschitz_bound(pool, x).value.item() == pytest.approx(constant, rel=1e-12)
    # Attained where a pixel is the largest of every window that it is in.
    moved = torch.eye(49, dtype=torch.float64).reshape(-1, 1, 7, 7)
    assert (pool(moved) - pool(x)).flatten(1).norm(dim=1).max().item() == pytest.approx(constant, rel=1e-12)
    torch.manual_seed(0)
    a, b = torch.randn(2, 200, 2, 7, 7, dtype=torch.float64)
    ratios = (pool(a) - pool(b)).flatten(1).norm(dim=1) / (a - b).flatten(1).norm(dim=1)
    assert ratios.max() <= constant


def test_what_no_maximum_is_known_for():
    for pool in (nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, return_indices=True)):
        with pytest.raises(ConfigError, match=r"known for MaxPool2d; give it a method"):
            lipschitz_bound(pool, torch.zeros(1, 1, 7, 7))
