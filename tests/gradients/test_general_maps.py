"""Gradient methods on a map that offers nothing but its values: no symmetry, two branches."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from opteq import Anderson, EquilibriumLayer, Implicit, OneStep, Phantom, Unrolled
from opteq.equation import AutogradLinearization, Equation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap
from opteq.results import Certificate, State
from tests.conformance.reference import random


class Pair(EquilibriumMap):
    """`a = tanh(A b + x)`, `b = tanh(B a) + ½ sin(B a)`, of 4 and of 2×3 numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(0.3 * random(4, 6, seed=1))
        self.second = nn.Parameter(0.3 * random(6, 4, seed=2))

    def bind(self, x: State, error: float = 0.0) -> "PairEquation":
        assert isinstance(x, Tensor)
        return PairEquation(x, self.first, self.second)


@dataclass(frozen=True, eq=False)
class PairEquation(Equation):
    x: Tensor
    first: Tensor
    second: Tensor

    def initial(self):
        return self.x.new_zeros(len(self.x), 4), self.x.new_zeros(len(self.x), 2, 3)

    def __call__(self, state):
        a, b = state
        mixed = a @ self.second.mT
        return (
            torch.tanh(b.flatten(1) @ self.first.mT + self.x),
            (mixed.tanh() + 0.5 * mixed.sin()).unflatten(1, (2, 3)),
        )

    def contraction(self, state=None) -> Certificate:
        raise NotImplementedError


def gradients(layer: EquilibriumLayer, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    a, b = layer(x)
    value = (a * random(*a.shape, seed=3)).sum() + (b * random(*b.shape, seed=4)).sum()
    return list(torch.autograd.grad(value, [x, *layer.parameters()]))


def adjoint_layer(method) -> EquilibriumLayer:
    return EquilibriumLayer(Pair(), Anderson(tol=1e-13, max_steps=1000), method)


@pytest.fixture(scope="module")
def exact() -> list[Tensor]:
    return gradients(EquilibriumLayer(Pair(), gradient=Unrolled(300)), random(5, 4))


@pytest.mark.parametrize("method", ["auto", "anderson", "gmres"])
@pytest.mark.spec("R3.1")
def test_implicit_gradients_need_no_symmetry(method: str, exact: list[Tensor]):
    computed = gradients(adjoint_layer(Implicit(tol=1e-12, max_steps=300, method=method)), random(5, 4))
    for a, b in zip(computed, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_conjugate_gradients_are_refused_without_symmetry():
    layer = adjoint_layer(Implicit(method="cg"))
    a, _ = layer(random(2, 4).requires_grad_())
    with pytest.raises(ConfigError, match=r"no symmetric form.*use 'auto' or 'gmres'"):
        a.sum().backward()


@pytest.mark.parametrize(
    "method", [Phantom(200, 0.9), Phantom(200, 0.9, "neumann")], ids=["unroll", "neumann"]
)
@pytest.mark.spec("R3.3")
def test_many_phantom_steps_tend_to_the_exact_gradient(method: Phantom, exact: list[Tensor]):
    for a, b in zip(gradients(adjoint_layer(method), random(5, 4)), exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.spec("R3.4")
def test_onestep_is_one_application(exact: list[Tensor]):
    layer, x = adjoint_layer(OneStep()), random(5, 4).requires_grad_()
    star = tuple(t.detach() for t in layer(x))
    a, b = layer.map.bind(x)(star)
    value = (a * random(*a.shape, seed=3)).sum() + (b * random(*b.shape, seed=4)).sum()
    expected = torch.autograd.grad(value, [x, *layer.parameters()])
    for computed, e in zip(gradients(layer, x.detach()), expected, strict=True):
        torch.testing.assert_close(computed, e, rtol=1e-11, atol=1e-12)


@pytest.mark.spec("R3.2")
def test_checkpointing_of_two_branches(exact: list[Tensor]):
    computed = gradients(EquilibriumLayer(Pair(), gradient=Unrolled(300, checkpoint=True)), random(5, 4))
    for a, b in zip(computed, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "method", [Implicit(tol=1e-12, max_steps=300), Phantom(200), Unrolled(300)], ids=repr
)
def test_a_branch_that_the_loss_ignores(method):
    solver = None if isinstance(method, Unrolled) else Anderson(tol=1e-13, max_steps=1000)
    layer, x = EquilibriumLayer(Pair(), solver, method), random(5, 4).requires_grad_()
    gradient = torch.autograd.grad(layer(x)[1].sum(), x)[0]
    direction, step = random(5, 4, seed=9), 1e-5
    with torch.no_grad():
        difference = (layer(x + step * direction)[1] - layer(x - step * direction)[1]).sum() / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), difference, rtol=1e-7, atol=0)


def test_linearization_by_automatic_differentiation():
    equation = Pair().bind(random(1, 4)).detach()
    state = random(1, 4, seed=5), random(1, 2, 3, seed=6)

    def flat(v: Tensor) -> Tensor:
        a, b = equation((v[:4].reshape(1, 4), v[4:].reshape(1, 2, 3)))
        return torch.cat((a.flatten(), b.flatten()))

    dense = torch.autograd.functional.jacobian(flat, torch.cat([t.flatten() for t in state]))
    linearization = AutogradLinearization(equation, state)
    v = random(10, seed=7)
    parts = v[:4].reshape(1, 4), v[4:].reshape(1, 2, 3)
    for product, expected in ((linearization.jvp, dense @ v), (linearization.vjp, dense.mT @ v)):
        a, b = product(parts)
        torch.testing.assert_close(torch.cat((a.flatten(), b.flatten())), expected, rtol=1e-12, atol=1e-13)
    assert linearization.symmetric is None
    assert equation.structure == "none"


def test_the_derivative_of_a_map_that_does_not_read_its_state_is_zero():
    @dataclass(frozen=True, eq=False)
    class Constant(PairEquation):
        def __call__(self, state):
            return torch.tanh(self.x), self.x.new_ones(len(self.x), 2, 3)

    pair = Constant(random(2, 4), random(4, 6), random(6, 4))
    state = (random(2, 4, seed=1), random(2, 2, 3, seed=2))
    linearization = pair.linearize(state)
    for product in (linearization.jvp(state), linearization.vjp(state)):
        assert [t.shape for t in product] == [t.shape for t in state]
        assert not any(t.any() for t in product)
