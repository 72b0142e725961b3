import pytest
import torch

from opteq import (
    Anderson,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    HeritageDiversity,
    KernelMap,
    KernelMOptEq,
    MOptEq,
    Nesterov,
    OptEqUnit,
    Parallel,
    Picard,
    PolynomialKernel,
    SimilarityMap,
)
from opteq.errors import ConfigError
from opteq.maps.regularised import Regularised
from opteq.objectives.regularisers import AbsoluteNorm, Incay
from opteq.results import Certificate
from opteq.solvers.base import solve_fixed_point
from opteq.theory.minimisers import EquilibriumKind, equilibrium_kind
from tests.conformance.instances import Student, seeded
from tests.conformance.reference import jacobian, random
from tests.maps.branches import branch_units, ring_objective


def steep(build, gain: float = 10.0):
    """Weights above the ceiling, so that the problem is as hard as the ceiling allows."""
    module = seeded(build)
    with torch.no_grad():
        module.W.weight.mul_(gain)
    return module.eval()


def objective(equation, y):
    """`1ᵀf(y) + ½‖y‖² - S(y)` itself, infinite at infeasible points."""
    terms = equation.activation.penalty(y) + 0.5 * y.square()
    return terms.flatten(1).sum(1) - equation.similarity.value(y)


CERTIFIED = {
    "linear": lambda: steep(lambda: KernelMap(Dense(4, 5), Dense(3, 4))),
    "polynomial": lambda: steep(lambda: KernelMap(Dense(4, 5), Dense(3, 4), "polynomial")),
    "sigmoid": lambda: steep(lambda: KernelMap(Dense(4, 5), Dense(3, 4), "sigmoid", activation="tanh")),
    "gaussian": lambda: steep(lambda: GaussianMap(Dense(4, 5), Dense(3, 5), gamma=0.5)),
    # No contraction, and still a convex objective.
    "gaussian-steep": lambda: steep(lambda: GaussianMap(Dense(4, 5), Dense(3, 5), gamma=0.5, max_norm=1.45)),
}


@pytest.mark.parametrize("make", CERTIFIED.values(), ids=CERTIFIED)
@pytest.mark.spec("R6.4", "R6.1")
def test_no_perturbation_lowers_a_certified_objective(make):
    module, x = make(), random(5, 3)
    layer = EquilibriumLayer(module, Picard(tol=1e-12, max_steps=20_000, damping=0.4))
    kind = equilibrium_kind(layer, x)
    assert kind.minimiser.all()
    assert kind.local_minimiser.all()
    assert "Of 5 equilibria 5 are certified minimisers" in str(kind)
    equation = module.bind(x).detach()
    y = layer(x).detach()
    least = objective(equation, y)
    for seed in range(200):
        other = y + 10.0 ** (1 - seed % 5) * random(5, 4, seed=seed)
        if seed % 2:
            other = module.activation(other)
        assert (objective(equation, other) >= least - 1e-12).all()


@pytest.mark.spec("R6.4", "R6.1")
def test_the_largest_eigenvalues_are_those_of_a_dense_hessian():
    module, x = CERTIFIED["sigmoid"](), random(5, 3)
    layer = EquilibriumLayer(module, Anderson(tol=1e-12))
    kind = equilibrium_kind(layer, x)
    hessian = jacobian(module.bind(x).detach().similarity.gradient, layer(x).detach())
    torch.testing.assert_close(kind.here.value, torch.linalg.eigvalsh(hessian)[:, -1])
    assert (kind.here.value <= kind.everywhere.value).all()
    assert kind.everywhere.kind == "bound"
    assert kind.here.kind == "estimate"


@pytest.mark.filterwarnings("ignore:.*degenerate")
@pytest.mark.spec("R6.1")
def test_an_equilibrium_that_is_only_stationary_is_called_so():
    # The printed polynomial: y = 0 is an equilibrium, and a step along c lowers the objective.
    kernel = PolynomialKernel(2, offset=0.0)
    module = seeded(lambda: KernelMap(Dense(4, 5), Dense(3, 4), kernel, normalise=False, activation="tanh"))
    x = 5 * random(4, 3)
    kind = equilibrium_kind(EquilibriumLayer(module), x)
    assert not kind.minimiser.any()
    assert not kind.local_minimiser.any()
    assert "4 are known to be stationary points only" in str(kind)
    equation = module.bind(x).detach()
    zero = torch.zeros(4, 4, dtype=torch.float64)
    step = 1e-2 * equation.similarity.injection
    assert (objective(equation, step) < objective(equation, zero)).all()


