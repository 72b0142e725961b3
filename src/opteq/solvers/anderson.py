"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.options import require, strict_options
from opteq.solvers.base import Solver, Stepper

# A residual this many times the best one seen sends a sample back to a Picard step.
_GROWTH = 3.0


@strict_options
@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration (type II), also known as Anderson mixing, Pulay mixing or DIIS.

    With `g_i = T(z_i) - z_i` over the last `memory` iterates, the next iterate is
    `Σ α_i (z_i + β g_i)`, where `α` minimises `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` under `Σ α_i = 1`.
    Weighing the regularisation by `‖g_i‖` makes the method independent of the scale of `z`. Inner
    products are computed once per pair, and the small systems are solved in float64.

    Safeguard, per sample: when the residual grows threefold, or does not improve for `memory + 2`
    steps, the history is dropped and a Picard step taken.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
        memory: number of iterates combined, at least 1 (1 is Picard iteration).
        damping: `β`, in (0, 1].
    """

    tol: float = 1e-4
    max_steps: int = 50
    memory: int = 5
    damping: float = 1.0

    def __post_init__(self) -> None:
        require(self.max_steps >= 1, self, "max_steps", "at least 1")
        require(self.memory >= 1, self, "memory", "at least 1")
        require(0 < self.damping <= 1, self, "damping", "in (0, 1]")

    def start(self, x: Tensor) -> Stepper:
        return _AndersonStepper(x, self.memory, self.damping)


class _AndersonStepper:
    def __init__(self, x: Tensor, memory: int, damping: float) -> None:
        batch, n = x.shape
        self.memory, self.damping = memory, damping
        self.differences = x.new_empty(batch, memory, n)  # g_i
        self.candidates = x.new_empty(batch, memory, n)  # z_i + β g_i
        wide = torch.promote_types(x.dtype, torch.float32)
        self.ridge = 10 * torch.finfo(wide).eps
        self.gram = torch.zeros(batch, memory, memory, dtype=torch.float64, device=x.device)
        self.count = 0  # iterates seen
        # Iterates older than a restart are masked; None as long as no sample has restarted.
        self.born: Tensor | None = None
        self.best = torch.full((batch,), torch.inf, dtype=wide, device=x.device)
        self.best_before = self.best  # at the last look for stagnation

    def __call__(self, x: Tensor, f: Tensor, g: Tensor, residual: Tensor) -> Tensor:
        slot = self.count % self.memory
        used = min(self.count + 1, self.memory)
        self._guard(residual)
        self.differences[:, slot] = g
        self.candidates[:, slot] = f if self.damping == 1 else torch.add(x, g, alpha=self.damping)
        # As a product of a row with a matrix this runs many times faster than matrix times column.
        products = torch.bmm(g[:, None], self.differences[:, :used].mT)[:, 0].double()
        # The regularisation sits on the diagonal, in proportion to each residual. The system is badly
        # scaled when residuals fall, which elimination in float64 does not mind.
        products[:, slot] = (1 + self.ridge) * products[:, slot] + torch.finfo(torch.float64).tiny
        self.gram[:, slot, :used] = products
        self.gram[:, :used, slot] = products
        # The small solver hands out columns, for which the product below would take a slow path.
        weights = self._weights(used, slot).to(x.dtype).contiguous()
        self.count += 1
        return torch.bmm(weights[:, None], self.candidates[:, :used])[:, 0]

    def _guard(self, residual: Tensor) -> None:
        """Drop the history of samples whose residual grows, or has not improved for `memory + 2` steps."""
        restart = residual > _GROWTH * self.best
        self.best = torch.minimum(self.best, residual)
        if self.count % (self.memory + 2) == self.memory + 1:
            restart |= self.best >= self.best_before
            self.best_before = self.best
        if bool(restart.any()):
            born = torch.zeros_like(residual, dtype=torch.long) if self.born is None else self.born
            self.born = torch.where(restart, self.count, born)
            self.best = torch.where(restart, residual, self.best)
            self.best_before = torch.where(restart, torch.inf, self.best_before)

    def _weights(self, used: int, slot: int) -> Tensor:
        """`(batch, used)` mixing weights `α`, zero for iterates that a sample may not use."""
        gram = self.gram[:, :used, :used]
        ones = torch.ones(gram.shape[:2], dtype=gram.dtype, device=gram.device)
        if self.born is not None:
            steps_back = (slot - torch.arange(used, device=gram.device)) % self.memory
            usable = self.count - steps_back >= self.born[:, None]
            both = usable[:, :, None] & usable[:, None, :]
            gram = torch.where(both, gram, torch.eye(used, dtype=gram.dtype, device=gram.device))
            ones = usable.to(gram.dtype)
        solution = torch.linalg.solve_ex(gram, ones)[0]
        return solution / solution.sum(1, keepdim=True)
