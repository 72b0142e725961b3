"""Monotone operator equilibrium networks of convolutions (Winston and Kolter 2020)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.equation import Equation, scaled_distance
from opteq.errors import ConfigError, ShapeError
from opteq.maps.base import EquilibriumMap, Injection
from opteq.models.baselines import fourier
from opteq.models.baselines.fourier import Sides
from opteq.operators.conv import Conv2d
from opteq.operators.starts import initial_weight
from opteq.options import check_counts, check_positive
from opteq.results import Certificate, State
from opteq.tensors.held import HoldsTensors

# One tensor per tier.
Tiers = tuple[Tensor, ...]


class ScaledKernel(nn.Module):
    """The 3×3 kernel `g V/‖V‖`, with the norm of all its numbers and a gain `g` that starts at 1."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = initial_weight((out_channels, in_channels, 3, 3), None)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self) -> Tensor:
        return self.gain * self.weight / self.weight.norm()


@dataclass(frozen=True)
class Tier(HoldsTensors):
    """What one tier does, on its torus: `S_i = C_i + D_iᵀD_i` within, `2A_iᵀ Z D_{i-1}` from the one before.

    Attributes:
        sides: height and width of the torus.
        circular: `C = mI + AᵀA - B + Bᵀ`, a circular convolution.
        up: `Aᵀ`.
        down: the circular convolution that `D` takes every other pixel of; None for the last tier.
    """

    sides: Sides
    circular: Tensor
    up: Tensor
    down: Tensor | None


@dataclass(frozen=True, eq=False)
class MonotoneEquation(Equation[Tiers]):
    """A splitting of `0 ∈ (I - W)z - c + ∂f(z)`, with `f` the indicator of `z ≥ 0` and zeros on the border.

    `I - W` is block lower triangular, and its symmetric part at least `m`.

    Attributes:
        tiers: what they do, first to last.
        injection: `c` of the first tier, on its torus; the others have none.
        m: the monotonicity.
        step: `α`.
    """

    tiers: tuple[Tier, ...]
    injection: Tensor
    m: float
    step: float

    def initial(self) -> Tiers:
        batch = len(self.injection)
        return tuple(
            self.injection.new_zeros(batch, tier.circular.shape[-1], *tier.sides) for tier in self.tiers
        )

    def readout(self, state: Tiers) -> Tensor:  # type: ignore[override]
        """The last tier within its border."""
        return F.relu(_inside(state[-1]))

    def distance_bound(self, state: Tiers) -> Certificate:
        """`‖T(u) - u‖ / (1 - L)`, with the Lipschitz constant `L` of `T`: reading out moves nothing apart."""
        bound = self.contraction()
        factor = torch.where(bound.value < 1, 1 / (1 - bound.value), torch.inf)
        return Certificate(scaled_distance(factor, self(state), state), bound.kind, bound.assumptions)

    def contraction(self, state: Tiers | None = None) -> Certificate:
        """`(batch,)` Lipschitz constant of `T`, from `m` and from a bound on `‖I - W‖`."""
        value = self._lipschitz(self._norm()).expand(len(self.injection))
        return Certificate(value, "bound", ("The norm of W is bounded for this height and width.",))

    @abstractmethod
    def _lipschitz(self, norm: Tensor) -> Tensor:
        """The Lipschitz constant of `T` for `‖I - W‖ ≤ norm`."""

    @torch.no_grad()
    def _norm(self) -> Tensor:
        """`‖I - W‖` is at most the norm of the matrix of its blocks' norms."""
        blocks = torch.zeros(len(self.tiers), len(self.tiers), dtype=torch.float64)
        before = torch.zeros((), dtype=torch.float64)
        for place, tier in enumerate(self.tiers):
            if place:
                blocks[place, place - 1] = 2 * fourier.norm(tier.up) * before
            before = before.new_zeros(()) if tier.down is None else fourier.norm(tier.down)
            blocks[place, place] = fourier.norm(tier.circular) + before**2
        return torch.linalg.matrix_norm(blocks, 2)

    def _shifted(self, state: Tiers) -> Tiers:
        """The state with `α c` added to its first tier."""
        first, *others = state
        return first + self.step * self.injection, *others


