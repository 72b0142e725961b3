"""Which samples of a solve go on, and how far they have come."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.native.rows import judge
from opteq.results import SolveInfo


class Progress:
    """The record of a solve, sample by sample.

    Args:
        batch: number of samples.
        device: where their norms are.
        tol: relative residual at which a sample stops.
        max_steps: most evaluations.
        scale: factor on residuals.
        tiny: the least size that residuals are relative to.
        in_c: whether compiled code keeps it.

    Attributes:
        active: `(batch,)` which samples go on.
        steps: evaluations seen.
    """

    def __init__(
        self,
        batch: int,
        device: torch.device,
        tol: float,
        max_steps: int,
        scale: float,
        tiny: float,
        in_c: bool,
    ) -> None:
        self._options = (scale, tol, tiny, in_c)
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.steps = 0
        self._converged = torch.zeros_like(self.active)
        self._taken = torch.full((batch,), max_steps, dtype=torch.long, device=device)
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

    def info(self, dtype: torch.dtype) -> SolveInfo:
        """The record so far, residuals in this dtype."""
        residuals = torch.stack(self._residuals, dim=1).to(dtype)
        return SolveInfo(residuals, self._taken, self._converged, self.steps)
