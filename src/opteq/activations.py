"""Activations with everything the hidden objective needs.

A monotone activation `σ` with slopes in `[0, L]` and `L ≤ 1` is the proximal operator of a convex
penalty `f` (Xie et al. 2022, Assumption 1):

    σ(a) = prox_f(a),     σ̃(a) = ∫₀ᵃ σ(t) dt,     σ̃* = f + ½(·)² + const.

From the equality case of Fenchel's inequality, at `v = σ(a)`

    f(v) = a v - σ̃(a) - ½ v²,

which is how penalties without an elementary form are evaluated. Every function here is elementwise
and keeps shape and dtype. Penalties are `+inf` outside the range of `σ`, and are normalised by the
formula above (`f(σ(0)) = -½ σ(0)²`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.options import require
from opteq.overrides import definer
from opteq.tensors.slopes import PositivePart, Slopes


class Activation(ABC):
    """An elementwise monotone function `σ` with its potential, penalty and slope."""

    lipschitz: float
    """Largest slope `L_σ`."""
    indicator = False
    """Whether `f` is an indicator (or zero), so that `prox_{tf} = σ` for every `t > 0`."""
    limits: tuple[float, float] = (-math.inf, math.inf)
    """The ends of the range of `σ`, outside which `f` is infinite."""

    @abstractmethod
    def __call__(self, a: Tensor) -> Tensor:
        """`σ(a)`."""

    def overwrite(self, a: Tensor) -> Tensor:
        """`σ(a)` for an `a` that no one needs afterwards, in its memory where that is possible."""
        return self(a)

    @abstractmethod
    def derivative(self, a: Tensor) -> Tensor:
        """`σ'(a)`; at a kink, the value autograd uses."""

    def slopes(self, a: Tensor) -> Slopes:
        """`σ'(a)` as what is multiplied by it; may go on reading `a`, which only `overwrite` may change."""
        return Slopes(self.derivative(a))

    @abstractmethod
    def potential(self, a: Tensor) -> Tensor:
        """`σ̃(a) = ∫₀ᵃ σ(t) dt`."""

    @abstractmethod
    def penalty(self, v: Tensor) -> Tensor:
        """`f(v)`, the convex function with `prox_f = σ`; `+inf` outside the range of `σ`."""


def _softplus(a: Tensor) -> Tensor:
    # From torch's default threshold of 20 on the error, 2e-9, would show in float64.
    return F.softplus(a, threshold=40.0)


def _outside(v: Tensor, inside: Tensor, value: Tensor) -> Tensor:
    return torch.where(inside, value, torch.full_like(v, math.inf))


def _half_square(a: Tensor) -> Tensor:
    return 0.5 * a * a


@dataclass(frozen=True)
class Identity(Activation):
    """`σ(a) = a`, `σ̃ = ½a²`, `f = 0`."""

    lipschitz = 1.0
    indicator = True

    def __call__(self, a: Tensor) -> Tensor:
        return a

    def derivative(self, a: Tensor) -> Tensor:
        return torch.ones_like(a)

    def potential(self, a: Tensor) -> Tensor:
        return _half_square(a)

    def penalty(self, v: Tensor) -> Tensor:
        return torch.zeros_like(v)


@dataclass(frozen=True)
class ReLU(Activation):
    """`σ(a) = max(a, 0)`, `σ̃ = ½max(a,0)²`, `f` the indicator of `v ≥ 0`."""

    lipschitz = 1.0
    limits = (0.0, math.inf)
    indicator = True

    def __call__(self, a: Tensor) -> Tensor:
        return F.relu(a)

    def overwrite(self, a: Tensor) -> Tensor:
        # Who overrides the function has another one.
        return torch.relu_(a) if type(self) is ReLU else super().overwrite(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (a > 0).to(a.dtype)

    def slopes(self, a: Tensor) -> Slopes:
        # Who overrides the derivative has other slopes.
        return PositivePart(a) if type(self) is ReLU else super().slopes(a)

    def potential(self, a: Tensor) -> Tensor:
        return _half_square(F.relu(a))

    def penalty(self, v: Tensor) -> Tensor:
        return _outside(v, v >= 0, torch.zeros_like(v))


@dataclass(frozen=True)
class LeakyReLU(Activation):
    """`σ(a) = max(a, s a)` with slope `0 < s < 1`; `f(v) = ½(1/s - 1) min(v,0)²`.

    Raises:
        ConfigError: if `slope` is not in (0, 1).
    """

    slope: float = 0.01
    lipschitz = 1.0

    def __post_init__(self) -> None:
        require(0 < self.slope < 1, self, "slope", "in (0, 1) (use ReLU for 0 and Identity for 1)")

    def __call__(self, a: Tensor) -> Tensor:
        return F.leaky_relu(a, self.slope)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.where(a > 0, torch.ones_like(a), self.slope)

    def potential(self, a: Tensor) -> Tensor:
        return 0.5 * a * self(a)

    def penalty(self, v: Tensor) -> Tensor:
        return (1 / self.slope - 1) * _half_square(v.clamp(max=0))


@dataclass(frozen=True)
class ELU(Activation):
    """`σ(a) = a` for `a > 0`, `eᵃ - 1` otherwise.

    `σ̃ = ½a²` or `eᵃ - 1 - a`; for `-1 ≤ v < 0`: `f(v) = (1+v) log(1+v) - v - ½v²`.
    """

    lipschitz = 1.0
    limits = (-1.0, math.inf)

    def __call__(self, a: Tensor) -> Tensor:
        return F.elu(a)

    def derivative(self, a: Tensor) -> Tensor:
        return a.clamp(max=0).exp()

    def potential(self, a: Tensor) -> Tensor:
        negative = a.clamp(max=0)
        return torch.where(a > 0, _half_square(a), torch.expm1(negative) - negative)

    def penalty(self, v: Tensor) -> Tensor:
        negative = v.clamp(-1, 0)
        value = torch.xlogy(1 + negative, 1 + negative) - negative - _half_square(negative)
        return _outside(v, v >= -1, value)


@dataclass(frozen=True)
class Tanh(Activation):
    """`σ = tanh`, `σ̃ = log cosh a`, `f(v) = v artanh v + ½log(1 - v²) - ½v²` on `|v| ≤ 1`."""

    lipschitz = 1.0
    limits = (-1.0, 1.0)

    def __call__(self, a: Tensor) -> Tensor:
        return torch.tanh(a)

    def derivative(self, a: Tensor) -> Tensor:
        return 1 - torch.tanh(a).square()

    def potential(self, a: Tensor) -> Tensor:
        # log cosh a = |a| + log(1 + e^{-2|a|}) - log 2 cannot overflow.
        size = a.abs()
        return size + _softplus(-2 * size) - math.log(2)

    def penalty(self, v: Tensor) -> Tensor:
        u = v.clamp(-1, 1)
        # v artanh v + ½ log(1-v²) = ½[(1+v) log(1+v) + (1-v) log(1-v)], finite at ±1.
        entropy = 0.5 * (torch.xlogy(1 + u, 1 + u) + torch.xlogy(1 - u, 1 - u))
        return _outside(v, v.abs() <= 1, entropy - _half_square(u))


@dataclass(frozen=True)
class Sigmoid(Activation):
    """`σ(a) = 1/(1+e^{-a})` (slope at most ¼), `σ̃ = softplus(a) - log 2`, `f` = negative entropy.

    `f(v) = v log v + (1-v) log(1-v) + log 2 - ½v²` on `0 ≤ v ≤ 1`.
    """

    lipschitz = 0.25
    limits = (0.0, 1.0)

    def __call__(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def derivative(self, a: Tensor) -> Tensor:
        s = torch.sigmoid(a)
        return s * (1 - s)

    def potential(self, a: Tensor) -> Tensor:
        return _softplus(a) - math.log(2)

    def penalty(self, v: Tensor) -> Tensor:
        u = v.clamp(0, 1)
        value = torch.xlogy(u, u) + torch.xlogy(1 - u, 1 - u) + math.log(2) - _half_square(u)
        return _outside(v, (v >= 0) & (v <= 1), value)


@dataclass(frozen=True)
class SoftThreshold(Activation):
    """`σ(a) = sign(a) max(|a| - t, 0)`, the proximal operator of `f = t|·|`.

    Raises:
        ConfigError: if `threshold` is negative.
    """

    threshold: float = 0.1
    lipschitz = 1.0

    def __post_init__(self) -> None:
        require(self.threshold >= 0, self, "threshold", "at least 0")

    def __call__(self, a: Tensor) -> Tensor:
        return F.softshrink(a, self.threshold)

    def derivative(self, a: Tensor) -> Tensor:
        return (a.abs() > self.threshold).to(a.dtype)

    def potential(self, a: Tensor) -> Tensor:
        return _half_square(self(a))

    def penalty(self, v: Tensor) -> Tensor:
        return self.threshold * v.abs()


@dataclass(frozen=True)
class HardTanh(Activation):
    """`σ(a) = clip(a, -1, 1)`, `σ̃ = ½a²` or `|a| - ½`, `f` the indicator of `|v| ≤ 1`."""

    lipschitz = 1.0
    limits = (-1.0, 1.0)
    indicator = True

    def __call__(self, a: Tensor) -> Tensor:
        return F.hardtanh(a)

    def derivative(self, a: Tensor) -> Tensor:
        return (a.abs() < 1).to(a.dtype)

    def potential(self, a: Tensor) -> Tensor:
        size = a.abs()
        return torch.where(size < 1, _half_square(a), size - 0.5)

    def penalty(self, v: Tensor) -> Tensor:
        return _outside(v, v.abs() <= 1, torch.zeros_like(v))


@dataclass(frozen=True)
class Softplus(Activation):
    """`σ(a) = log(1 + eᵃ)`; `σ̃(a) = -Li₂(-eᵃ) - π²/12`, a dilogarithm.

    The penalty has no elementary form: on `v > 0`, with `a = σ⁻¹(v) = log(eᵛ - 1)`,
    `f(v) = a v - σ̃(a) - ½v²`.
    """

    lipschitz = 1.0
    limits = (0.0, math.inf)

    def __call__(self, a: Tensor) -> Tensor:
        return _softplus(a)

    def derivative(self, a: Tensor) -> Tensor:
        return torch.sigmoid(a)

    def potential(self, a: Tensor) -> Tensor:
        return _SoftplusIntegral.apply(a)

    def penalty(self, v: Tensor) -> Tensor:
        u = v.clamp(min=torch.finfo(v.dtype).tiny)
        a = u + torch.log(-torch.expm1(-u))
        # At v = 0 the limit of a·v is 0 and σ̃(-∞) = -π²/12.
        value = torch.where(v > 0, a * u - _SoftplusIntegral.apply(a) - _half_square(u), math.pi**2 / 12)
        return _outside(v, v >= 0, value.to(v.dtype))


@dataclass(frozen=True)
class StronglyMonotone(Activation):
    """`σ(a) = s a + (1-s) softplus(a)`, slopes in `[s, 1]` (Xie et al. 2022, Theorem 6, with s = 0.1).

    The penalty is evaluated through `σ⁻¹`, found by Newton's method.

    Raises:
        ConfigError: if `slope` is not in (0, 1).
    """

    slope: float = 0.1
    lipschitz = 1.0

    def __post_init__(self) -> None:
        require(0 < self.slope < 1, self, "slope", "in (0, 1)")

    def __call__(self, a: Tensor) -> Tensor:
        return self.slope * a + (1 - self.slope) * _softplus(a)

    def derivative(self, a: Tensor) -> Tensor:
        return self.slope + (1 - self.slope) * torch.sigmoid(a)

    def potential(self, a: Tensor) -> Tensor:
        return self.slope * _half_square(a) + (1 - self.slope) * _SoftplusIntegral.apply(a)

    def penalty(self, v: Tensor) -> Tensor:
        a = self._inverse(v)
        return a * v - self.potential(a) - _half_square(v)

    def _inverse(self, v: Tensor) -> Tensor:
        # σ is convex and increasing, so Newton from the right of the root decreases monotonically;
        # σ(a) ≥ max(a, s a) puts min(v, v/s) there.
        a = torch.minimum(v, v / self.slope)
        for _ in range(60):
            a = a - (self(a) - v) / self.derivative(a)
        return a


@lru_cache(maxsize=1)
def _gauss_legendre() -> tuple[Tensor, Tensor]:
    """Nodes and weights of 48-point Gauss-Legendre quadrature on [0, 1] (Golub and Welsch)."""
    k = torch.arange(1, 48, dtype=torch.float64)
    beta = k / torch.sqrt(4 * k * k - 1)
    nodes, vectors = torch.linalg.eigh(torch.diag(beta, 1) + torch.diag(beta, -1))
    return (nodes + 1) / 2, vectors[0].square()


class _SoftplusIntegral(torch.autograd.Function):
    """`∫₀ᵃ log(1 + eᵗ) dt`, accurate to rounding for every finite `a`; its gradient is softplus.

    `softplus(t) = t + softplus(-t)`, so with `x = |a|` and the bounded `s(x) = ∫₀ˣ log(1 + e^{-t}) dt`
    the value is `½a² + s(x)` for `a ≥ 0` and `-s(x)` below. `s` is integrated by quadrature up to
    `x = 3`; beyond, the series `log(1 + e^{-t}) = Σ (-1)ᵏ⁻¹ e^{-kt}/k` is integrated term by term.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        x = a.abs().to(torch.float64)
        near = x.clamp(max=3.0)
        nodes, weights = (t.to(a.device) for t in _gauss_legendre())
        integral = near * (_softplus(-near[..., None] * nodes) * weights).sum(-1)
        for k in range(1, 14):
            tail = (math.exp(-3.0 * k) - torch.exp(-k * x.clamp(min=3.0))) / k**2
            integral = integral + (-1) ** (k - 1) * tail
        return torch.where(a >= 0, 0.5 * x * x + integral, -integral).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return grad_outputs[0] * _softplus(a)


