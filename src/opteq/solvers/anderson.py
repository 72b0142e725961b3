"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.native.mixture import History, mix
from opteq.options import require, require_bounded_solve, strict_options
from opteq.solvers.base import Solver, Stepper


@strict_options
@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration (type II), also known as Anderson mixing, Pulay mixing or DIIS.

    With `g_i = T(z_i) - z_i` over the last `memory` iterates, the next iterate is
    `Σ α_i (z_i + β g_i)`, where `α` minimises `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` under `Σ α_i = 1`.
    Weighing the regularisation by `‖g_i‖` makes the method independent of the scale of `z`. Inner
    products are computed once per pair, and the small systems are solved in float64.

    Safeguard, per sample: when the residual grows threefold, or does not improve for `memory + 2`
    steps, a step `z + β g` is taken from the best iterate in the history, and the history is dropped. So
    where `T` contracts, every start afresh is closer to the fixed point than the one before. Where the
    Jacobian of `T` has eigenvalues below -1, as with the steep `D_τ` of `MOptEq`, steps with `β = 1` lead
    away: every `memory + 2` steps the `β` of a sample is halved if it has started afresh since, and else
    multiplied by `√2`, up to what was asked for. The first time costs nothing: that may be the mixing alone.

    Args:
        tol: relative residual at which a sample stops.
        max_steps: most evaluations of the map.
        memory: number of iterates combined, at least 1 (1 is Picard iteration).
        damping: `β` in the beginning, in (0, 1].
    """

    tol: float = 1e-4
    max_steps: int = 50
    memory: int = 4
    damping: float = 1.0

    def __post_init__(self) -> None:
        require_bounded_solve(self)
        require(self.memory >= 1, self, "memory", "at least 1")
        require(0 < self.damping <= 1, self, "damping", "in (0, 1]")

    def start(self, x: Tensor) -> Stepper:
        return _AndersonStepper(x, self.memory, self.damping)


class _AndersonStepper:
    def __init__(self, x: Tensor, memory: int, damping: float) -> None:
        self.memory, self.damping = memory, damping
        self.count = 0  # iterates seen
        self.history = History.like(x, memory)
        # Whether each row has started afresh; its `β`, once one of them has a second time.
        self.warned: Tensor | None = None
        self.lengths: Tensor | None = None
        rooms = (self.history.candidates, self.history.changes)
        self.slots = list(zip(*(t.unbind(1) for t in rooms), strict=True))

    @property
    def rooms(self) -> tuple[Tensor, Tensor]:
        return self.slots[self.count % self.memory]

    def __call__(self, x: Tensor, f: Tensor, g: Tensor, norms: Tensor) -> Tensor:
        if self.lengths is not None:
            torch.addcmul(x, g, self.lengths, out=f)
        elif self.damping != 1:
            torch.add(x, g, alpha=self.damping, out=f)
        look = self.count % (self.memory + 2) == self.memory + 1
        mixed = mix(self.history, norms, self.count, look)
        self.count += 1
        if look:
            self._adapt(x)
        return mixed

    def _adapt(self, x: Tensor) -> None:
        """Choose `β` by which rows have started afresh since the last look."""
        afresh = (self.history.born > self.count - (self.memory + 2))[:, None]
        if self.warned is None:
            self.warned = afresh
            return
        again, self.warned = afresh & self.warned, afresh | self.warned
        if self.lengths is None:
            if not again.any():
                return
            self.lengths = x.new_full((len(x), 1), self.damping)
        longer = (2**0.5 * self.lengths).clamp(max=self.damping)
        self.lengths = torch.where(again, 0.5 * self.lengths, longer)
