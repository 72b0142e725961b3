"""Picard iteration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from opteq.options import require, require_bounded_solve, strict_options
from opteq.solvers.base import Solver, Stepper


@strict_options
@dataclass(frozen=True)
class Picard(Solver):
    """`z ← z + β (T(z) - z)`, also known as fixed-point, (damped) simple or Krasnoselskii-Mann iteration.

    Converges for every firmly nonexpansive map with a fixed point, in particular for every
    proximal operator, with any `0 < β ≤ 1`.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
        damping: `β`, in (0, 1].
    """

    tol: float = 1e-4
    max_steps: int = 100
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_bounded_solve(self)
        require(0 < self.damping <= 1, self, "damping", "in (0, 1]")

    def start(self, x: Tensor) -> Stepper:
        if self.damping == 1:
            return lambda x, f, g, norms: f
        return lambda x, f, g, norms: x + self.damping * g
