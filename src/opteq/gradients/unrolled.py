"""Unrolled differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from opteq.equation import Equation
from opteq.gradients.base import DirectMethod
from opteq.options import require, strict_options
from opteq.results import SolveInfo, State, like, map_state, tensors_of
from opteq.solvers.base import row_norms
from opteq.solvers.space import Space


@strict_options
@dataclass(frozen=True)
class Unrolled(DirectMethod):
    """Run `steps` plain iterations `z ← T(z)` from zero and backpropagate through them.

    The training of Xie et al. 2022, Algorithm 1. Replaces the solver. Differentiable to any order.
    Memory grows with `steps`, unless `checkpoint` recomputes each step in the backward pass. The
    reported residual is that of the last iterate at which the map was evaluated; since there is no
    tolerance, every finite sample counts as converged.

    Args:
        steps: number of iterations.
        checkpoint: recompute activations in the backward pass instead of storing them.
    """

    steps: int
    checkpoint: bool = False

    def __post_init__(self) -> None:
        require(self.steps >= 1, self, "steps", "at least 1")

    def run(self, equation: Equation) -> tuple[State, SolveInfo]:
        z = equation.first_iterate()
        residuals = [_relative_change(equation.initial(), z)]
        for _ in range(self.steps - 1):
            following = self._step(equation, z)
            residuals.append(_relative_change(z, following))
            z = following
        history = torch.stack(residuals, dim=1)
        finite = ~torch.isnan(history[:, -1])  # NaN from the first iterate on that is not finite
        counts = torch.full_like(finite, self.steps, dtype=torch.long)
        return z, SolveInfo(history, counts, finite, self.steps)

    def _step(self, equation: Equation, state: State) -> State:
        if not self.checkpoint:
            return equation(state)

        # Tensors must enter as arguments for checkpointing to see that they require gradients.
        def step(*inputs: torch.Tensor) -> State:
            count = len(tensors_of(state))
            return equation.with_tensors(inputs[count:])(like(state, inputs[:count]))

        return checkpoint(step, *tensors_of(state), *equation.tensors, use_reentrant=False)


@torch.no_grad()
def _relative_change(old: State, new: State) -> torch.Tensor:
    space = Space(new)
    size = row_norms(space.flatten(new))
    change = row_norms(space.flatten(map_state(torch.sub, new, old)))
    return change / size.clamp(min=torch.finfo(size.dtype).tiny)
