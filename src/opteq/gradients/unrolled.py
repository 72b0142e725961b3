"""Unrolled differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opteq.equation import Equation
from opteq.gradients.base import DirectMethod
from opteq.options import require, strict_options
from opteq.results import SolveInfo, State, like, tensors_of
from opteq.solvers.sam import SAM
from opteq.solvers.space import relative_change


@strict_options
@dataclass(frozen=True)
class Unrolled(DirectMethod):
    """Run `steps` plain iterations `z ← T(z)` from zero and backpropagate through them.

    The training of Xie et al. 2022, Algorithm 1: raw unrolling or, with `select`, unrolling with SAM, whose
    steps `z ← βS(z) + (1-β)T(z)` steer towards the equilibrium with the least regulariser (the strategy
    R† of the paper). Replaces the solver. Differentiable to any order.
    Memory grows with `steps`, unless `checkpoint` recomputes each step in the backward pass. The
    reported residual is that of the last iterate at which the map was evaluated; since there is no
    tolerance, every finite sample counts as converged.

    Args:
        steps: number of iterations.
        checkpoint: recompute activations in the backward pass instead of storing them.
        select: the selecting iteration; None for plain iterations.
        error: the relative rounding error that products may have, such as the tolerance of the solves that
            they stand in for; 3×3 convolutions are then quicker. 0 for that of the dtype.
    """

    steps: int
    checkpoint: bool = False
    select: SAM | None = None
    error: float = 0.0

    def __post_init__(self) -> None:
        require(self.steps >= 1, self, "steps", "at least 1")
        selects = self.select is None or isinstance(self.select, SAM)
        require(selects, self, "select", "a SAM(regulariser) or None")
        require(0 <= self.error < 1, self, "error", "at least 0 and below 1")

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        regulariser = None if self.select is None else self.select.regulariser
        return (regulariser,) if isinstance(regulariser, nn.Module) else ()

    def run(self, equation: Equation) -> tuple[State, SolveInfo]:
        z, image = equation.initial(), equation.first_iterate()
        residuals = [relative_change(z, image)]
        for k in range(2, self.steps + 1):
            z = self._follow(k - 1, z, image)
            image = self._step(equation, z)
            residuals.append(relative_change(z, image))
        z = self._follow(self.steps, z, image)
        history = torch.stack(residuals, dim=1)
        finite = ~torch.isnan(history[:, -1])  # NaN from the first iterate on that is not finite
        counts = torch.full_like(finite, self.steps, dtype=torch.long)
        return z, SolveInfo(history, counts, finite, self.steps)

    def _follow(self, k: int, state: State, image: State) -> State:
        return image if self.select is None else self.select.blend(k, state, image)

    def _step(self, equation: Equation, state: State) -> State:
        if not self.checkpoint:
            return equation(state)

        # Tensors must enter as arguments for checkpointing to see that they require gradients.
        def step(*inputs: torch.Tensor) -> State:
            count = len(tensors_of(state))
            return equation.with_tensors(inputs[count:])(like(state, inputs[:count]))

        return checkpoint(step, *tensors_of(state), *equation.tensors, use_reentrant=False)
