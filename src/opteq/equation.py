"""The contract between maps, solvers and gradients: one equation `z = T(z)` per batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.results import Certificate, State, like, map_state, tensors_of

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class SymmetricForm:
    """The adjoint equation `u = g + Jᵀu` as `(I - S) v = enter(g)`, `u = leave(v, g)`, `S` symmetric.

    Attributes:
        matvec: `v ↦ S v`; `I - S` is positive definite where the map contracts. With a `metric` it is
            the `K` of `S = K M` instead.
        enter: right-hand side from the cotangent `g`.
        leave: adjoint solution `u` from `g` and a solution that was put once through `v ← enter(g) + S v`.
        pullback: the linearization's `pullback(leave(v, g))` from `v` and `g`, where that saves work.
        follow: where given, told after each product `S p` the lengths `(batch,)` of the steps that the solver
            takes along `p`, so that the form can add up what it made of `p` on the way.
        lifted: whether `v = F u` for an `F` of norm at most 1 or so, so that what a residual of `v` leaves in
            the adjoint equation is to be compared with `g`, not with `enter(g)`.
        metric: a positive semidefinite `M` in whose inner product `pᵀM q` the `S` is symmetric; None for
            the identity.
    """

    matvec: Callable[[State], State]
    enter: Callable[[State], State]
    leave: Callable[[State, State], State]
    pullback: Callable[[State, State], Gradients] | None = None
    follow: Callable[[Tensor], None] | None = None
    lifted: bool = False
    metric: Callable[[State], State] | None = None


class Linearization(ABC):
    """The derivative of an equation's map at one state, `J = ∂T/∂z`.

    Attributes:
        structure: `"psd"` (J symmetric positive semidefinite), `"symmetrizable"` (similar to a
            symmetric matrix) or `"none"`.
    """

    structure: str = "none"

    @property
    def symmetric(self) -> SymmetricForm | None:
        """The symmetric form of the adjoint equation, None where there is none.

        Made anew each time: kept, it and the linearization would hold on to each other, and with
        them the states of a backward pass, until Python looks for cycles.
        """
        return None

    @abstractmethod
    def jvp(self, tangent: State) -> State:
        """`J v`."""

    @abstractmethod
    def vjp(self, cotangent: State) -> State:
        """`Jᵀ u`."""

    @abstractmethod
    def pullback(self, cotangent: State) -> Gradients:
        """Gradients of `⟨u, T(z)⟩` with respect to the equation's `tensors`, `z` held constant."""

    def pullback_and_vjp(self, cotangent: State) -> tuple[Gradients, State]:
        """`pullback` and `vjp` of one cotangent; maps share the work of the two where they can."""
        return self.pullback(cotangent), self.vjp(cotangent)


@dataclass(frozen=True, slots=True)
class Substitution:
    """An equation `z = T(z)` in another variable, `u = F(u)`.

    Attributes:
        function: `F`.
        initial: where solves start.
        first: `F(initial)`.
        recover: the `z` that belongs to a `u`.
    """

    function: Callable[[State], State]
    initial: State
    first: State
    recover: Callable[[State], State]


class Equation(ABC):
    """All that is constant during one solve of `z = T(z)`, for one batch. Immutable.

    Attributes:
        tensors: every tensor that `T` depends on differentiably: injections, weights, scales.
    """

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        """The same equation with other values of `tensors`."""

    @property
    def has_energy(self) -> bool:
        """Whether a scalar hidden objective exists."""
        return True

    @property
    def conservative(self) -> bool:
        """Whether `z - T(z) = ∇energy(z)`, so that `J` is symmetric."""
        return self.proximal

    @property
    def proximal(self) -> bool:
        """Whether `T` is conservative and a proximal operator, `0 ⪯ J ⪯ I`."""
        return False

    @property
    def batch_coupled(self) -> bool:
        """Whether the samples of the batch enter each other's equation."""
        return False

    @abstractmethod
    def __call__(self, state: State) -> State:
        """`T(z)`, in memory that later calls leave alone: the last one is kept for the backward pass."""

    @abstractmethod
    def initial(self) -> State:
        """`z⁰`, the zero state."""

    def first_iterate(self) -> State:
        """`z¹ = T(z⁰)`, where solves start; maps compute it without the product `W z⁰ = 0`."""
        return self(self.initial())

    def prepared(self) -> Self:
        """The same equation with what pays to be computed once for a solve of it or of its adjoint.

        For equations cut off from the graph: what is computed is constant.
        """
        return self

    def substitution(self) -> Substitution | None:
        """The variable in which a solve is cheaper than in the state, once `prepared`; None without one.

        A relative residual of `u` is to bound that of `z`.
        """
        return None

    @abstractmethod
    def energy(self, state: State) -> Tensor:
        """`(batch,)` hidden objective, stationary at equilibria; see `opteq.theory.minimisers` for more."""

    @abstractmethod
    def contraction(self, state: State | None = None) -> Certificate:
        """`(batch,)` bound on the Lipschitz constant of `T`: global, or on `‖J‖` at a state."""

    def readout(self, state: State) -> State:
        """What the user gets from a state."""
        return state

    def linearize(self, state: State) -> Linearization:
        """The derivative at `state`; by automatic differentiation unless a map knows better."""
        return AutogradLinearization(self, state)

    def value_and_linearization(self, state: State) -> tuple[State, Linearization]:
        """`T(z)` and the derivative there; maps share the work of the two where they can."""
        return self(state), self.linearize(state)

    def gradient_map(self) -> tuple[Callable[[State], State], float]:
        """A map that is a (proximal) gradient step of length `t ≤ 1`, and the factor `1/t`.

        Accelerated gradient methods iterate this map; the factor turns its residual into an upper
        bound of the residual of `T`.

        Raises:
            ConfigError: where the map is not known to be such a step.
        """
        raise ConfigError(f"{type(self).__name__} is no gradient step; use Anderson instead of Nesterov.")

    def detach(self) -> Self:
        """The same equation cut off from the autograd graph."""
        return self.with_tensors(tuple(t.detach() for t in self.tensors))


