"""Broyden's method with limited memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.options import require, require_bounded_solve, strict_options
from opteq.solvers.base import Solver, Stepper

# A residual this many times the best one seen sends a sample back to a Picard step.
_GROWTH = 3.0


@strict_options
@dataclass(frozen=True)
class Broyden(Solver):
    """Broyden's ("good") quasi-Newton method for `F(z) = z - T(z) = 0` with limited memory.

    Keeps `H = I + Σ u_i v_iᵀ ≈ (∂F)⁻¹`, starting from `H = I` (a Picard step), and after each step
    `s = Δz`, `y = ΔF` applies Sherman and Morrison's form of the update,
    `H ← H + (s - H y) sᵀH / (sᵀH y)`. A sample whose memory is full, whose residual grows or whose
    update is singular starts again from `H = I`.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
        memory: most rank-one terms kept, at least 1.
    """

    tol: float = 1e-4
    max_steps: int = 50
    memory: int = 10

    def __post_init__(self) -> None:
        require_bounded_solve(self)
        require(self.memory >= 1, self, "memory", "at least 1")

    def start(self, x: Tensor) -> Stepper:
        return _BroydenStepper(x, self.memory)


class _BroydenStepper:
    def __init__(self, x: Tensor, memory: int) -> None:
        batch, n = x.shape
        self.left = x.new_zeros(batch, memory, n)  # u_i; zero where a sample has no i-th term
        self.right = x.new_zeros(batch, memory, n)  # v_i
        self.terms = 0
        self.best = torch.full((batch,), math.inf, dtype=torch.float64, device=x.device)
        self.last: tuple[Tensor, Tensor] | None = None  # previous step s and F

    def __call__(self, x: Tensor, f: Tensor, g: Tensor, norms: Tensor) -> Tensor:
        sizes = norms[:, 0]
        if self.last is not None:
            step, old = self.last
            if self.terms == self.left.shape[1]:
                self.terms = 0
            self._update(step, -g - old)
            grown = sizes > _GROWTH * self.best
            self.left.masked_fill_(grown[:, None, None], 0)
            self.best.masked_fill_(grown, math.inf)
        self.best = torch.where(sizes < self.best, sizes, self.best)
        step = self._apply(g)
        self.last = (step, -g)
        return x + step

    def _update(self, s: Tensor, y: Tensor) -> None:
        used_left, used_right = self.left[:, : self.terms], self.right[:, : self.terms]
        row = s + torch.einsum("bk,bkn->bn", torch.einsum("bkn,bn->bk", used_left, s), used_right)
        denominator = torch.linalg.vecdot(row, y)
        size = torch.linalg.vector_norm(row, dim=1) * torch.linalg.vector_norm(y, dim=1)
        sound = denominator.abs() > torch.finfo(s.dtype).eps * size
        column = (s - self._apply(y)) / denominator[:, None]
        self.left[:, self.terms] = torch.where(sound[:, None], column, 0.0)
        self.right[:, self.terms] = torch.where(sound[:, None], row, 0.0)
        self.terms += 1

    def _apply(self, vector: Tensor) -> Tensor:
        """`H · vector`."""
        used_left, used_right = self.left[:, : self.terms], self.right[:, : self.terms]
        return vector + torch.einsum("bk,bkn->bn", torch.einsum("bkn,bn->bk", used_right, vector), used_left)
