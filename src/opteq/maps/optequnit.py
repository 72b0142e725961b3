"""The one-layer OptEq unit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from opteq.activations import Activation, get_activation
from opteq.equation import (
    Gradients,
    Linearization,
    Reformulation,
    SymmetricForm,
    symmetric_psd,
)
from opteq.maps.base import EquilibriumMap, Injection, bind_to, check_max_norm, expect_operator
from opteq.maps.hiddenvariable import HiddenVariable
from opteq.maps.watch import Watch
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.options import check_positive
from opteq.results import Certificate, State, squared_norm
from opteq.tensors.layouts import zero_state
from opteq.tensors.slopes import Slopes

# Evaluations that a solve is counted on to take, where that decides how it is computed.
_PRODUCTS = 8


class OptEqUnit(EquilibriumMap):
    """`T(z) = (1/μ) Wᵀ σ(W z + U x + b)`, a proximal operator (Xie et al. 2022, Eq. 3).

    `T = ∇ψ = prox_φ` with `ψ(z) = (1/μ) 1ᵀσ̃(W z + c)` and `φ = ψ* - ½‖·‖²`, provided that
    `μ ≥ L_σ ‖W‖²` (Theorem 1). Equilibria minimise the smooth convex

        Q(z) = ½‖z‖² - ψ(z),     ∇Q = z - T(z),     0 ⪯ ∇²Q ⪯ I.

    State and readout: `z`, of shape `(batch, W.in_channels, ...)`.

    Args:
        W: opteq operator from the state to the hidden channels.
        U: opteq operator (or any module) from the input to the hidden channels.
        activation: name of an activation in `opteq.activations`, or an object.
        bias: whether there is a `b`.
        mu: `μ > 0`.
        max_norm: ceiling `ζ` on `‖W‖₂`, which `W` keeps in the way that its `norm` says. None trusts the
            weights to stay small by themselves. A contraction needs `L_σ ζ² < μ`.

    Raises:
        ConfigError: for a `W` that is no opteq operator, channels that do not match, or options out
            of range.
    """

    def __init__(
        self,
        W: LinearOperator,
        U: nn.Module,
        activation: str | Activation = "relu",
        bias: bool = True,
        mu: float = 1.0,
        max_norm: float | None = 0.97,
    ) -> None:
        super().__init__()
        expect_operator(W, "W")
        check_positive("mu", mu)
        check_max_norm(max_norm)
        self.W = W
        self.injection = Injection(U, W.out_channels, bias)
        self.activation = get_activation(activation)
        self.mu, self.max_norm = float(mu), max_norm
        # Whether no one need look at a norm that is not imposed to be what Theorem 1 asks for.
        self.norm_checked = False
        self._watch = Watch()

    @property
    def largest_norm(self) -> float:
        """`√(μ/L_σ)`, what Theorem 1 asks `‖W‖₂` to be below."""
        return math.sqrt(self.mu / self.activation.lipschitz)

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return (self.injection,)

    def bind(self, x: State, error: float = 0.0) -> OptEqEquation:
        c = self.injection(x, error=error)
        W = bind_to(self.W, c, self.max_norm, error)
        # Asked anew each time: `max_norm` may have been assigned since.
        kept = self.W.kept_norm(self.max_norm) <= self.largest_norm
        looked_at = not (kept or self.norm_checked)
        if looked_at and self._watch.notices(self.training, lambda: self._exceeds(W.domain)):
            self.check_norm(W.domain)
        return OptEqEquation(c, W, self.activation, self.mu, kept)

    def check_norm(self, shape: tuple[int, ...]) -> float:
        """`‖W‖₂` on states of `shape` (without the batch), as it is kept; warns if it is too large.

        `bind` calls this where a unit without a sufficient ceiling has come to exceed it, and looks at the
        norm in eval mode and every twentieth time in training. Set `norm_checked` to spare that.
        """
        norm = self.W.norm(shape, self.max_norm).item()
        if norm > self.largest_norm * (1 + 1e-6):
            warnings.warn(
                f"‖W‖₂ = {norm:.7g} exceeds √(μ/L_σ) = {self.largest_norm:.7g}: the unit is no proximal"
                " operator and need not have an equilibrium; set `max_norm` or scale `W` down.",
                RuntimeWarning,
                stacklevel=3,
            )
        return norm

    def _exceeds(self, shape: tuple[int, ...]) -> bool:
        return self.W.norm(shape, self.max_norm).item() > self.largest_norm * (1 + 1e-6)

    def extra_repr(self) -> str:
        return f"activation={self.activation}, mu={self.mu}, max_norm={self.max_norm}"


@dataclass(frozen=True, eq=False)
class OptEqEquation(HiddenVariable[Tensor]):
    """`z = (1/μ) Wᵀ σ(W z + c)` for one batch.

    Attributes:
        injection: `c`.
        W: the operator, bound.
        activation: `σ`.
        mu: `μ`.
        kept: whether `L_σ‖W‖² ≤ μ` is imposed, and not only trusted in.
    """

    injection: Tensor
    W: BoundOperator
    activation: Activation
    mu: float
    kept: bool = False

    @property
    def structure(self) -> str:
        return "proximal"  # under the norm condition of Theorem 1

    def initial(self) -> Tensor:
        return zero_state(self.injection, self.W.domain)

    def first_iterate(self) -> Tensor:
        return self.pool(self.activation(self.injection))

    def reformulate(self, gradient: bool = False) -> Reformulation[Tensor]:
        """In `u = W z` where that is cheaper: `u = (1/μ) G σ(u + c)`, `G = W Wᵀ`, `z = (1/μ) Wᵀ σ(u + c)`.

        One product with `G` in place of one with `W` and one with `Wᵀ`. Since `T(z) - z` is
        `(1/μ) Wᵀ(σ(F(u) + c) - σ(u + c))` and `W z = F(u)`, the relative residual of `z` is at most
        `L_σ ‖W‖²/μ` times that of `u`, which is at most 1 where `‖W‖² ≤ μ/L_σ`, as Theorem 1 asks for.
        Where nothing imposes that it is measured, at the cost of another product with `Wᵀ`.
        """
        gram = None if gradient else self.gram
        if gram is None:
            return super().reformulate(gradient)

        def image(u: Tensor) -> Tensor:
            return self.over_mu(gram(self._hidden(u)))

        zero = torch.zeros_like(self.injection)
        largest = math.sqrt(self.mu / self.activation.lipschitz)
        return Reformulation(
            image,
            zero,
            image(zero),
            lambda u: self.pool(self._hidden(u)),
            gain=1 / largest,
            size=largest,
            measured=not self.kept,
        )

    @property
    def gram(self) -> Callable[[Tensor], Tensor] | None:
        """`y ↦ W Wᵀ y` by the matrix, where that pays for a solve."""
        # Under autocast the products of the map are rougher than those of its Gram matrix would be.
        if torch.is_autocast_enabled(self.injection.device.type):
            return None
        return self.W.gram(_PRODUCTS * len(self.injection))

    def _hidden(self, u: Tensor) -> Tensor:
        """`σ(u + c)`."""
        return self.activation.overwrite(u + self.injection)

    def over_mu(self, t: Tensor, power: float = 1.0) -> Tensor:
        """`μ^-power t`, in the memory of `t`."""
        return t if self.mu == 1 else t.div_(self.mu**power)

    def preactivation(self, state: Tensor) -> Tensor:
        """`W z + c`."""
        image = self.W(state)
        # Large tensors cost more to allocate than to fill. Under autocast the types differ.
        same = image.dtype == self.injection.dtype
        return image.add_(self.injection) if same else image + self.injection

    def hidden(self, state: Tensor) -> Tensor:
        """`y = σ(W z + c)`."""
        return self.activation.overwrite(self.preactivation(state))

    def pool(self, hidden: Tensor) -> Tensor:
        """`(1/μ) Wᵀ y`, which carries a hidden state `y` to `z`."""
        z = self.W.adjoint(hidden).to(hidden.dtype)
        return z if self.mu == 1 else z / self.mu

    def __call__(self, state: Tensor) -> Tensor:
        return self.pool(self.hidden(state))

    @property
    def objective(self) -> Callable[[Tensor], Tensor]:
        """`Q(z) = ½‖z‖² - (1/μ) 1ᵀσ̃(W z + c)`; at the equilibrium `Q(z*) = φ(z*)`."""
        return self._dual

    def _dual(self, state: Tensor) -> Tensor:
        potential = self.activation.potential(self.preactivation(state))
        return 0.5 * squared_norm(state) - potential.flatten(1).sum(1) / self.mu

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """`L_σ ‖W‖² / μ`, with `‖W‖` replaced by its bound; the same everywhere."""
        value = self.activation.lipschitz * self.W.norm_bound().square() / self.mu
        return Certificate(value.expand(len(self.injection)), "bound", (self.W.norm_assumption,))

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        """`L_σ‖W‖‖U‖/μ` and `L_σ‖W‖²/μ`.

        With slopes `D` and `B = WᵀD^½` differentiating the equilibrium gives `dz = B(μI - BᵀB)⁻¹D^½ dc`, so
        that `equilibrium_lipschitz` is attained where every slope is `L_σ`, as by a ReLU whose units are all
        active.
        """
        norm = self.W.norm_bound().item()
        steepness = self.activation.lipschitz * norm / self.mu
        return steepness * next(pushes), steepness * norm

    def hidden_rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        """`L_σ‖U‖` and `L_σ‖W‖`.

        The bound `L_σ‖U‖/(1 - L_σ‖W‖²/μ)` on `x ↦ y*(x)` that follows is attained where that of `rates` is.
        """
        steepness = self.activation.lipschitz
        return steepness * next(pushes), steepness * self.W.norm_bound().item()

    def linearize(self, state: Tensor) -> OptEqLinearization:
        return OptEqLinearization(self, state)

    def hidden_objective(self, hidden: Tensor) -> Tensor:
        """`φ`-valued objective of the reformulated form (Li et al. 2023, Eq. 4), `(batch,)`.

        `G(y)/μ` with `G(y) = 1ᵀf(y) + ½‖y‖² - ⟨c, y⟩ - ‖Wᵀy‖²/(2μ)`; `y = σ(W Wᵀy/μ + c)` is
        stationary for it and `z = Wᵀy/μ` links the two forms. Infinite outside the range of `σ`.
        """
        z = self.pool(hidden)
        terms = self.activation.penalty(hidden) + 0.5 * hidden.square() - self.injection * hidden
        return terms.flatten(1).sum(1) / self.mu - 0.5 * squared_norm(z)


class OptEqLinearization(Linearization[Tensor]):
    """`J = (1/μ) WᵀDW` with `D = diag σ'(W z + c)`: symmetric, positive semidefinite.

    `J = FᵀF` with `F = (D/μ)^½ W`, whose values are of the hidden shape.
    """

    def __init__(self, equation: OptEqEquation, state: Tensor) -> None:
        self._equation, self._state = equation, state
        preactivation = equation.preactivation(state)
        self._slopes = equation.activation.slopes(preactivation)
        self.hidden = equation.activation.overwrite(preactivation)

    @property
    def image(self) -> Tensor:
        return self._equation.pool(self.hidden)

    @cached_property
    def _root(self) -> Slopes:
        return self._slopes.sqrt()

    @property
    def symmetric(self) -> SymmetricForm[Tensor]:
        gram = self._equation.gram
        if gram is None:
            return symmetric_psd(self.jvp)

        # In q = F u, u = g + FᵀF u reads q = F g + FFᵀq, and FFᵀ is the Gram matrix between two diagonals.
        def matvec(q: Tensor) -> Tensor:
            return self._equation.over_mu(self._root.times_(gram(self._root.times(q))))

        def leave(q: Tensor, g: Tensor) -> Tensor:
            return self.lower(q).add_(g)

        def pullback(q: Tensor, g: Tensor) -> Gradients:
            return self.pullback_lifted(leave(q, g), q)

        return SymmetricForm(matvec, self.lift, leave, pullback, lifted=True)

    def lift(self, u: Tensor) -> Tensor:
        """`F u`."""
        return self._equation.over_mu(self._root.times_(self._raised(u)), 0.5)

    def lower(self, q: Tensor) -> Tensor:
        """`Fᵀ q`."""
        return self._lowered(self._equation.over_mu(self._root.times(q), 0.5))

    def jvp(self, tangent: Tensor) -> Tensor:
        return self._equation.pool(self._slopes.times_(self._raised(tangent)))

    def vjp(self, cotangent: Tensor) -> Tensor:
        return self.jvp(cotangent)

    def pullback(self, cotangent: Tensor) -> Gradients:
        return self._pullback(cotangent, self._equation.over_mu(self._slopes.times_(self._raised(cotangent))))

    def pullback_lifted(self, cotangent: Tensor, lifted: Tensor) -> Gradients:
        """`pullback` of a cotangent `u` of which `F u` is known."""
        return self._pullback(cotangent, self._equation.over_mu(self._root.times(lifted), 0.5))

    def pullback_and_vjp(self, cotangent: Tensor) -> tuple[Gradients, Tensor]:
        # The gradient of the injection is D W u/μ already.
        gradients = self.pullback(cotangent)
        injection = gradients[0]
        assert injection is not None
        return gradients, self._lowered(injection)

    def _raised(self, u: Tensor) -> Tensor:
        """`W u`, which autocast may make in another dtype."""
        return self._equation.W(u).to(u.dtype)

    def _lowered(self, y: Tensor) -> Tensor:
        """`Wᵀ y`, likewise."""
        return self._equation.W.adjoint(y).to(y.dtype)

    def _pullback(self, cotangent: Tensor, injection: Tensor) -> Gradients:
        # ⟨u, T(z)⟩ = ⟨W u, σ(W z + c)⟩/μ depends on W twice; its gradient towards c is D W u/μ.
        equation = self._equation
        hidden = self.hidden if equation.mu == 1 else self.hidden / equation.mu
        return (injection, *equation.W.weight_gradient((cotangent, hidden), (self._state, injection)))