@dataclass(frozen=True, eq=False)
class ForwardBackwardEquation(MonotoneEquation):
    """`T(z) = prox_f(z - α((I - W)z - c))`, whose state is `z`."""

    def __call__(self, state: Tiers) -> Tiers:
        moved = tuple(z - self.step * v for z, v in zip(state, self._product(state), strict=True))
        return tuple(_prox(v) for v in self._shifted(moved))

    def _product(self, state: Tiers) -> list[Tensor]:
        """`(I - W) z`."""
        images, given = [], None
        for tier, z in zip(self.tiers, state, strict=True):
            transform = fourier.spectrum(z)
            total = fourier.times(tier.circular, transform)
            if given is not None:
                total = total + _received(tier, given)
            if tier.down is not None:
                given = _strided(tier.down, transform, tier.sides)
                total = total + _spread(tier.down, given)
            images.append(fourier.image(total, tier.sides))
        return images

    def _lipschitz(self, norm: Tensor) -> Tensor:
        """`‖I - α(I - W)‖² ≤ 1 - 2αm + α²‖I - W‖²`; below 1 for small `α`."""
        return (1 - 2 * self.step * self.m + (self.step * norm) ** 2).sqrt()


@dataclass(frozen=True, eq=False)
class PeacemanRachfordEquation(MonotoneEquation):
    """`T(u) = 2R(2z - u + αc) - (2z - u)` with `z = prox_f(u)` and `R = (I + α(I - W))⁻¹`; the state is `u`.

    Attributes:
        inverses: `(I + αC)⁻¹` of each tier.
        reduced: `(I + αD(I + αC)⁻¹Dᵀ)⁻¹` of each tier but the last, on its halved torus, from which
            Woodbury's identity makes `(I + αC + αDᵀD)⁻¹`.
    """

    inverses: tuple[Tensor, ...]
    reduced: tuple[Tensor, ...]

    def __call__(self, state: Tiers) -> Tiers:
        reflected = tuple(2 * _prox(u) - u for u in state)
        resolved = self._resolved(self._shifted(reflected))
        return tuple(2 * z - u for z, u in zip(resolved, reflected, strict=True))

    def _resolved(self, right: Tiers) -> list[Tensor]:
        """`R v`, tier by tier, as `I - W` is block lower triangular."""
        images, given = [], None
        for place, (tier, v) in enumerate(zip(self.tiers, right, strict=True)):
            transform = fourier.spectrum(v)
            if given is not None:
                transform = transform - self.step * _received(tier, given)
            if tier.down is not None:
                # By Woodbury's identity, and what it makes of the strided part is `D` of the result.
                across = _strided(tier.down, fourier.times(self.inverses[place], transform), tier.sides)
                halved = fourier.times(self.reduced[place], fourier.spectrum(across))
                given = fourier.image(halved, (tier.sides[0] // 2, tier.sides[1] // 2))
                transform = transform - self.step * _spread(tier.down, given)
            images.append(fourier.image(fourier.times(self.inverses[place], transform), tier.sides))
        return images

    def _lipschitz(self, norm: Tensor) -> Tensor:
        """`‖2R - I‖² ≤ 1 - 4αm/(1 + 2αm + α²‖I - W‖²)`, always below 1 (Giselsson 2017)."""
        twice = 2 * self.step * self.m
        return (1 - 2 * twice / (1 + twice + (self.step * norm) ** 2)).sqrt()


class MonotoneMap(EquilibriumMap):
    """`z = relu(W z + c)` with `W = (1-m)I - AᵀA + B - Bᵀ`, whose equilibrium exists and is unique.

    In tiers of 3×3 convolutions, every tier at half the height and width of the one before; the first one
    sees `c = U x + b`. `A` is block lower bidiagonal, with `A_i` on the diagonal and the strided
    convolutions `D_i` below it, and `B` such that `W` is block lower triangular:
    `W_ii = (1-m)I - A_iᵀA_i - D_iᵀD_i + B_i - B_iᵀ` and `W_{i,i-1} = -2A_iᵀD_{i-1}` (Winston and Kolter
    2020, §4).

    Each tier lives on a torus one pixel wider on every side than its image, where states of zero make the
    circular convolutions those with zero padding. The readout is the last tier, without that border.

    Args:
        channels: channels of the features.
        hidden: channels of the tiers, first to last.
        m: the monotonicity, positive.
        step: the step `α` of the splitting, positive.

    Raises:
        ConfigError: for no tiers or numbers out of range; when bound a `ShapeError` if height and width of
            the features cannot be halved often enough.
    """

    def __init__(self, channels: int, hidden: Sequence[int], m: float = 1.0, step: float = 1.0) -> None:
        super().__init__()
        if not isinstance(hidden, Sequence) or not hidden:
            raise ConfigError(f"Expected a list of at least one number of `hidden` channels, got {hidden!r}.")
        for n in hidden:
            check_counts(hidden=n)
        check_positive("m", m)
        check_positive("step", step)
        self.m, self.step = float(m), float(step)
        self.injection = Injection(Conv2d(channels, hidden[0]), hidden[0], bias=True)
        self.A = nn.ModuleList(ScaledKernel(n, n) for n in hidden)
        self.B = nn.ModuleList(ScaledKernel(n, n) for n in hidden)
        self.D = nn.ModuleList(ScaledKernel(a, b) for a, b in pairwise(hidden))

    def _bound(self, x: State, error: float) -> tuple[tuple[Tier, ...], Tensor]:
        """The tiers for the size of `x`, and `c` with its border."""
        c = F.pad(self.injection(x, error=error), (1, 1, 1, 1))
        sides, halvings = tuple(n - 2 for n in c.shape[2:]), len(self.D)
        if c.dim() != 4 or any(n % 2**halvings for n in sides):
            raise ShapeError(
                f"Expected `x` with a height and a width that {2**halvings} divides, got {tuple(sides)};"
                " change the image size or the number of tiers."
            )
        kernels = zip(self.A, self.B, [*self.D, None], strict=True)
        return tuple(self._tier(i, sides, *parts) for i, parts in enumerate(kernels)), c

    def _tier(
        self, place: int, image: Sequence[int], A: nn.Module, B: nn.Module, D: nn.Module | None
    ) -> Tier:
        sides = image[0] // 2**place + 2, image[1] // 2**place + 2
        a, b = (fourier.transfer(kernel(), sides) for kernel in (A, B))
        down = None if D is None else fourier.transfer(D(), sides)
        circular = self.m * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device) + a.mH @ a - b + b.mH
        return Tier(sides, circular, a.mH, down)

    def extra_repr(self) -> str:
        return f"m={self.m}, step={self.step}"


class ForwardBackward(MonotoneMap):
    """A `MonotoneMap` in forward-backward splitting, `z ← relu(z - α((I - W)z - c))`.

    The plain iteration converges for `α < 2m/‖I - W‖²`.
    """

    def bind(self, x: State, error: float = 0.0) -> ForwardBackwardEquation:
        return ForwardBackwardEquation(*self._bound(x, error), self.m, self.step)


class PeacemanRachford(MonotoneMap):
    """A `MonotoneMap` in Peaceman-Rachford splitting, whose plain iteration converges for every `α > 0`.

    `T(u) = 2R(2z - u + αc) - (2z - u)` with `z = relu(u)`; `R = (I + α(I - W))⁻¹` is one small inverse per
    frequency, computed once for a solve. Residuals are those of `u`.
    """

    def bind(self, x: State, error: float = 0.0) -> PeacemanRachfordEquation:
        tiers, c = self._bound(x, error)
        inverses = tuple(_inverse(tier.circular, self.step) for tier in tiers)
        reduced = tuple(
            _inverse(fourier.halved(tier.down @ inverse @ tier.down.mH, tier.sides), self.step)
            for tier, inverse in zip(tiers, inverses, strict=True)
            if tier.down is not None
        )
        return PeacemanRachfordEquation(tiers, c, self.m, self.step, inverses, reduced)


def _inverse(function: Tensor, step: float) -> Tensor:
    """`(I + αG)⁻¹`."""
    unit = torch.eye(function.shape[-1], dtype=function.dtype, device=function.device)
    return torch.linalg.inv(unit + step * function)


def _strided(down: Tensor, transform: Tensor, sides: Sides) -> Tensor:
    """`D z`, on the halved torus."""
    return fourier.every_other(fourier.image(fourier.times(down, transform), sides))


def _spread(down: Tensor, given: Tensor) -> Tensor:
    """The transform of `Dᵀ v`."""
    return fourier.times(down.mH, fourier.spectrum(fourier.spread(given)))


def _received(tier: Tier, given: Tensor) -> Tensor:
    """The transform of `2AᵀZ v`; `Z` adds the row and the column of the border that a halved torus lacks."""
    return 2 * fourier.times(tier.up, fourier.spectrum(F.pad(given, (0, 1, 0, 1))))


def _inside(x: Tensor) -> Tensor:
    return x[..., 1:-1, 1:-1]


def _prox(x: Tensor) -> Tensor:
    """`prox_f`: ReLU within, zeros on the border."""
    return F.pad(F.relu(_inside(x)), (1, 1, 1, 1))
