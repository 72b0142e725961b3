"""Accelerated gradient descent on the hidden objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.options import require_bounded_solve, strict_options
from opteq.solvers.base import Solver, Stepper


@strict_options
@dataclass(frozen=True)
class Nesterov(Solver):
    """Nesterov's accelerated gradient with adaptive restart, also known as FISTA for proximal maps.

    For the OptEq unit `z - T(z) = ∇Q(z)` with `0 ⪯ ∇²Q ⪯ I`, so `T` is a gradient step of length 1:

        x ← T(v),    v ← x + (t - 1)/t⁺ (x - x_old),    t⁺ = ½ (1 + √(1 + 4 t²)).

    The momentum of a sample is reset when it points uphill, `⟨v - T(v), x - x_old⟩ > 0`
    (O'Donoghue and Candès 2015, gradient scheme), which gives linear convergence on strongly convex
    objectives without knowing their constant. Residuals are those at `v`.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
    """

    tol: float = 1e-4
    max_steps: int = 100
    needs_gradient_map = True

    def __post_init__(self) -> None:
        require_bounded_solve(self)

    def start(self, x: Tensor) -> Stepper:
        momentum = torch.ones(len(x), dtype=torch.float64, device=x.device)
        previous = x

        def advance(x: Tensor, f: Tensor, g: Tensor, norms: Tensor) -> Tensor:
            nonlocal momentum, previous
            move = f - previous
            uphill = torch.linalg.vecdot(g, move) < 0
            following = 0.5 * (1 + (1 + 4 * momentum.square()).sqrt())
            weight = torch.where(uphill, 0.0, (momentum - 1) / following)
            momentum = torch.where(uphill, 1.0, following)
            previous = f
            return torch.addcmul(f, weight.to(f.dtype)[:, None], move)

        return advance
