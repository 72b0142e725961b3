"""Equations made from a similarity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.equation import Equation, Gradients, Linearization, SymmetricForm, symmetrized
from opteq.errors import ConfigError
from opteq.objectives.similarity import Similarity
from opteq.results import Certificate, State


@dataclass(frozen=True, eq=False)
class SimilarityEquation(Equation):
    """`y = σ(∇S(y))`, stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - S(y)` (Li et al. 2023, Eq. 5).

    State and readout: `y`.
    """

    similarity: Similarity
    activation: Activation

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.similarity.tensors

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return replace(self, similarity=self.similarity.with_tensors(tensors))

    def initial(self) -> Tensor:
        return self.similarity.initial()

    def first_iterate(self) -> Tensor:
        return self._activated(self.similarity.initial_gradient())

    def __call__(self, state: State) -> Tensor:
        assert isinstance(state, Tensor)
        return self._activated(self.similarity.gradient(state))

    def _activated(self, argument: Tensor) -> Tensor:
        # In a graph the operations that gave the argument may need it.
        overwrite = self.similarity.owns_gradient and not torch.is_grad_enabled()
        return self.activation.overwrite(argument) if overwrite else self.activation(argument)

    def energy(self, state: State) -> Tensor:
        """`G` at the feasible point `T(y)`: `y` itself may lie where the penalty is infinite."""
        y = self(state)
        terms = self.activation.penalty(y) + 0.5 * y.square()
        return terms.flatten(1).sum(1) - self.similarity.value(y)

    def contraction(self, state: State | None = None) -> Certificate:
        """`L_σ ‖∇²S‖`: everywhere, or at a state."""
        assert state is None or isinstance(state, Tensor)
        bound = self.similarity.hessian_bound(state)
        return replace(bound, value=self.activation.lipschitz * bound.value)

    def linearize(self, state: State) -> Linearization:
        assert isinstance(state, Tensor)
        return _SimilarityLinearization(self, state)

    def gradient_map(self) -> tuple[Callable[[State], State], float]:
        """`y ↦ σ(y + t (∇S(y) - y))` with `t = 1/(1 + ‖∇²S‖)`, a proximal gradient step on `G`.

        `½‖y‖² - S` is smooth with constant `1 + ‖∇²S‖`, more than 1 where `∇²S` has negative
        eigenvalues; every sample has a `t` of its own. The proximal operator of `t f` equals `σ` only where
        `f` is an indicator.
        """
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

        def proximal_step(state: State) -> Tensor:
            assert isinstance(state, Tensor)
            return self.activation(torch.lerp(state, self.similarity.gradient(state), step))

        return proximal_step, inverse_step.max().item()


class _SimilarityLinearization(Linearization):
    """`J = D H` with `D = diag σ'(∇S)` and `H = ∇²S` symmetric."""

    structure = "symmetrizable"

    def __init__(self, equation: SimilarityEquation, state: Tensor) -> None:
        self._hessian = equation.similarity.linearize(state)
        self._slopes = equation.activation.slopes(self._hessian.gradient())

    @property
    def symmetric(self) -> SymmetricForm | None:
        root = self._slopes.sqrt()

        def scale(v: State) -> Tensor:
            assert isinstance(v, Tensor)
            return root.times(v)

        return symmetrized(scale, self._product, self._pullback)

    def jvp(self, tangent: State) -> Tensor:
        return self._slopes.times(self._product(tangent))

    def vjp(self, cotangent: State) -> Tensor:
        assert isinstance(cotangent, Tensor)
        return self._product(self._slopes.times(cotangent))

    def pullback(self, cotangent: State) -> Gradients:
        assert isinstance(cotangent, Tensor)
        return self._pullback(self._slopes.times(cotangent))

    def _pullback(self, slope_times_cotangent: State) -> Gradients:
        assert isinstance(slope_times_cotangent, Tensor)
        return self._hessian.pullback(slope_times_cotangent)

    def _product(self, v: State) -> Tensor:
        assert isinstance(v, Tensor)
        return self._hessian.product(v)
