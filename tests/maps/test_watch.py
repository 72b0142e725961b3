"""Norms that nothing keeps are watched in training."""

import warnings

import pytest
import torch

from opteq import (
    Dense,
    EquilibriumLayer,
    HeritageDiversity,
    KernelMap,
    KernelMOptEq,
    MOptEq,
    OptEqUnit,
    Unconstrained,
    Unrolled,
)
from opteq.operators.bound import BoundOperator
from opteq.theory.perturbations import reconstruction_bound
from tests.conformance.reference import random

pytestmark = pytest.mark.spec("R1.6")


def unit(norm: float, **options) -> OptEqUnit:
    module = OptEqUnit(Dense(4, 4), Dense(3, 4), **({"max_norm": None} | options)).double()
    scale_to(module, norm)
    return module


def scale_to(module: OptEqUnit, norm: float) -> None:
    with torch.no_grad():
        module.W.weight.mul_(norm / torch.linalg.matrix_norm(module.W.weight, 2))


def said(module, x) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.bind(x)
    return [str(warning.message) for warning in caught]


def test_a_training_that_exceeds_the_norm_is_told_once_soon_after():
    # W follows W_0 (1.3 - 0.4·0.99ᵗ)/0.9, whose norm is 1 between the steps 28 and 29.
    module, x = unit(0.9), random(8, 3)
    layer, target = EquilibriumLayer(module), module.W.weight.detach() * 1.3 / 0.9
    optimizer = torch.optim.SGD([module.W.weight], 0.01)
    warned = []
    for step in range(100):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer(x[:0])
        warned += [step] * len(caught)
        optimizer.zero_grad()
        (0.5 * (module.W.weight - target).square().sum()).backward()
        optimizer.step()
    assert torch.linalg.matrix_norm(module.W.weight, 2) > 1.1
    assert len(warned) == 1
    assert 28 < warned[0] <= 49


def test_norms_are_looked_at_every_twentieth_time_in_training(monkeypatch):
    module, x = unit(0.9), random(2, 3)
    looks, norm = [], Dense.norm
    monkeypatch.setattr(Dense, "norm", lambda *known: looks.append(0) or norm(*known))
    for _ in range(60):
        module.bind(x)
    assert len(looks) == 3
    kept = unit(0.9, max_norm=0.95)
    for _ in range(60):
        kept.bind(x)
    assert len(looks) == 3


def test_every_time_that_the_norm_is_exceeded_anew_it_is_said_in_eval_mode():
    module, x = unit(0.9).eval(), random(2, 3)
    for norm, told in ((0.9, 0), (1.2, 1), (1.2, 0), (1.5, 0), (0.8, 0), (1.1, 1), (1.1, 0)):
        scale_to(module, norm)
        messages = said(module, x)
        assert len(messages) == told
        assert all(message.startswith(f"‖W‖₂ = {norm} exceeds √(μ/L_σ) = 1") for message in messages)


def test_weights_that_are_loaded_are_looked_at():
    module, x = unit(0.9).eval(), random(2, 3)
    assert said(module, x) == []
    module.load_state_dict(unit(1.3).state_dict())
    assert len(said(module, x)) == 1


def test_a_ceiling_above_what_theorem_1_asks_for_counts():
    module, x = unit(0.9, max_norm=1.1).eval(), random(2, 3)
    assert said(module, x) == []
    scale_to(module, 5.0)
    assert said(module, x)[0].startswith("‖W‖₂ = 1.1 exceeds")


def test_a_norm_that_is_barely_too_large_is_written_with_the_digits_that_show_it():
    module, x = unit(0.9).eval(), random(2, 3)
    scale_to(module, 1.00001)
    assert said(module, x)[0].startswith("‖W‖₂ = 1.00001 exceeds √(μ/L_σ) = 1:")


def test_a_ceiling_that_is_lifted_later_counts():
    module, x = unit(5.0, max_norm=0.9).eval(), random(2, 3)
    assert said(module, x) == []
    module.max_norm = 3.0
    assert said(module, x)[0].startswith("‖W‖₂ = 3 exceeds")


def test_branches_that_come_to_be_coupled_too_strongly_are_told():
    units = [unit(0.8), unit(0.7)]
    module, x = MOptEq(units, HeritageDiversity(0.1)).eval(), random(2, 3)
    # L_σ‖W‖²(1 + λ(C-1)) = ‖W‖²·1.3
    for norm, told in ((0.8, 0), (0.9, 1), (0.95, 0), (0.85, 0), (0.95, 1)):
        scale_to(units[1], norm)
        messages = said(module, x)
        assert len(messages) == told
        assert all(f"= {1.3 * norm**2:.3g} is not below 1" in message for message in messages)


