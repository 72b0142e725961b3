"""Equations made from a similarity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.equation import (
    Equation,
    Gradients,
    Linearization,
    Reformulation,
    SymmetricForm,
    largest_eigenvalue,
    room,
    scaled_distance,
    symmetrized,
)
from opteq.errors import ConfigError
from opteq.objectives.similarity import Similarity
from opteq.results import Certificate
from opteq.tensors.tracing import recorded


@dataclass(frozen=True, eq=False)
class SimilarityEquation(Equation[Tensor]):
    """`y = σ(∇S(y))`, stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - S(y)` (Li et al. 2023, Eq. 5).

    State and readout: `y`.
    """

    similarity: Similarity
    activation: Activation

    def initial(self) -> Tensor:
        return self.similarity.initial()

    def first_iterate(self) -> Tensor:
        return self._activated(self.similarity.initial_gradient())

    def __call__(self, state: Tensor) -> Tensor:
        return self._activated(self.similarity.gradient(state))

    def _activated(self, argument: Tensor) -> Tensor:
        # In a graph the operations that gave the argument may need it.
        overwrite = self.similarity.owns_gradient and not recorded()
        return self.activation.overwrite(argument) if overwrite else self.activation(argument)

    @property
    def objective(self) -> Callable[[Tensor], Tensor]:
        """`G` at the feasible point `T(y)`: `y` itself may lie where the penalty is infinite."""
        return self._at_image

    def _at_image(self, state: Tensor) -> Tensor:
        y = self(state)
        terms = self.activation.penalty(y) + 0.5 * y.square()
        return terms.flatten(1).sum(1) - self.similarity.value(y)

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """`L_σ ‖∇²S‖`: everywhere, or at a state."""
        bound = self.similarity.hessian_bound(state)
        return replace(bound, value=self.activation.lipschitz * bound.value)

    def curvature(self, state: Tensor | None = None) -> Certificate:
        """The largest eigenvalue of `∇²S`: where `I - ∇²S ⪰ 0` everywhere, `G` is convex."""
        if state is None:
            return self.similarity.largest_eigenvalue_bound()
        return largest_eigenvalue(self.similarity.linearize(state).product, state)

    def distance_bound(self, state: Tensor) -> Certificate:
        """`κ‖y - T(y)‖` with the smaller of `1/(1 - L)`, where `T` contracts, and `1 + s/m`.

        A similarity with `∇²S ⪯ h I` and `‖∇²S‖ ≤ s` makes `G = f + ½‖·‖² - S` strongly convex with modulus
        `m = 1 - h`. The image `p = T(y)` has the subgradient `(∇S(y) - ∇S(p))`, no longer than `s‖y - p‖`,
        hence `‖p - y*‖ ≤ (s/m)‖y - p‖`. For the Gaussian `h = 2e^{-3/2}s`, and the bound stays finite up to
        `s = 2.24`.
        """
        contraction = self.contraction()
        factor = torch.where(contraction.value < 1, 1 / (1 - contraction.value), torch.inf)
        s = self.similarity.hessian_bound().value
        modulus = 1 - self.similarity.largest_eigenvalue_bound().value
        factor = torch.minimum(factor, torch.where(modulus > 0, 1 + s / modulus, torch.inf))
        return replace(contraction, value=scaled_distance(factor, self(state), state))

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        push, _ = self.similarity.rates(self.activation, next(pushes), everywhere=True)
        return push, self.contraction().value.max().item()

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        push, pull = self.similarity.rates(self.activation, next(pushes))
        return push / room(pull)

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        return _SimilarityLinearization(self, state)

    def reformulate(self, gradient: bool = False) -> Reformulation[Tensor]:
        """For gradient methods `y ↦ σ(y + t (∇S(y) - y))`, `t = 1/(1 + ‖∇²S‖)`, a proximal gradient step.

        `½‖y‖² - S` is smooth with constant `1 + ‖∇²S‖`, more than 1 where `∇²S` has negative
        eigenvalues; every sample has a `t` of its own, and `1/t` turns the residual of the step into a bound
        of that of `T`. The proximal operator of `t f` equals `σ` only where `f` is an indicator.
        """
        if not gradient:
            return super().reformulate()
        if not self.activation.indicator:
            raise ConfigError(
                f"Nesterov on a kernel map needs an activation whose penalty is an indicator (ReLU, HardTanh,"
                f" Identity), not {self.activation}; use Anderson."
            )
        bound = self.similarity.hessian_bound()
        if bound.kind == "estimate" or not bool(torch.isfinite(bound.value).all()):
            raise ConfigError(
                f"Nesterov needs a bound on the Hessian, and {type(self.similarity).__name__} has none here;"
                " use Anderson."
            )
        start = self.initial()
        inverse_step = 1 + bound.value
        step = inverse_step.reciprocal().to(start.dtype).view(-1, *[1] * (start.dim() - 1))

        def proximal_step(state: Tensor) -> Tensor:
            return self.activation(torch.lerp(state, self.similarity.gradient(state), step))

        return Reformulation(proximal_step, start, self.first_iterate(), gain=inverse_step.max().item())


class _SimilarityLinearization(Linearization[Tensor]):
    """`J = D H` with `D = diag σ'(∇S)` and `H = ∇²S` symmetric."""

    def __init__(self, equation: SimilarityEquation, state: Tensor) -> None:
        self._equation, self._hessian = equation, equation.similarity.linearize(state)
        self._slopes = equation.activation.slopes(self._hessian.gradient())

    @property
    def image(self) -> Tensor:
        return self._equation.activation(self._hessian.gradient())

    @property
    def symmetric(self) -> SymmetricForm[Tensor] | None:
        return symmetrized(self._slopes.sqrt().times, self._hessian.product, self._hessian.pullback)

    def jvp(self, tangent: Tensor) -> Tensor:
        return self._slopes.times(self._hessian.product(tangent))

    def vjp(self, cotangent: Tensor) -> Tensor:
        return self._hessian.product(self._slopes.times(cotangent))

    def pullback(self, cotangent: Tensor) -> Gradients:
        return self._hessian.pullback(self._slopes.times(cotangent))
