"""Which samples of a solve go on, and how far they have come."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.native.rows import judge
from opteq.results import SolveInfo


class Progress:
    """The record of a solve, sample by sample.

    Args:
        x: the iterates, `(batch, n)`.
        tol: relative residual at which a sample stops.
        max_steps: most evaluations.
        scale: factor on residuals.
        in_c: whether compiled code keeps it.

    Attributes:
        active: `(batch,)` which samples go on.
        steps: evaluations seen.
    """

    def __init__(self, x: Tensor, tol: float, max_steps: int, scale: float, in_c: bool) -> None:
        # What is said of the solve is in float32 at least.
        self._dtype = torch.promote_types(x.dtype, torch.float32)
        self._tol = tol
        self._options = (scale, tol, torch.finfo(self._dtype).tiny, in_c)
        self.active = torch.ones(len(x), dtype=torch.bool, device=x.device)
        self.steps = 0
        self._converged = torch.zeros_like(self.active)
        self._taken = torch.full_like(self.active, max_steps, dtype=torch.long)
        self._residuals: list[Tensor] = []

    def record(self, norms: Tensor) -> tuple[int, int]:
        """Enter one evaluation; samples that reached the tolerance or are no longer finite stop.

        Args:
            norms: `(batch, 2)` of `T(z) - z` and of `T(z)`, in float64.

        Returns:
            The number of samples that go on, and of those that are not finite, lately or since long.
        """
        self.steps += 1
        kept = (self.active, self._converged, self._taken)
        residuals, going, lost = judge(norms, *kept, self.steps, *self._options)
        self._residuals.append(residuals)
        return going, lost

    def info(self) -> SolveInfo:
        """The record so far."""
        residuals = torch.stack(self._residuals, dim=1).to(self._dtype)
        return SolveInfo(residuals, self._taken, self._converged, self.steps, self._tol)
