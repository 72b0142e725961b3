"""Anderson acceleration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.options import require, strict_options
from opteq.solvers.base import Solver, Stepper
from opteq.solvers.rows import mix

# A residual this many times the best one seen sends a sample back to the best iterate.
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
    steps, a Picard step is taken from the best iterate in the history, and the history is dropped. So
    where `T` contracts, every start afresh is closer to the fixed point than the one before.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
        memory: number of iterates combined, at least 1 (1 is Picard iteration).
        damping: `β`, in (0, 1].
    """

    tol: float = 1e-4
    max_steps: int = 50
    memory: int = 4
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
        self.gram = torch.zeros(batch, memory, memory, dtype=torch.float64, device=x.device)
        self.count = 0  # iterates seen
        self.born = [0] * batch  # the first iterate that a sample may use
        self.best = [math.inf] * batch
        self.best_before = self.best  # at the last look for stagnation

    @property
    def rooms(self) -> tuple[Tensor, Tensor]:
        slot = self.count % self.memory
        return self.candidates[:, slot], self.differences[:, slot]

    def __call__(self, x: Tensor, f: Tensor, g: Tensor, changes: Sequence[float]) -> Tensor:
        slot = self.count % self.memory
        used = min(self.count + 1, self.memory)
        if self.damping != 1:
            torch.add(x, g, alpha=self.damping, out=f)
        usable, restarts = self._usable(used, slot), self._restarts(changes)
        flags = None
        if restarts:
            flags = torch.zeros(len(x), dtype=torch.bool, device=x.device)
            flags[restarts] = True
            for i in restarts:
                self.born[i], self.best[i], self.best_before[i] = self.count + 1, math.inf, math.inf
        self.count += 1
        return mix(self.differences, self.candidates, self.gram, used, slot, usable, flags)

    def _restarts(self, changes: Sequence[float]) -> list[int]:
        """The samples whose residual grows, or has not improved for `memory + 2` steps."""
        restart = {i for i, (r, b) in enumerate(zip(changes, self.best, strict=True)) if r > _GROWTH * b}
        self.best = list(map(min, self.best, changes))
        if self.count % (self.memory + 2) == self.memory + 1:
            pairs = zip(self.best, self.best_before, strict=True)
            restart |= {i for i, (now, before) in enumerate(pairs) if now >= before}
            self.best_before = self.best.copy()
        return sorted(restart)

    def _usable(self, used: int, slot: int) -> Tensor | None:
        """`(batch, used)` whether a sample may use an iterate; None where all may use all."""
        if max(self.born, default=0) <= self.count - used + 1:
            return None
        steps_back = (slot - torch.arange(used, device=self.gram.device)) % self.memory
        return self.count - steps_back >= torch.tensor(self.born, device=self.gram.device)[:, None]
