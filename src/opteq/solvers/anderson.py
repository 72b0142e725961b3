"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.options import require, strict_options
from opteq.solvers.base import Solver, Stepper

# A residual this many times the best one seen, or no better one for `memory + 2` steps, sends a
# sample back to a Picard step with an empty history.
_GROWTH = 3.0


@strict_options
@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration (type II), also known as Anderson mixing, Pulay mixing or DIIS.

    With `g_i = T(z_i) - z_i` over the last `memory` iterates, the next iterate is
    `Σ α_i (z_i + β g_i)`, where `α` minimises `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` under `Σ α_i = 1`.
    Weighing the regularisation by `‖g_i‖` makes the method independent of the scale of `z`. Inner
    products are computed once per pair, and the small systems are solved in float64.

    Safeguard, per sample: when the residual grows or stagnates the history is dropped and a Picard
    step taken.

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
        self.age = torch.zeros(batch, dtype=torch.long, device=x.device)  # usable iterates per sample
        self.best = torch.full((batch,), torch.inf, dtype=torch.float64, device=x.device)
        self.waited = torch.zeros_like(self.age)  # steps since the best residual

    def __call__(self, x: Tensor, f: Tensor, g: Tensor) -> Tensor:
        slot = self.count % self.memory
        used = min(self.count + 1, self.memory)
        self.differences[:, slot] = g
        self.candidates[:, slot] = f if self.damping == 1 else x + self.damping * g
        products = torch.bmm(self.differences[:, :used], g[:, :, None])[..., 0].double()
        self.gram[:, slot, :used] = products
        self.gram[:, :used, slot] = products
        self._guard(products[:, slot].clamp(min=0).sqrt())

        weights = self._weights(used, slot).to(x.dtype)
        self.count += 1
        return torch.bmm(weights[:, None], self.candidates[:, :used])[:, 0]

    def _guard(self, residual: Tensor) -> None:
        """Update ages; a sample that grows or stagnates keeps only its newest iterate."""
        better = residual < self.best
        self.best = torch.where(better, residual, self.best)
        self.waited = torch.where(better, 0, self.waited + 1)
        restart = (residual > _GROWTH * self.best) | (self.waited > self.memory + 1)
        self.age = torch.where(restart, 1, self.age + 1)
        self.waited = torch.where(restart, 0, self.waited)
        self.best = torch.where(restart, residual, self.best)

    def _weights(self, used: int, slot: int) -> Tensor:
        """`(batch, used)` mixing weights `α`, zero for iterates that a sample may not use."""
        steps_back = (slot - torch.arange(used, device=self.gram.device)) % self.memory
        usable = steps_back < self.age[:, None]
        gram = self.gram[:, :used, :used]
        scale = gram.diagonal(dim1=1, dim2=2).clamp(min=torch.finfo(torch.float64).tiny).rsqrt()
        both = usable[:, :, None] & usable[:, None, :]
        unit = torch.where(both, scale[:, :, None] * gram * scale[:, None, :], 0.0)
        unit.diagonal(dim1=1, dim2=2).copy_(1.0 + self.ridge)
        # In the variables w_i = α_i ‖g_i‖ the constraint reads ⟨scale, w⟩ = 1.
        target = torch.where(usable, scale / scale.amax(1, keepdim=True), 0.0)
        solution = torch.linalg.solve_ex(unit, target)[0]
        alpha = solution * target
        alpha = alpha / alpha.sum(1, keepdim=True)
        picard = (steps_back == 0).to(alpha.dtype).expand_as(alpha)
        return torch.where(torch.isfinite(alpha).all(1, keepdim=True), alpha, picard)
