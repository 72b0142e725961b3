"""Similarities: the part of a hidden objective that couples state and injection.

A kernel equilibrium model is its similarity `S(y; c)`: the equilibrium of `y = σ(∇_y S(y; c))` is
stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - S(y; c)` (Li et al. 2023, Eq. 5).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from opteq.activations import Activation
from opteq.equation import Gradients
from opteq.errors import ConfigError
from opteq.results import Certificate
from opteq.tensors.held import HoldsTensors


class SimilarityLinearization(ABC):
    """The first and the second derivative of a similarity at one state."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """`∇S`."""

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """Hessian-vector product `∇²S v`."""

    @abstractmethod
    def pullback(self, u: Tensor) -> Gradients:
        """Gradients of `⟨u, ∇S(y)⟩` with respect to the similarity's `tensors`."""


class Similarity(HoldsTensors, ABC):
    """`S(y; c)` with everything that depends on the input bound into it, for one batch: a frozen dataclass.

    States `y` have shape `(batch, ...)`; values are per sample, `(batch,)`.

    Attributes:
        owns_gradient: whether `gradient` and `initial_gradient` give memory of their own, which an equation
            may write into where there is no graph.
    """

    owns_gradient = False

    @abstractmethod
    def initial(self) -> Tensor:
        """A zero state of the right shape and layout."""

    def initial_gradient(self) -> Tensor:
        """`∇S(0)`."""
        return self.gradient(self.initial())

    @abstractmethod
    def value(self, y: Tensor) -> Tensor:
        """`S(y; c)`, `(batch,)`."""

    @abstractmethod
    def gradient(self, y: Tensor) -> Tensor:
        """`∇_y S(y; c)`."""

    @abstractmethod
    def linearize(self, y: Tensor) -> SimilarityLinearization:
        """The Hessian at `y`."""

    @abstractmethod
    def hessian_bound(self, y: Tensor | None = None) -> Certificate:
        """`(batch,)` bound on `‖∇²S‖₂`: everywhere, or at a state."""

    def largest_eigenvalue_bound(self) -> Certificate:
        """`(batch,)` bound on the largest eigenvalue of `∇²S` over all states."""
        return self.hessian_bound()

    def rates(self, activation: Activation, push: float, everywhere: bool = False) -> tuple[float, float]:
        """`(a, q)` for which `a / (1 - q)` is a Lipschitz constant of `x ↦ y*` for any `σ` like `activation`.

        Args:
            activation: `σ`.
            push: a Lipschitz constant of `x ↦ c`.
            everywhere: whether `a` has to be a Lipschitz constant of `x ↦ σ(∇S(y))` at every state `y`, and
                not only at equilibria.

        Raises:
            ConfigError: where none is known.
        """
        raise ConfigError(f"No Lipschitz bound is known for {type(self).__name__}.")
