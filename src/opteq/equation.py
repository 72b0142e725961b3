"""The contract between maps, solvers, gradients and theory: one equation `z = T(z)` per batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.results import Certificate, S, State, distance, like, map_state, tensors_of
from opteq.tensors.held import HoldsTensors
from opteq.tensors.lanczos import extreme_ritz_values

Gradients = tuple[Tensor | None, ...]

# Lanczos steps after which an eigenvalue at a state is taken to have settled.
_LANCZOS_STEPS = 50


@dataclass(frozen=True, slots=True)
class SymmetricForm(Generic[S]):
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

    matvec: Callable[[Any], Any]
    enter: Callable[[S], Any]
    leave: Callable[[Any, S], S]
    pullback: Callable[[Any, S], Gradients] | None = None
    follow: Callable[[Tensor], None] | None = None
    lifted: bool = False
    metric: Callable[[Any], Any] | None = None


class Linearization(ABC, Generic[S]):
    """The derivative of an equation's map at one state, `J = ∂T/∂z`."""

    @property
    @abstractmethod
    def image(self) -> S:
        """`T(z)`, for which most of the work is done."""

    @property
    def symmetric(self) -> SymmetricForm[S] | None:
        """The symmetric form of the adjoint equation, None where there is none.

        Made anew each time: kept, it and the linearization would hold on to each other, and with
        them the states of a backward pass, until Python looks for cycles.
        """
        return None

    @abstractmethod
    def jvp(self, tangent: S) -> S:
        """`J v`."""

    @abstractmethod
    def vjp(self, cotangent: S) -> S:
        """`Jᵀ u`."""

    @abstractmethod
    def pullback(self, cotangent: S) -> Gradients:
        """Gradients of `⟨u, T(z)⟩` with respect to the equation's `tensors`, `z` held constant."""

    def pullback_and_vjp(self, cotangent: S) -> tuple[Gradients, S]:
        """`pullback` and `vjp` of one cotangent; maps share the work of the two where they can."""
        return self.pullback(cotangent), self.vjp(cotangent)


@dataclass(frozen=True, slots=True)
class Reformulation(Generic[S]):
    """How a solve is to go about `z = T(z)`: an iteration `u ← F(u)` in a variable of its choice.

    Attributes:
        function: `F`.
        initial: where the solve starts.
        first: `F(initial)`, or a step of its own from there.
        recover: the `z` that belongs to a `u`, at least as near to the equilibrium; None where it is `u`.
        gain: `‖T(z) - z‖` is at most this times `‖F(u) - u‖`.
        size: `‖F(u)‖` is at most this times `‖z‖`.
        measured: whether both are only trusted in, so that the residual of `z` has to be computed in the end.
            Then `recover(F(u))` is what `T` makes of `recover(u)`.
    """

    function: Callable[[Any], Any]
    initial: Any
    first: Any
    recover: Callable[[Any], S] | None = None
    gain: float = 1.0
    size: float = 1.0
    measured: bool = False

    @property
    def scale(self) -> float:
        """The relative residual of `u` times this bounds that of `z`."""
        return self.gain * self.size

    def then(self, recover: Callable[[Any], Any], gain: float, size: float) -> Reformulation[S]:
        """The same iteration for the state `recover(z)`."""
        before = self.recover
        both = recover if before is None else lambda u: recover(before(u))
        return replace(self, recover=both, gain=gain * self.gain, size=size * self.size)


