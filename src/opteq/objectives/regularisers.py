"""Regularisers of features, sample by sample (Xie et al. 2022, Table 2)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.errors import ConfigError
from opteq.options import require, strict_options
from opteq.results import squared_norm


class Regulariser(ABC):
    """A function `R(z)` of features, with what equilibrium maps and SAM need of it.

    Attributes:
        batch_coupled: whether the samples of a batch enter each other's gradient.
    """

    batch_coupled: bool = False

    @property
    def curvature(self) -> tuple[float, float] | None:
        """`(a, b)` with `a I ⪯ ∇²R ⪯ b I`, `b = inf` for a kink; None where there are no bounds."""
        return None

    @property
    def lipschitz(self) -> float | None:
        """Lipschitz constant of `∇R`, None where there is none."""
        if self.curvature is None:
            return None
        constant = max(abs(bound) for bound in self.curvature)
        return constant if math.isfinite(constant) else None

    @property
    def convex(self) -> bool:
        """Whether `R` is known to be convex."""
        return self.curvature is not None and self.curvature[0] >= 0

    @abstractmethod
    def value(self, z: Tensor) -> Tensor:
        """`R(z)`: `(batch,)`, or a scalar for the whole batch if batch-coupled."""

    @abstractmethod
    def gradient(self, z: Tensor) -> Tensor:
        """`∇R(z)` (a subgradient at kinks), shaped like `z`."""

    def prox(self, z: Tensor, gamma: float) -> Tensor:
        """`argmin_u γR(u) + ½‖u - z‖²`.

        Raises:
            ConfigError: where it does not exist or has no closed form.
        """
        raise ConfigError(f"{self} has no proximal operator; use form='gradient'.")


@strict_options
@dataclass(frozen=True)
class SquaredNorm(Regulariser):
    """`R(z) = ½‖z‖²`, `∇R = z`, `prox_{γR}(z) = z/(1+γ)`."""

    @property
    def curvature(self) -> tuple[float, float]:
        return (1.0, 1.0)

    def value(self, z: Tensor) -> Tensor:
        return 0.5 * squared_norm(z)

    def gradient(self, z: Tensor) -> Tensor:
        return z

    def prox(self, z: Tensor, gamma: float) -> Tensor:
        return z / (1 + gamma)


@strict_options
@dataclass(frozen=True)
class AbsoluteNorm(Regulariser):
    """`R(z) = ‖z‖₁`, `∂R ∋ sign(z)`, `prox_{γR}` soft-thresholds at `γ`."""

    @property
    def curvature(self) -> tuple[float, float]:
        return (0.0, math.inf)

    def value(self, z: Tensor) -> Tensor:
        return z.abs().flatten(1).sum(1)

    def gradient(self, z: Tensor) -> Tensor:
        return torch.sign(z)

    def prox(self, z: Tensor, gamma: float) -> Tensor:
        return F.softshrink(z, gamma)


@strict_options
@dataclass(frozen=True)
class Incay(Regulariser):
    """Feature incay `R(z) = 2/(‖z‖² + 2ε)`, which is small where features are large.

    `∇R = -4z/(‖z‖² + 2ε)²`, so the gradient step `(1 + 4γ/(‖z‖² + 2ε)²) z` expands (the minus in the
    printed Table 2 of Xie et al. 2022 is a misprint). Not convex, hence without a proximal operator.
    The Hessian is `-4/s² I + 16/s³ zzᵀ`, `s = ‖z‖² + 2ε`, with eigenvalues in `[-1/ε², 1/(4ε²)]`.

    Args:
        epsilon: `ε > 0`.
    """

    epsilon: float = 1.0

    def __post_init__(self) -> None:
        require(self.epsilon > 0, self, "epsilon", "positive")

    @property
    def curvature(self) -> tuple[float, float]:
        return -1 / self.epsilon**2, 1 / (4 * self.epsilon**2)

    def value(self, z: Tensor) -> Tensor:
        return 2 / (squared_norm(z) + 2 * self.epsilon)

    def gradient(self, z: Tensor) -> Tensor:
        size = squared_norm(z) + 2 * self.epsilon
        return (-4 / size.square()).view(-1, *[1] * (z.dim() - 1)) * z
