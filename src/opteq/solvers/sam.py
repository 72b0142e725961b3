"""Sequential averaging: the fixed point, among many, at which a second function is least."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.options import require, strict_options
from opteq.results import State, map_state


class Smooth(Protocol):
    """What SAM needs of a function: its gradient, and a Lipschitz constant of that or None."""

    @property
    def lipschitz(self) -> float | None: ...

    def gradient(self, z: Tensor, /) -> Tensor: ...


@strict_options
@dataclass(frozen=True)
class SAM:
    """The modified sequential averaging method (Xie et al. 2022, Eq. 11 and Theorem 5).

        z_k = β_k S_{λ_k}(z_{k-1}) + (1-β_k) T(z_{k-1}),     S_λ(z) = (1-γλ) z - γ∇R(z),
        β_k = η k^{-ρ},     λ_k = η k^{-c}.

    For a convex `R` with Lipschitz gradient and `ρ + 2c < 1` it converges to the fixed point of `T` with
    the least `R`, slowly: the error falls about as `k^{-c}`. For a strongly convex `R`, `c=None` sets
    `λ = 0`, and the error falls about as `k^{-ρ}`.

    It is no `Solver`: near a fixed point that is not the one looked for, the residual of `T` is small
    too, so a tolerance cannot tell when to stop. A layer takes it as
    `gradient=Unrolled(steps, select=SAM(R))`.

    Args:
        regulariser: `R`; anything with `gradient` and `lipschitz`.
        rho: `ρ > 0`.
        c: `c > 0`, or None for `λ = 0`.
        gamma: `γ > 0`; `1/(2L_R)` unless given.
        eta: `η`, in (0, 1]; `min(√(2L_R), L_R/2, ½)` unless given.

    Raises:
        ConfigError: for options out of range, or for an `R` without Lipschitz constant, to which the
            theorem does not apply, unless `gamma` and `eta` are given.
    """

    regulariser: Smooth
    rho: float = 0.5
    c: float | None = 0.2
    gamma: float | None = None
    eta: float | None = None

    def __post_init__(self) -> None:
        smooth = hasattr(self.regulariser, "gradient") and hasattr(self.regulariser, "lipschitz")
        require(smooth, self, "regulariser", "an object with `gradient` and `lipschitz`")
        require(self.rho > 0, self, "rho", "positive")
        require(self.c is None or self.c > 0, self, "c", "positive or None")
        require(self.rho + 2 * (self.c or 0) < 1, self, "rho", "less than 1 - 2c")
        require(self.gamma is None or self.gamma > 0, self, "gamma", "positive or None")
        require(self.eta is None or 0 < self.eta <= 1, self, "eta", "in (0, 1] or None")
        if self.regulariser.lipschitz is None and (self.gamma is None or self.eta is None):
            raise ConfigError(
                f"The gradient of {self.regulariser} has no Lipschitz constant to derive `gamma` and `eta`"
                " from; give both, such as gamma=0.1, eta=0.5."
            )

    def blend(self, k: int, state: State, image: State) -> State:
        """`z_k` from `z_{k-1}` and `T(z_{k-1})`, `k = 1, 2, …`."""
        gamma, eta = self._constants()
        beta = eta * k**-self.rho
        decay = 1 - gamma * (0.0 if self.c is None else eta * k**-self.c)

        def mixed(z: Tensor, t: Tensor) -> Tensor:
            return torch.lerp(t, decay * z - gamma * self.regulariser.gradient(z), beta)

        return map_state(mixed, state, image)

    @torch.no_grad()
    def select(self, function: Callable[[State], State], start: State, steps: int) -> State:
        """The iterate after `steps` steps from `start`, without a graph."""
        z = start
        for k in range(1, steps + 1):
            z = self.blend(k, z, function(z))
        return z

    def _constants(self) -> tuple[float, float]:
        constant = self.regulariser.lipschitz
        if constant is None:  # then both are given
            constant = math.nan
        gamma = 1 / (2 * constant) if self.gamma is None else self.gamma
        return gamma, min(math.sqrt(2 * constant), constant / 2, 0.5) if self.eta is None else self.eta
