import math

import pytest
import torch
from scipy.special import spence
from torch import nn

from opteq import Anderson, Dense, EquilibriumLayer, OptEqUnit, activations
from opteq.activations import (
    ACTIVATIONS,
    Activation,
    LeakyReLU,
    Sigmoid,
    Softplus,
    SoftThreshold,
    StronglyMonotone,
    get_activation,
)
from opteq.errors import ConfigError
from tests.conformance.instances import ACTIVATIONS as INSTANCES
from tests.conformance.reference import random


def test_every_activation_has_a_name_and_joins_the_conformance_suite():
    classes = {
        c
        for c in vars(activations).values()
        if isinstance(c, type) and issubclass(c, Activation) and c is not Activation
    }
    assert classes == set(ACTIVATIONS.values()) == {type(a) for a in INSTANCES}


def test_a_name_gives_the_activation_and_an_object_itself():
    assert get_activation("softplus") == Softplus()
    leaky = LeakyReLU(0.3)
    assert get_activation(leaky) is leaky


@pytest.mark.parametrize(
    "module",
    [
        nn.Identity(),
        nn.ReLU(),
        nn.LeakyReLU(0.3),
        nn.ELU(),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Softplus(),
        nn.Softshrink(0.4),
        nn.Hardtanh(),
    ],
    ids=repr,
)
def test_modules_of_torch_are_taken_for_what_they_compute(module: nn.Module):
    a = torch.linspace(-30, 30, 601, dtype=torch.float64)
    # Above its threshold of 20 torch's softplus leaves out e^{-20}.
    torch.testing.assert_close(get_activation(module)(a), module(a), rtol=1e-9, atol=1e-9)


def test_modules_that_compute_something_else_are_refused():
    class Louder(nn.ReLU):
        def forward(self, input):
            return 2 * super().forward(input)

    others = [Louder(), nn.Softplus(threshold=1), nn.ELU(0.5), nn.LeakyReLU(-0.1), nn.Hardtanh(-2, 2)]
    for module in others:
        with pytest.raises(ConfigError, match="Expected `activation` to be one of"):
            get_activation(module)


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(ConfigError, match=r"relu, leaky_relu.*got 'swish'"):
        get_activation("swish")
    with pytest.raises(
        ConfigError, match=r"or an object of opteq\.activations, got an object of torch\.nn.*\.GELU\."
    ):
        get_activation(torch.nn.GELU())
    with pytest.raises(ConfigError, match=r"got the class opteq\.activations\.Softplus\."):
        get_activation(Softplus)
    with pytest.raises(ConfigError, match=r"got the function relu\."):
        get_activation(torch.relu)
    with pytest.raises(ConfigError, match=r"got an object of builtins\.list\."):
        get_activation(["relu"])


@pytest.mark.parametrize(
    "build",
    [
        lambda: LeakyReLU(0.0),
        lambda: LeakyReLU(1.0),
        lambda: SoftThreshold(-0.1),
        lambda: StronglyMonotone(1.5),
    ],
)
def test_parameters_out_of_range_are_refused(build):
    with pytest.raises(ConfigError, match=r"Expected `(slope|threshold)`"):
        build()


def test_the_lipschitz_constant_is_no_option():
    # A certificate rests on it.
    with pytest.raises(TypeError):
        Sigmoid(lipschitz=0.1)  # type: ignore[call-arg]


def test_the_potential_of_softplus_is_a_dilogarithm():
    a = torch.linspace(-30, 30, 101, dtype=torch.float64)
    dilogarithm = torch.from_numpy(spence(1 + torch.exp(a).numpy()))  # Li₂(-eᵃ)
    torch.testing.assert_close(
        Softplus().potential(a), -dilogarithm - math.pi**2 / 12, rtol=1e-12, atol=1e-12
    )


def test_softplus_is_smooth_where_implementations_switch_to_the_identity():
    a = torch.linspace(18, 22, 401, dtype=torch.float64)
    torch.testing.assert_close(Softplus()(a), a + torch.log1p(torch.exp(-a)), rtol=0, atol=1e-14)


def test_the_penalty_of_softplus_at_its_boundary():
    penalty = Softplus().penalty(torch.tensor([0.0, 1e-12], dtype=torch.float64))
    torch.testing.assert_close(
        penalty, torch.full((2,), math.pi**2 / 12, dtype=torch.float64), rtol=0, atol=1e-9
    )


def test_double_derivatives_of_the_potential_of_softplus():
    a = torch.linspace(-5, 5, 11, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Softplus().potential, a)
    assert torch.autograd.gradgradcheck(Softplus().potential, a)


def test_a_relu_with_another_derivative_has_other_slopes():
    class Leaking(activations.ReLU):
        def derivative(self, a):
            return super().derivative(a) + 0.25 * (a <= 0)

    a, t = torch.tensor([-1.0, 2.0]), torch.ones(2)
    assert activations.ReLU().slopes(a).times(t).tolist() == [0.0, 1.0]
    assert Leaking().slopes(a).times(t).tolist() == [0.25, 1.0]


class Doubled(activations.ReLU):
    """`2 max(a, 0)`, and what belongs to it."""

    lipschitz = 2.0

    def __call__(self, a):
        return 2 * super().__call__(a)

    def derivative(self, a):
        return 2 * super().derivative(a)

    def potential(self, a):
        return 2 * super().potential(a)

    def penalty(self, v):
        return super().penalty(v) - 0.25 * v.square()


def test_a_relu_with_another_function_is_solved_for_that_one():
    unit = OptEqUnit(Dense(3, 4), Dense(3, 4), activation=Doubled(), max_norm=0.5).double()
    x = random(2, 3)
    z = EquilibriumLayer(unit, Anderson(tol=1e-12))(x).detach()
    equation = unit.bind(x)
    with torch.no_grad():
        expected = equation.W.adjoint(2 * (equation.W(z) + equation.injection).clamp(min=0))
    assert expected.norm() > 0.1
    torch.testing.assert_close(z, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("inherited", ["derivative", "potential", "penalty"])
def test_another_function_without_what_belongs_to_it_is_refused(activation, inherited):
    own = {name: lambda self, a: 2 * a for name in ("__call__", "derivative", "potential", "penalty")}
    del own[inherited]
    changed = type("Changed", (activation,), own)
    last = type("Last", (changed,), {})
    message = rf"Changed overrides `__call__` and inherits the `{inherited}` of {activation.__name__}, which"
    for cls in (changed, last):
        with pytest.raises(ConfigError, match=message):
            get_activation(cls())
    whole = type("Whole", (changed,), {inherited: lambda self, a: a})
    assert isinstance(get_activation(whole()), whole)