class Equation(HoldsTensors, ABC, Generic[S]):
    """All that is constant during one solve of `z = T(z)`, for one batch: a frozen dataclass.

    Its `tensors` are what `T` depends on differentiably: injections, weights, scales. A map of your own gives
    `__call__`, `initial` and `contraction`; all else has a default that is right for any map.
    """

    @property
    def structure(self) -> str:
        """What `T` is: `"proximal"`, `"conservative"` or `"none"`.

        Conservative: `z - T(z) = ∇objective(z)`, so that `J` is symmetric. Proximal: the same, and `T` is the
        proximal operator of a convex function, `0 ⪯ J ⪯ I`.
        """
        return "none"

    @property
    def batch_coupled(self) -> bool:
        """Whether the samples of the batch enter each other's equation."""
        return False

    @abstractmethod
    def __call__(self, state: S) -> S:
        """`T(z)`, in memory that later calls leave alone: the last one is kept for the backward pass."""

    @abstractmethod
    def initial(self) -> S:
        """`z⁰`, the zero state."""

    def first_iterate(self) -> S:
        """`z¹ = T(z⁰)`, where solves start; maps compute it without the product `W z⁰ = 0`."""
        return self(self.initial())

    def readout(self, state: S) -> S:
        """What the user gets from a state."""
        return state

    def linearize(self, state: S) -> Linearization[S]:
        """The derivative at `state`; by automatic differentiation unless a map knows better."""
        return AutogradLinearization(self, state)

    def linearize_evaluation(self, state: S) -> Linearization[S]:
        """The derivative of one evaluation of `T`, for gradients that differentiate a few of them.

        It is `linearize(state)`, unless that is of another map with the same equilibria.
        """
        return self.linearize(state)

    def reformulate(self, gradient: bool = False) -> Reformulation[S]:
        """How a solve is to go about this equation; for one that is cut off from the graph.

        This one function decides whether a faster way than iterating `T` itself is taken.

        Args:
            gradient: whether the iteration has to be a (proximal) gradient step of length at most 1, for
                accelerated gradient methods.

        Raises:
            ConfigError: where such a step is asked for and not known.
        """
        if gradient and self.structure != "proximal":
            raise ConfigError(f"{type(self).__name__} is no gradient step; use Anderson instead of Nesterov.")
        return Reformulation(self, self.initial(), self.first_iterate())

    @property
    def objective(self) -> Callable[[S], Tensor] | None:
        """The hidden objective, `(batch,)` at a state, stationary at equilibria; None without one."""
        return None

    @abstractmethod
    def contraction(self, state: S | None = None) -> Certificate:
        """`(batch,)` bound on the Lipschitz constant of `T`: global, or on `‖J‖` at a state."""

    def distance_bound(self, state: S) -> Certificate:
        """`(batch,)` bound on the distance of the readout to that of the equilibrium; infinite without one.

        Where `T` contracts with constant `L < 1`, `‖z - z*‖ ≤ ‖T(z) - z‖ / (1 - L)` (Banach).

        Raises:
            ConfigError: for a readout other than the state, which needs a bound of its own.
        """
        self._expect_plain_readout(state, "a `distance_bound`")
        bound = self.contraction()
        factor = torch.where(bound.value < 1, 1 / (1 - bound.value), torch.inf)
        return Certificate(scaled_distance(factor, self(state), state), bound.kind, bound.assumptions)

    def curvature(self, state: S | None = None) -> Certificate:
        """`(batch,)` largest eigenvalue of `I - ∇²(objective)`: a bound over all states, an estimate at one.

        At most 1 everywhere makes the objective convex, so that every equilibrium minimises it; below 1 at an
        equilibrium makes that a local minimiser. Maps scale the variables of their objective as suits them.

        Raises:
            ConfigError: where no objective is known that equilibria would be stationary for.
        """
        if self.structure == "none":
            raise ConfigError(
                f"The equilibria of {type(self).__name__} are fixed points, and no objective is known that"
                " they would be stationary for; see opteq.theory.theorem2 for deep models."
            )
        return self.contraction() if state is None else largest_eigenvalue(self.linearize(state).jvp, state)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        """Lipschitz constants of `T` in what its injections read, and in `z`.

        Args:
            pushes: Lipschitz constants of the injections, in the order in which a map lists them.

        Raises:
            ConfigError: where none are known.
        """
        raise ConfigError(f"No Lipschitz bound is known for {type(self).__name__}.")

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        """A Lipschitz constant of `x ↦ z*(x)`: `a / (1 - q)` with the `rates` `a` and `q < 1`.

        Raises:
            ConfigError: where none is known, as for a readout other than the state.
        """
        self._expect_plain_readout(self.initial(), "an `equilibrium_lipschitz`")
        push, pull = self.rates(pushes)
        return push / room(pull)

    def _expect_plain_readout(self, state: S, needed: str) -> None:
        if self.readout(state) is not state:
            raise ConfigError(
                f"{type(self).__name__} reads out something else than its state: give it {needed}."
            )


