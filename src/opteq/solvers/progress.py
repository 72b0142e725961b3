"""Which samples of a solve go on, and how far they have come."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from opteq.results import SolveInfo
from opteq.solvers.rows import Record, compiled


class Progress:
    """The record of a solve, sample by sample.

    Args:
        batch: number of samples.
        device: where their norms are.
        tol: relative residual at which a sample stops.
        max_steps: most evaluations.
        scale: factor on residuals.
        tiny: the least size that residuals are relative to.

    Attributes:
        active: `(batch,)` which samples go on.
        steps: evaluations seen.
    """

    def __init__(
        self, batch: int, device: torch.device, tol: float, max_steps: int, scale: float, tiny: float
    ) -> None:
        self.tol, self.scale, self.tiny = tol, scale, tiny
        self.active = torch.ones(batch, dtype=torch.bool, device=device)
        self.steps = 0
        self._converged = torch.zeros_like(self.active)
        self._taken = torch.full((batch,), max_steps, dtype=torch.long, device=device)
        self._residuals: list[Tensor] = []
        self._library = compiled() if device.type == "cpu" else None
        kept = (self.active, self._converged, self._taken)
        # Where C finds it; nothing here moves any of it.
        self._record = Record(*(t.data_ptr() for t in kept), scale, tol, tiny, batch)
        self._lost = ctypes.c_size_t()

    def record(self, norms: Tensor) -> tuple[int, int]:
        """Enter one evaluation; samples that reached the tolerance or are no longer finite stop.

        Args:
            norms: `(batch, 2)` of `T(z) - z` and of `T(z)`, in float64.

        Returns:
            The number of samples that go on, and of those that are not finite, lately or since long.
        """
        self.steps += 1
        if self._library is not None:
            residuals = norms.new_empty(norms.shape[0])
            self._residuals.append(residuals)
            found = (norms.data_ptr(), self.steps, residuals.data_ptr(), self._lost)
            return self._library.opteq_rows_judge(self._record, *found), self._lost.value
        changes, sizes = norms.unbind(1)
        # Finite is asked of the change: where T(z) = 0 and z is not, the residual is rightly infinite.
        infinite = ~torch.isfinite(changes)
        residuals = self.scale * changes / sizes.clamp(min=self.tiny)
        # An image too large for its norm has come nowhere.
        residuals.masked_fill_(sizes.isinf() & ~infinite, torch.inf)
        residuals.masked_fill_(~self.active, torch.nan)
        self._residuals.append(residuals)
        reached = residuals <= self.tol
        stops = self.active & (reached | infinite)
        self._converged |= reached
        self._taken.masked_fill_(stops, self.steps)
        self.active &= ~stops
        going, lost = torch.stack((self.active.sum(), infinite.sum())).tolist()
        return going, lost

    def info(self, dtype: torch.dtype) -> SolveInfo:
        """The record so far, residuals in this dtype."""
        residuals = torch.stack(self._residuals, dim=1).to(dtype)
        return SolveInfo(residuals, self._taken, self._converged, self.steps)