@pytest.mark.spec("R6.1")
def test_local_minimisers_are_estimates():
    own = seeded(lambda: SimilarityMap(Student(), Dense(3, 5), 4))
    cubic = seeded(lambda: KernelMap(Dense(4, 5), Dense(3, 4), PolynomialKernel(3)))
    for module in (own, cubic):
        kind = equilibrium_kind(EquilibriumLayer(module, Anderson(tol=1e-10)), random(5, 3))
        assert not kind.minimiser.any()
        assert kind.local_minimiser.all()
        assert "5 are local minimisers by an estimate" in str(kind)


@pytest.mark.spec("R6.4")
def test_the_kinds_of_equilibria_are_counted():
    everywhere = torch.tensor([1.0, 2.0, 1.5, 3.0], dtype=torch.float64)
    here = torch.tensor([0.4, 0.9, 1.0, 1.75], dtype=torch.float64)
    kind = EquilibriumKind(Certificate(everywhere, "bound"), Certificate(here, "estimate"))
    assert kind.minimiser.tolist() == [True, False, False, False]
    assert kind.local_minimiser.tolist() == [True, True, False, False]
    assert str(kind) == (
        "Of 4 equilibria 1 are certified minimisers of the hidden objective, 1 are local minimisers by an"
        " estimate, and 2 are known to be stationary points only; the largest eigenvalue of ∇²S is at most 3"
        " (bound), and 1.75 at the equilibria (estimate)."
    )
    guessed = EquilibriumKind(Certificate(everywhere, "estimate"), Certificate(here, "estimate"))
    assert not guessed.minimiser.any()


@pytest.mark.spec("R1.2")
def test_equilibria_of_a_unit_are_minimisers_below_norm_one():
    x = random(4, 3)
    unit = steep(lambda: OptEqUnit(Dense(4, 5), Dense(3, 5)))
    assert equilibrium_kind(EquilibriumLayer(unit), x).minimiser.all()
    wide = steep(lambda: OptEqUnit(Dense(4, 5), Dense(3, 5), "tanh", max_norm=None))
    wide.norm_checked = True
    kind = equilibrium_kind(EquilibriumLayer(wide, on_unconverged="count"), x)
    assert not kind.minimiser.any()


@pytest.mark.spec("R6.4")
def test_a_gaussian_beyond_the_limit_is_no_certified_minimiser():
    module = steep(lambda: GaussianMap(Dense(4, 5), Dense(3, 5), gamma=0.5, max_norm=1.55))
    kind = equilibrium_kind(EquilibriumLayer(module, Nesterov(max_steps=1000)), random(5, 3))
    assert not kind.minimiser.any()


def test_maps_without_an_objective_say_so():
    deep = DeepOptEq([OptEqUnit(Dense(4, n), Dense(3, n)) for n in (3, 4, 5)]).double()
    with pytest.raises(ConfigError, match="fixed points, and no objective is known that they"):
        equilibrium_kind(EquilibriumLayer(deep), random(2, 3))


@pytest.mark.parametrize("mu", [1.0, 1.4])
@pytest.mark.spec("R5.3", "R5.5")
def test_the_kind_of_coupled_branches_is_that_of_their_objective(mu):
    units = branch_units((4, 2), 3, (3, 4), "tanh")
    units[1].mu = mu
    module, x = MOptEq(units, HeritageDiversity(0.2, tau=0.02)), 2 * random(2, 3, 4, 4)
    layer = EquilibriumLayer(module, Anderson(tol=1e-12, max_steps=500))
    kind = equilibrium_kind(layer, x)
    # q = .8² · 1.4 for the unit with μ = 1.
    torch.testing.assert_close(kind.everywhere.value, torch.full((2,), 0.896).double(), rtol=1e-6, atol=0)
    assert kind.minimiser.all()

    equation = module.bind(x).detach()
    scale = torch.cat([torch.full((3 * 16,), 1.0), torch.full((4 * 4,), mu)]).double().sqrt()
    for sample in range(2):

        def coupling(v, sample=sample):
            """What couples the branches, as a function of the `y_i/√μ_i`."""
            parts = (scale * v).split([48, 16])
            z = [
                unit.pool(y.view(1, *unit.injection.shape[1:]))
                for unit, y in zip(equation.units, parts, strict=True)
            ]
            return 0.5 * ring_objective(z, 0.2, equation.coupling.width[sample : sample + 1]).sum()

        h = equation.coupling.gradient(layer(x))
        y = [unit.activation(unit.preactivation(a)) for unit, a in zip(equation.units, h, strict=True)]
        v = torch.cat([t[sample].flatten() for t in y]).detach() / scale
        hessian = -torch.autograd.functional.hessian(coupling, v)
        largest = torch.linalg.eigvalsh(hessian)[-1]
        torch.testing.assert_close(kind.here.value[sample], largest, rtol=1e-8, atol=1e-8)


