"""Counters of what solves took and how they ended, over many calls of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opteq.notebook import html_table, pictures
from opteq.results import SolveInfo, residual_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class SolveCounts:
    """Totals over solves, detached from the graph.

    Attributes:
        samples: number of samples solved.
        steps: map evaluations (or Jacobian products), summed over samples.
        evaluations: evaluations on whole batches.
        residuals: the largest final relative residual of each solve, in their order.
        step_means: the evaluations per sample of each solve.
        missed: the samples of each solve that missed the tolerance.
        tol: the tolerance of the latest solve; None for one without.
    """

    samples: int = 0
    steps: int = 0
    evaluations: int = 0
    residuals: list[float] = field(default_factory=list, repr=False)
    step_means: list[float] = field(default_factory=list, repr=False)
    missed: list[int] = field(default_factory=list, repr=False)
    tol: float | None = None

    @property
    def steps_mean(self) -> float:
        """Evaluations per sample."""
        return self.steps / self.samples if self.samples else 0.0

    @property
    def unconverged(self) -> int:
        """Samples that missed the tolerance."""
        return sum(self.missed)

    @property
    def residual_max(self) -> float:
        """The largest final relative residual; 0 without solves."""
        return max(self.residuals, default=0.0)

    def add(self, info: SolveInfo) -> None:
        """Add one solve."""
        samples, steps = len(info.steps), int(info.steps.sum())
        self.samples += samples
        self.steps += steps
        self.step_means.append(steps / max(samples, 1))
        self.missed.append(int((~info.converged).sum()))
        self.residuals.append(max(info.residual.tolist(), default=0.0))
        self.evaluations += info.evaluations
        self.tol = info.tol


@dataclass
class SolveLog:
    """Counters of the forward and of the adjoint solves."""

    forward: SolveCounts = field(default_factory=SolveCounts)
    adjoint: SolveCounts = field(default_factory=SolveCounts)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw what each solve took and came to, and mark those in which a sample missed the tolerance.

        The lines are the largest residuals that solves ended with, on decades, beside their tolerances; the
        bars, on an axis to the right, the evaluations per sample.

        Args:
            ax: matplotlib's axes to draw on; new ones unless given.

        Raises:
            ConfigError: if matplotlib is missing.
        """
        return pictures().plot_log(ax, self)

    def _repr_html_(self) -> str:
        both = (self.forward, self.adjoint)
        rows = {
            "": ("forward", "adjoint"),
            "solves": [f"{len(counts.residuals)}" for counts in both],
            "samples": [f"{counts.samples}" for counts in both],
            "steps of a sample": [f"{counts.steps_mean:.1f}" for counts in both],
            "converged": [f"{counts.samples - counts.unconverged} of {counts.samples}" for counts in both],
            "largest residual": [
                residual_text(counts.residual_max) if counts.residuals else "–" for counts in both
            ],
        }
        return html_table("Solves", rows)
