import pytest
import torch

from opteq import (
    Anderson,
    DeepOptEq,
    Dense,
    EquilibriumLayer,
    GaussianMap,
    KernelMap,
    Nesterov,
    OptEqUnit,
    Picard,
    PolynomialKernel,
    SimilarityMap,
)
from opteq.errors import ConfigError
from opteq.theory.minimisers import equilibrium_kind
from tests.conformance.instances import Student, seeded
from tests.conformance.reference import jacobian, random


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
    with pytest.raises(ConfigError, match="fixed points, of which no objective is known"):
        equilibrium_kind(EquilibriumLayer(deep), random(2, 3))
