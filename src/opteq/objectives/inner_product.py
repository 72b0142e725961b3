"""Similarities that see the injection through its inner product with the state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.equation import Gradients, room
from opteq.errors import ConfigError
from opteq.objectives.similarity import Similarity, SimilarityLinearization
from opteq.operators.bound import BoundOperator
from opteq.options import check, require, strict_options
from opteq.results import Certificate, sample_sums


class InnerProductKernel(ABC):
    """A function `k` of one number, the inner product of injection and state."""

    @property
    @abstractmethod
    def largest_curvature(self) -> float:
        """`sup |k''|`, infinite where it is unbounded."""

    @property
    @abstractmethod
    def unit_curvature(self) -> float:
        """`sup |k''(t)|` over `|t| ≤ 1`."""

    @property
    def largest_slope(self) -> float:
        """`sup |k'|`, infinite where it is unbounded or not known."""
        return math.inf

    @abstractmethod
    def value(self, t: Tensor) -> Tensor:
        """`k(t)`."""

    @abstractmethod
    def slope(self, t: Tensor) -> Tensor:
        """`k'(t)`."""

    @abstractmethod
    def curvature(self, t: Tensor) -> Tensor:
        """`k''(t)`."""


@strict_options
@dataclass(frozen=True)
class PolynomialKernel(InnerProductKernel):
    """`k(t) = (a + t)^d`; `a = 0` is the form of Li et al. 2023, Table 4.

    That form is degenerate for `d ≥ 2`: `k'(0) = 0`, so `y = 0` is an equilibrium for every input, and
    every solve starts there. From `d = 3` on `k''` is unbounded, and so is the hidden objective from
    below, whatever `a`.

    Args:
        degree: `d`.
        offset: `a`.

    Raises:
        ConfigError: if `degree` is below 1 or `offset` is negative.
    """

    degree: int = 2
    offset: float = 1.0

    def __post_init__(self) -> None:
        require(self.degree >= 1, self, "degree", "at least 1")
        require(0 <= self.offset < math.inf, self, "offset", "at least 0 and finite")

    @property
    def largest_curvature(self) -> float:
        return math.inf if self.degree > 2 else self.unit_curvature

    @property
    def unit_curvature(self) -> float:
        return self.degree * (self.degree - 1) * (self.offset + 1.0) ** (self.degree - 2)

    @property
    def largest_slope(self) -> float:
        return math.inf if self.degree > 1 else 1.0

    def value(self, t: Tensor) -> Tensor:
        return (self.offset + t).pow(self.degree)

    def slope(self, t: Tensor) -> Tensor:
        return self.degree * (self.offset + t).pow(self.degree - 1)

    def curvature(self, t: Tensor) -> Tensor:
        if self.degree == 1:
            return torch.zeros_like(t)
        return self.degree * (self.degree - 1) * (self.offset + t).pow(self.degree - 2)


@strict_options
@dataclass(frozen=True)
class LinearKernel(PolynomialKernel):
    """`k(t) = t`, the similarity of OptEq."""

    degree: int = field(default=1, init=False, repr=False)
    offset: float = field(default=0.0, init=False, repr=False)


@strict_options
@dataclass(frozen=True)
class SigmoidKernel(InnerProductKernel):
    """`k(t) = tanh t`, with `|k''| = 2 |tanh t| (1 - tanh² t) ≤ 4/(3√3) = 0.77`."""

    @property
    def largest_curvature(self) -> float:
        return 4 / (3 * math.sqrt(3))

    @property
    def unit_curvature(self) -> float:
        return self.largest_curvature  # reached at tanh t = 1/√3, t = 0.66

    @property
    def largest_slope(self) -> float:
        return 1.0

    def value(self, t: Tensor) -> Tensor:
        return torch.tanh(t)

    def slope(self, t: Tensor) -> Tensor:
        return 1 - torch.tanh(t).square()

    def curvature(self, t: Tensor) -> Tensor:
        return -2 * torch.tanh(t) * self.slope(t)


KERNELS: dict[str, type[InnerProductKernel]] = {
    "linear": LinearKernel,
    "polynomial": PolynomialKernel,
    "sigmoid": SigmoidKernel,
}


def get_kernel(kernel: str | InnerProductKernel) -> InnerProductKernel:
    """The kernel of that name, or the object itself.

    Raises:
        ConfigError: if no kernel has that name.
    """
    if isinstance(kernel, InnerProductKernel):
        return kernel
    known = isinstance(kernel, str) and kernel in KERNELS
    check(known, "kernel", kernel, f"one of {', '.join(KERNELS)}, or an object such as PolynomialKernel(3)")
    return KERNELS[kernel]()


@dataclass(frozen=True, eq=False)
class InnerProductSimilarity(Similarity):
    """`S(y) = n k(⟨c, y⟩/n) + ½‖W y‖²`, with a unit `n` for inner products, per sample.

    With `t = ⟨c, y⟩/n`

        ∇S(y) = k'(t) c + WᵀW y
        ∇²S(y) = (k''(t)/n) c cᵀ + WᵀW.

    `n = 1` gives Table 4 of Li et al. 2023. The curvature along `c` grows with `‖c‖²`, which a larger
    `n` makes up for; the gradient at `y = 0` stays the same. `c` lives where `y` does.

    Attributes:
        injection: `c`, `(batch, channels, ...)`, shaped like the state.
        unit: `n`, `(batch,)`, or None for 1.
        W: the operator on the state, bound.
        kernel: `k`.
        steepness: `sup |k''|‖c‖²/n` over all inputs; infinite where it is unbounded.
    """

    owns_gradient = True

    injection: Tensor
    unit: Tensor | None
    W: BoundOperator
    kernel: InnerProductKernel
    steepness: float = math.inf

    def initial(self) -> Tensor:
        return torch.zeros_like(self.injection)

    def initial_gradient(self) -> Tensor:
        return self.kernel.slope(self.injection.new_zeros(())) * self.injection

    def value(self, y: Tensor) -> Tensor:
        return self.kernel_value(y) + 0.5 * sample_sums(self.lift(y).square())

    def kernel_value(self, y: Tensor) -> Tensor:
        """`n k(⟨c, y⟩/n)`, `(batch,)`."""
        kernel = self.kernel.value(self.product(y))
        return kernel if self.unit is None else self.unit * kernel

    def gradient(self, y: Tensor) -> Tensor:
        return self.respond(y, self.lift(y))

    def respond(self, y: Tensor, message: Tensor) -> Tensor:
        """`k'(t) c + Wᵀm`: `∇S` with a message `m` in place of `W y`."""
        slope = self.kernel.slope(self.product(y))
        return torch.addcmul(self.lower(message), per_sample(slope, y), self.injection)

    def product(self, y: Tensor) -> Tensor:
        """`t = ⟨c, y⟩/n`, `(batch,)`."""
        inner = inner_product(self.injection, y)
        return inner if self.unit is None else inner / self.unit

    def lift(self, y: Tensor) -> Tensor:
        """`W y`."""
        return self.W(y).to(y.dtype)

    def lower(self, z: Tensor) -> Tensor:
        """`Wᵀz`."""
        return self.W.adjoint(z).to(z.dtype)

    def linearize(self, y: Tensor) -> SimilarityLinearization:
        return InnerProductLinearization(self, y, self.lift(y))

    def hessian_bound(self, y: Tensor | None = None) -> Certificate:
        """`‖W‖² + sup|k''| ‖c‖²/n` everywhere; at `y`, with `|k''(t)|` in place of the supremum."""
        norm = self.norm_bound()
        return replace(norm, value=norm.value.square() + self.curvature_bound(y))

    def norm_bound(self) -> Certificate:
        """A bound on `‖W‖₂`."""
        return Certificate(self.W.norm_bound(), "bound", (self.W.norm_assumption,))

    def curvature_bound(self, y: Tensor | None = None) -> Tensor:
        """`(batch,)` `sup|k''| ‖c‖²/n`; at `y`, `|k''(t)| ‖c‖²/n`."""
        steepness = inner_product(self.injection, self.injection).detach().double()
        if self.unit is not None:
            steepness = steepness / self.unit.detach()
        if y is None:
            # An infinite supremum does not matter where c = 0.
            return torch.where(steepness > 0, self.kernel.largest_curvature * steepness, 0.0)
        return self.kernel.curvature(self.product(y).detach().double()).abs() * steepness

    def rates(self, activation: Activation, push: float, everywhere: bool = False) -> tuple[float, float]:
        """`(L_σ (a + κρ)‖U‖, L_σ(s² + κ))` with `s = ‖W‖` and `|k''|‖c‖²/n ≤ κ` for all inputs.

        `a` bounds `|k'|`, and `ρ` `‖y‖/‖c‖`. The Hessian `WᵀW + k''ccᵀ/n` in `y` is at most `q/L_σ` in norm,
        and the derivative of `k'(t)c` in `c` is `k'I + k''c(Ry)ᵀ/n`, with the reflection `R = I - 2ccᵀ/‖c‖²`
        where `n` grows with `‖c‖²` and `R = I` where `n = 1`: at most `a + κρ`. From `‖y‖ ≤ L_σ(s²‖y‖ +
        |k'|‖c‖)` follows `ρ = L_σ sup|k'|/(1 - L_σs²)`; or, since `|k'(t)| ≤ k'(0) + sup|k''||t|`, `ρ =
        L_σk'(0)/(1 - q)` and `a = k'(0) + κρ`, whichever are smaller; both need `σ(0) = 0`. The linear kernel
        has `κ = 0`, `a = 1`.
        """
        slope, kernel = activation.lipschitz, self.kernel
        pull, steepest = slope * self.norm_bound().value.item() ** 2, kernel.largest_slope
        if self.steepness:
            if everywhere:
                raise ConfigError(
                    f"No Lipschitz bound is known for {kernel} within other maps: how it changes with its"
                    " input grows with the state; use the linear kernel, or the kernel map alone."
                )
            zero = torch.zeros((), dtype=torch.float64)
            if activation(zero):
                raise ConfigError(
                    f"No Lipschitz bound is known for {kernel} with an activation that is not 0 at 0, such as"
                    f" {activation}; use relu or tanh."
                )
            if math.isinf(self.steepness):
                raise ConfigError(
                    f"No Lipschitz bound holds for {kernel} here: its curvature grows with the input; use"
                    " `normalise`, a `max_norm` and a kernel of bounded curvature."
                )
            first = kernel.slope(zero).abs().item()
            length = slope * steepest / room(pull)
            pull += slope * self.steepness
            length = min(length, slope * first / room(pull))
            steepest = min(steepest, first + self.steepness * length) + self.steepness * length
        return slope * steepest * push, pull


class InnerProductLinearization(SimilarityLinearization):
    """The derivatives of `k'(t) c + Wᵀm`, which is `∇S` where the message `m` is `W y`.

    Coupled branches receive another message than their own `W y`; how it moves with the states is theirs
    to say.
    """

    def __init__(self, similarity: InnerProductSimilarity, y: Tensor, message: Tensor) -> None:
        self._similarity, self._y, self._message = similarity, y, message
        self._product = similarity.product(y)
        self._slope = per_sample(similarity.kernel.slope(self._product), y)
        curvature = similarity.kernel.curvature(self._product)
        self._curvature = curvature if similarity.unit is None else curvature / similarity.unit

    def gradient(self) -> Tensor:
        s = self._similarity
        return torch.addcmul(s.lower(self._message), self._slope, s.injection)

    def product(self, v: Tensor) -> Tensor:
        return self.respond(v, self._similarity.lift(v))

    def respond(self, v: Tensor, move: Tensor) -> Tensor:
        """The derivative for moves `v` of the state and `move` of the message."""
        s = self._similarity
        along = self._curvature * inner_product(s.injection, v)
        return torch.addcmul(s.lower(move), per_sample(along, v), s.injection)

    def pullback(self, u: Tensor) -> Gradients:
        return self.pullback_with(u, self._similarity.lift(u))

    def pullback_with(self, u: Tensor, move: Tensor) -> Gradients:
        """Gradients of `⟨u, k'(t) c + Wᵀm⟩` where `⟨W u, m⟩` pulls `move` back to the `W y` behind `m`."""
        # k'(⟨c, y⟩/n) ⟨u, c⟩ + ⟨W u, m⟩ depends on c twice, and on W through W u and through m.
        s = self._similarity
        along = self._curvature * inner_product(s.injection, u)
        injection = torch.addcmul(self._slope * u, per_sample(along, u), self._y)
        weights = s.W.weight_gradient((u, self._message), (self._y, move))
        unit = () if s.unit is None else (-along * self._product,)
        return (injection, *unit, *weights)


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """`⟨a, b⟩` of every sample, `(batch,)`."""
    return sample_sums(a * b)


def per_sample(factor: Tensor, like: Tensor) -> Tensor:
    """`(batch,)` numbers in the shape that multiplies the samples of `like`."""
    return factor.view(-1, *[1] * (like.dim() - 1))