def test_ceilings_and_couplings_that_are_assigned_later_count():
    # L_σζ²(1 + λ(C-1)) = 0.64·1.3 at first; the weights are beyond their ceilings.
    def branches() -> MOptEq:
        return MOptEq([unit(5.0, max_norm=0.8) for _ in range(2)], HeritageDiversity(0.1)).eval()

    def lift(module: MOptEq) -> None:
        module.units[1].max_norm = 0.95

    def replace(module: MOptEq) -> None:
        module.units[0].W = unit(1.5, max_norm=None).W
        module.units[0].max_norm = None
        module.units[0].norm_checked = True

    def couple(module: MOptEq) -> None:
        module.coupling = HeritageDiversity(0.5)

    x = random(2, 3)
    for change, q in ((lift, 0.95**2 * 1.3), (replace, 1.5**2 * 1.3), (couple, 0.64 * 2.5)):
        module = branches()
        assert said(module, x) == []
        change(module)
        messages = said(module, x)
        assert len(messages) == 1
        assert f"= {q:.3g} is not below 1" in messages[0]
        module.uniqueness_checked = True
        assert said(module, x) == []


class Scaled(Dense):
    """An operator of one's own that does not say that its norm is kept, though it is."""

    def act(self, weights, domain, error) -> BoundOperator:
        return super().act((2 * weights[0],), domain, error)


class Shifted(Dense):
    """One whose norm is not what it is scaled to: `A + 2I`, scaled before the `2I` is added."""

    def act(self, weights, domain, error) -> BoundOperator:
        return super().act((weights[0] + 2 * torch.eye(4).to(weights[0]),), domain, error)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", [Scaled, Shifted])
def test_an_operator_of_ones_own_is_looked_at_as_its_ceiling_leaves_it(operator: type[Dense], training: bool):
    W, x = operator(4, 4), random(2, 3)
    W.weight.data.mul_(20)
    module = OptEqUnit(W, Dense(3, 4)).double().train(training)
    messages = said(module, x)
    acting = torch.linalg.matrix_norm(module.bind(x).W.tensors[0], 2).item()
    if operator is Scaled:
        assert acting == pytest.approx(0.97)
        assert messages == []
    else:
        assert acting > 1.5
        assert messages[0].startswith(f"‖W‖₂ = {acting:.7g} exceeds")


def test_branches_of_ones_own_operators_are_looked_at_as_their_ceilings_leave_them():
    def units(zeta: float, operator: type[Dense]) -> list[OptEqUnit]:
        return [OptEqUnit(operator(4, 4), Dense(3, 4), max_norm=zeta).double() for _ in range(2)]

    x, coupling = random(2, 3), HeritageDiversity(0.1)
    for zeta, told in ((0.85, 0), (0.95, 1)):  # L_σ‖W‖²(1 + λ(C-1)) = ‖W‖²·1.3
        branches = units(zeta, Scaled)
        for branch in branches:
            branch.W.weight.data.mul_(20)
        messages = said(MOptEq(branches, coupling).eval(), x)
        assert len(messages) == told
        assert all(f"= {1.3 * zeta**2:.3g} is not below 1" in message for message in messages)


def test_the_kernel_of_a_branch_is_that_of_its_ceiling_whatever_keeps_the_norm():
    # κ = ½ζ² of the kernel, and ‖W‖² 1.3 of weights that nothing keeps: q = ½·0.81 + 1.3‖W‖².
    x, coupling = random(2, 4), HeritageDiversity(0.1)
    branches = [
        KernelMap(Dense(4, 4, norm=Unconstrained()), Dense(4, 4), "sigmoid", max_norm=0.9).double()
        for _ in range(2)
    ]
    for norm, told in ((0.6, 0), (0.7, 1)):
        for branch in branches:
            branch.W.weight.data.mul_(norm / torch.linalg.matrix_norm(branch.W.weight.data, 2))
        messages = said(KernelMOptEq(branches, coupling).eval(), x)
        assert len(messages) == told
        assert all(f"= {0.405 + 1.3 * norm**2:.3g} is not below 1" in message for message in messages)


@pytest.mark.spec("R5.4")
def test_proposition_2_of_li_et_al_2022_holds_for_operators_of_ones_own():
    unit = OptEqUnit(Scaled(4, 4), Dense(3, 4)).double()
    unit.W.weight.data.mul_(20)
    unit.injection.operator.weight.data.mul_(0.1)
    assert reconstruction_bound(EquilibriumLayer(unit), random(2, 3), 0.01).shape == (2,)


def test_traces_are_left_alone():
    module, x = unit(1.2), random(2, 3)
    layer = EquilibriumLayer(module, gradient=Unrolled(3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(layer, x, check_trace=False)
    assert not any("exceeds" in str(warning.message) for warning in caught)
    with pytest.warns(RuntimeWarning, match="exceeds"):
        expected = layer(x)
    torch.testing.assert_close(traced(x), expected)
