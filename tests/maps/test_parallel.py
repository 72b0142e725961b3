"""Independent branches solved together."""

import pytest
import torch

from opteq import (
    Anderson,
    AveragePool,
    Compose,
    Conv2d,
    EquilibriumLayer,
    GaussianMap,
    Implicit,
    Nesterov,
    OptEqUnit,
    Parallel,
)
from opteq.errors import ConfigError
from opteq.theory.certificates import certify
from tests.conformance.reference import random
from tests.maps.branches import branch_units

SIZES, MIDS = (8, 4, 4), (3, 4, 2)
EXACT = Anderson(tol=1e-12, max_steps=500)


def maps():
    half = Compose(AveragePool(3, 2), Conv2d(3, 2))
    return [
        *branch_units(SIZES[:2], 3, MIDS[:2], "tanh"),
        GaussianMap(Conv2d(4, 2), half, gamma=0.3).double(),
    ]


def inputs(seed: int = 0):
    return random(3, 3, 8, 8, seed=seed)


@pytest.mark.spec("R5.1")
def test_equilibria_and_gradients_are_those_of_the_branches():
    x, modules = inputs().requires_grad_(), maps()
    method = Implicit(1e-12, 300)
    together = EquilibriumLayer(Parallel(modules), EXACT, method)(x)
    alone = [EquilibriumLayer(module, EXACT, method)(x) for module in modules]
    leaves = [x, *(p for module in modules for p in module.parameters())]
    values = []
    for states in (together, alone):
        assert [tuple(z.shape[1:]) for z in states] == [(3, 8, 8), (3, 4, 4), (4, 4, 4)]
        value = sum((z * random(*z.shape, seed=i)).sum() for i, z in enumerate(states))
        values.append(torch.autograd.grad(value, leaves))
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    for a, b in zip(*values, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.spec("R5.1")
def test_energies_add_up_and_the_worst_bound_counts():
    x, modules = inputs(), maps()
    equation = Parallel(modules).bind(x).detach()
    parts = [module.bind(x).detach() for module in modules]
    z = tuple(random(*t.shape, seed=i) for i, t in enumerate(equation.initial()))
    energies = [part.objective(t) for part, t in zip(parts, z, strict=True)]
    torch.testing.assert_close(equation.objective(z), energies[0] + energies[1] + energies[2])
    for state, places in ((None, [None] * 3), (z, z)):
        bounds = [part.contraction(t).value for part, t in zip(parts, places, strict=True)]
        torch.testing.assert_close(equation.contraction(state).value, torch.stack(bounds).amax(0))


@pytest.mark.spec("R5.1")
def test_the_gradient_step_reaches_the_same_equilibrium():
    x, modules = inputs(), maps()
    module = Parallel(modules)
    expected = EquilibriumLayer(module, EXACT)(x)
    found = EquilibriumLayer(module, Nesterov(1e-11, 2000), on_unconverged="raise")(x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
    # The scale serves the branch with the shortest step, here the Gaussian one.
    equation = module.bind(x).detach()
    form = equation.reformulate(gradient=True)
    z = (*expected[:2], expected[2] + random(*expected[2].shape))
    short, full = (norms([a - b for a, b in zip(f(z), z, strict=True)]) for f in (form.function, equation))
    assert (form.scale * short >= full * (1 - 1e-12)).all()
    assert (short < full * (1 - 1e-3)).all()


def norms(state):
    return torch.cat([t.flatten(1) for t in state], 1).norm(dim=1)


@pytest.mark.spec("R5.1")
def test_units_are_proximal_together():
    x = inputs()
    units = Parallel(branch_units(SIZES, 3, MIDS)).bind(x)
    assert units.structure == "proximal"
    assert units.detach().linearize(units.initial()).symmetric is not None
    mixed = Parallel(maps()).bind(x).detach()
    assert mixed.structure == "none"
    assert mixed.linearize(mixed.initial()).symmetric is not None


def test_certificates():
    layer = EquilibriumLayer(Parallel(branch_units(SIZES, 3, MIDS)), Anderson(1e-6, 200))
    certificate = certify(layer, inputs())
    assert (certificate.contraction.value < 1).all()
    assert (certificate.distance.value >= certificate.distance_to_reference.value).all()
    assert torch.isfinite(certificate.distance.value).all()


def test_there_must_be_a_branch():
    unit = OptEqUnit(Conv2d(3, 3), Conv2d(3, 3))
    for branches, message in [
        ([], "at least one branch"),
        (unit, "a list of branches, got OptEqUnit"),
        ([unit, Conv2d(3, 3)], "branch 2 to be an EquilibriumMap, got Conv2d"),
        ([OptEqUnit], "branch 1 to be an EquilibriumMap, got the class OptEqUnit"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Parallel(branches)


def test_branches_have_one_tensor_each():
    unit = OptEqUnit(Conv2d(3, 3), Conv2d(3, 3), max_norm=0.5).double()
    with pytest.raises(ConfigError, match="state of one tensor; give those"):
        EquilibriumLayer(Parallel([unit, Parallel([unit])]))(inputs())