ACTIVATIONS: dict[str, type[Activation]] = {
    "identity": Identity,
    "relu": ReLU,
    "leaky_relu": LeakyReLU,
    "elu": ELU,
    "tanh": Tanh,
    "sigmoid": Sigmoid,
    "softplus": Softplus,
    "soft_threshold": SoftThreshold,
    "hardtanh": HardTanh,
    "strongly_monotone": StronglyMonotone,
}


def get_activation(activation: str | Activation | nn.Module) -> Activation:
    """The activation of that name, the object itself, or that of a module of `torch.nn`.

    Raises:
        ConfigError: if there is none, or if its class overrides `__call__` and not what belongs to it.
    """
    found = of_module(activation) if isinstance(activation, nn.Module) else activation
    if isinstance(found, Activation):
        _expect_own_companions(type(found))
        return found
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        got = repr(activation) if isinstance(activation, str) else _kind(activation)
        raise ConfigError(
            f"Expected `activation` to be one of {', '.join(ACTIVATIONS)}, or an object of opteq.activations,"
            f" got {got}."
        )
    return ACTIVATIONS[activation]()


def _expect_own_companions(cls: type[Activation]) -> None:
    """Raise a `ConfigError` if a class changes `σ` and inherits the derivative or the like of another."""
    changes = definer(cls, "__call__")
    known_by_then = cls.__mro__[: cls.__mro__.index(changes) + 1]
    for name in ("derivative", "potential", "penalty"):
        if definer(cls, name) not in known_by_then:
            raise ConfigError(
                f"{changes.__name__} overrides `__call__` and inherits the `{name}` of"
                f" {definer(cls, name).__name__}, which belongs to another function; give it a `{name}` too."
            )


def of_module(module: nn.Module) -> Activation | None:
    """The activation that a module of `torch.nn` applies; None for others and for subclasses."""
    match module if type(module).__module__.startswith("torch.nn.") else None:
        case nn.Identity():
            return Identity()
        case nn.ReLU():
            return ReLU()
        case nn.LeakyReLU(negative_slope=slope) if 0 < slope < 1:
            return LeakyReLU(slope)
        case nn.ELU(alpha=1.0):
            return ELU()
        case nn.Tanh():
            return Tanh()
        case nn.Sigmoid():
            return Sigmoid()
        case nn.Softplus(beta=1.0, threshold=threshold) if threshold >= 20:
            return Softplus()
        case nn.Softshrink(lambd=threshold):
            return SoftThreshold(threshold)
        case nn.Hardtanh(min_val=-1.0, max_val=1.0):
            return HardTanh()
    return None


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__module__}.{value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"  # type: ignore[attr-defined]
    return f"an object of {type(value).__module__}.{type(value).__name__}"