class AutogradLinearization(Linearization[S]):
    """Linearization of any equation by automatic differentiation of one evaluation."""

    def __init__(self, equation: Equation[S], state: S) -> None:
        with torch.enable_grad():
            self._inputs = tuple(t.detach().requires_grad_() for t in tensors_of(state))
            self._leaves = tuple(t.detach().requires_grad_() for t in equation.tensors)
            output = equation.with_tensors(self._leaves)(like(state, self._inputs))
            # What depends on nothing is a leaf, of whose graph there is nothing else.
            self._outputs = tuple(
                t if t.requires_grad else t.detach().requires_grad_() for t in tensors_of(output)
            )
            self._image = output

    @property
    def image(self) -> S:
        return map_state(Tensor.detach, self._image)

    def jvp(self, tangent: S) -> S:
        # J v is the derivative of the linear function u ↦ Jᵀu, so reverse mode suffices.
        with torch.enable_grad():
            u = tuple(torch.zeros_like(t, requires_grad=True) for t in self._outputs)
            product = torch.autograd.grad(
                self._outputs, self._inputs, u, create_graph=True, materialize_grads=True
            )
        # A T that is constant in z leaves zeros, which do not depend on u.
        return like(tangent, torch.autograd.grad(product, u, tensors_of(tangent), materialize_grads=True))

    def vjp(self, cotangent: S) -> S:
        gradients = torch.autograd.grad(
            self._outputs,
            self._inputs,
            tensors_of(cotangent),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return like(cotangent, gradients)

    def pullback(self, cotangent: S) -> Gradients:
        return torch.autograd.grad(
            self._outputs, self._leaves, tensors_of(cotangent), retain_graph=True, allow_unused=True
        )


def symmetric_psd(matvec: Callable[[S], S]) -> SymmetricForm[S]:
    """The symmetric form of a Jacobian that is symmetric itself."""
    return SymmetricForm(matvec, enter=lambda g: g, leave=lambda v, g: v)


def symmetrized(
    scale: Callable[[S], S],
    matvec: Callable[[S], S],
    pullback: Callable[[S], Gradients],
) -> SymmetricForm[S]:
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


def eliminated(first: Callable[[S], S], second: Callable[[S], S]) -> SymmetricForm[S]:
    """The symmetric form of `J = S_2 S_1`, `S_1` symmetric and `S_2` symmetric positive semidefinite.

    Multiplied by `S_2` the adjoint equation `(I - S_1 S_2) v = g` is symmetric, `S_2 - S_2 S_1 S_2`: its
    matrix is symmetric in the metric `S_2`. Solving it there, rather than the multiplied equation,
    keeps the condition number that of `I - S_1 S_2` when `S_2` is singular. `S_2 v` is determined, and
    with it `u = g + S_1 S_2 v`.
    """
    return SymmetricForm(matvec=first, enter=lambda g: g, leave=lambda v, g: v, metric=second)


def scaled_distance(factor: Tensor, left: State, right: State) -> Tensor:
    """`(batch,)` `κ‖a - b‖`, infinite where `κ` is: an exact fixed point need not be the only one."""
    return torch.where(torch.isinf(factor), torch.inf, factor * distance(left, right))


def largest_eigenvalue(product: Callable[[S], S], state: S) -> Certificate:
    """An estimate of the largest eigenvalue of a symmetric operator, per sample, by Lanczos' method.

    Args:
        product: `v ↦ A v` on states.
        state: for shape and layout.
    """
    sizes = [t.shape for t in tensors_of(state)]

    def flat(s: S) -> Tensor:
        return torch.cat([t.flatten(1) for t in tensors_of(s)], 1)

    def on_rows(rows: Tensor) -> Tensor:
        parts = rows.split([size[1:].numel() for size in sizes], 1)
        return flat(product(like(state, tuple(p.view(s) for p, s in zip(parts, sizes, strict=True)))))

    value = extreme_ritz_values(on_rows, flat(state), _LANCZOS_STEPS)[1]
    return Certificate(value, "estimate", (f"{_LANCZOS_STEPS} steps of Lanczos' method settle.",))


def room(pull: float) -> float:
    """`1 - q`.

    Raises:
        ConfigError: if that is not positive.
    """
    if pull >= 1:
        raise ConfigError(
            f"No Lipschitz bound holds for weights this large: the bound {pull:.3f} on how the map changes"
            " with its state is not below 1; keep ‖W‖ smaller with `max_norm`."
        )
    return 1 - pull