@pytest.mark.spec("R5.5")
def test_coupled_branches_beyond_the_condition_are_not_certified():
    units = branch_units((4, 4), 3, (6, 6), max_norm=0.95)
    with pytest.warns(RuntimeWarning, match="not below 1"):
        kind = equilibrium_kind(
            EquilibriumLayer(MOptEq(units, HeritageDiversity(0.3)), Anderson(max_steps=300)),
            random(2, 3, 4, 4),
        )
    assert not kind.minimiser.any()
    with pytest.warns(RuntimeWarning, match="no fixed point"):
        hard = MOptEq(branch_units((4, 4), 3, (3, 3)), HeritageDiversity(tau=0.0))
    with pytest.raises(ConfigError, match=r"the map jumps: .* give the coupling a `tau`"):
        equilibrium_kind(EquilibriumLayer(hard, on_unconverged="count"), random(2, 3, 4, 4))


@pytest.mark.spec("R5.1")
def test_independent_branches_are_minimisers_if_all_of_them_are():
    certified = [CERTIFIED["gaussian"](), CERTIFIED["sigmoid"]()]
    x = random(5, 3)
    layer = EquilibriumLayer(Parallel(certified), Anderson(tol=1e-10))
    kind = equilibrium_kind(layer, x)
    assert kind.minimiser.all()
    apart = [equilibrium_kind(EquilibriumLayer(m, Anderson(tol=1e-10)), x) for m in certified]
    expected = torch.maximum(*(part.here.value for part in apart))
    torch.testing.assert_close(kind.here.value, expected, rtol=1e-6, atol=1e-8)
    own = seeded(lambda: SimilarityMap(Student(), Dense(3, 5), 4))
    kind = equilibrium_kind(EquilibriumLayer(Parallel([certified[0], own])), x)
    assert not kind.minimiser.any()
    assert kind.local_minimiser.all()


@pytest.mark.spec("R2.4", "R4.2")
def test_chains_of_two_are_minimisers_of_their_objective():
    x = random(4, 3)
    units = [steep(lambda n=n: OptEqUnit(Dense(4, n), Dense(3, n))) for n in (5, 6)]
    assert equilibrium_kind(EquilibriumLayer(DeepOptEq(units).double()), x).minimiser.all()
    convex = Regularised(units[0], AbsoluteNorm(), 0.1, "prox")
    assert equilibrium_kind(EquilibriumLayer(convex), x).minimiser.all()
    # Feature incay is not convex: nothing is certified.
    incay = Regularised(units[0], Incay(), 0.1)
    assert not equilibrium_kind(EquilibriumLayer(incay), x).minimiser.any()


@pytest.mark.parametrize("kernel", ["polynomial", "sigmoid"])
@pytest.mark.spec("R5.3", "R6.1")
def test_the_kind_of_coupled_kernels_is_that_of_their_objective(kernel):
    torch.manual_seed(0)
    units = [KernelMap(Dense(n, 3), Dense(4, n), kernel, max_norm=0.8).double() for n in (5, 6)]
    module, x = KernelMOptEq(units, HeritageDiversity(0.1, tau=0.05)), random(1, 4)
    layer = EquilibriumLayer(module, Anderson(tol=1e-12, max_steps=500))
    kind = equilibrium_kind(layer, x)
    assert kind.minimiser.all()

    equation = module.bind(x).detach()
    y, info = solve_fixed_point(equation, equation.initial(), layer.solver)
    assert info.converged.all()

    def rest(v):
        """`G` without `1ᵀf(y) + ½‖y‖²`."""
        state = tuple(v[None].split([5, 6], 1))
        kernels = zip(equation.similarities, state, strict=True)
        value = 0.5 * equation.coupling.value(equation.readout(state))
        return (value - sum(similarity.kernel_value(part) for similarity, part in kernels)).sum()

    hessian = -torch.autograd.functional.hessian(rest, torch.cat(y, 1)[0])
    largest = torch.linalg.eigvalsh(hessian)[-1]
    torch.testing.assert_close(kind.here.value[0], largest, rtol=1e-6, atol=1e-9)
    assert largest <= kind.everywhere.value[0]