class AutogradLinearization(Linearization):
    """Linearization of any equation by automatic differentiation of one evaluation."""

    def __init__(self, equation: Equation, state: State) -> None:
        with torch.enable_grad():
            self._inputs = tuple(t.detach().requires_grad_() for t in tensors_of(state))
            self._leaves = tuple(t.detach().requires_grad_() for t in equation.tensors)
            output = equation.with_tensors(self._leaves)(like(state, self._inputs))
            self._outputs = tensors_of(output)

    def jvp(self, tangent: State) -> State:
        # J v is the derivative of the linear function u ↦ Jᵀu, so reverse mode suffices.
        with torch.enable_grad():
            u = tuple(torch.zeros_like(t, requires_grad=True) for t in self._outputs)
            product = torch.autograd.grad(
                self._outputs, self._inputs, u, create_graph=True, materialize_grads=True
            )
        return like(tangent, torch.autograd.grad(product, u, tensors_of(tangent)))

    def vjp(self, cotangent: State) -> State:
        gradients = torch.autograd.grad(
            self._outputs,
            self._inputs,
            tensors_of(cotangent),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return like(cotangent, gradients)

    def pullback(self, cotangent: State) -> Gradients:
        return torch.autograd.grad(
            self._outputs, self._leaves, tensors_of(cotangent), retain_graph=True, allow_unused=True
        )


def symmetric_psd(matvec: Callable[[State], State]) -> SymmetricForm:
    """The symmetric form of a Jacobian that is symmetric itself."""
    return SymmetricForm(matvec, enter=lambda g: g, leave=lambda v, g: v)


def symmetrized(
    scale: Callable[[State], State],
    matvec: Callable[[State], State],
    pullback: Callable[[State], Gradients],
) -> SymmetricForm:
    """The symmetric form of `J = D H` with diagonal `D ⪰ 0`, `D^½ = scale`, and symmetric `H = matvec`.

    `u = g + H D u` is solved as `(I - D^½ H D^½) v = D^½ g`, then `u = g + H D^½ v`. Multiplied by `D^½`
    the latter reads `D u = D^½ v`: `pullback`, which takes `D u`, needs no further product with `H`.
    """
    return SymmetricForm(
        matvec=lambda v: scale(matvec(scale(v))),
        enter=scale,
        leave=lambda v, g: map_state(torch.add, g, matvec(scale(v))),
        pullback=lambda v, _: pullback(scale(v)),
    )


def eliminated(first: Callable[[State], State], second: Callable[[State], State]) -> SymmetricForm:
    """The symmetric form of `J = S_2 S_1`, `S_1` symmetric and `S_2` symmetric positive semidefinite.

    Multiplied by `S_2` the adjoint equation `(I - S_1 S_2) v = g` is symmetric, `S_2 - S_2 S_1 S_2`: its
    matrix is symmetric in the metric `S_2`. Solving it there, rather than the multiplied equation,
    keeps the condition number that of `I - S_1 S_2` when `S_2` is singular. `S_2 v` is determined, and
    with it `u = g + S_1 S_2 v`.
    """
    return SymmetricForm(matvec=first, enter=lambda g: g, leave=lambda v, g: v, metric=second)


class _HasTensors(Protocol):
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self: ...


_Part = TypeVar("_Part", bound=_HasTensors)


def with_tensors_of(
    parts: tuple[_Part, ...], tensors: tuple[Tensor, ...]
) -> tuple[tuple[_Part, ...], tuple[Tensor, ...]]:
    """`parts`, such as equations, with values for the `tensors` of each in turn, and the values left over."""
    replaced = []
    for part in parts:
        count = len(part.tensors)
        replaced.append(part.with_tensors(tensors[:count]))
        tensors = tensors[count:]
    return tuple(replaced), tensors
