"""Phantom gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.equation import Equation, Gradients
from opteq.gradients.base import AdjointMethod, Report
from opteq.options import require, strict_options
from opteq.results import State, map_state, tensors_of


@strict_options
@dataclass(frozen=True)
class Phantom(AdjointMethod):
    """Differentiate `steps` damped steps `z ← (1-λ) z + λ T(z)` from the equilibrium (Geng et al. 2021).

    A cheap approximation of the implicit gradient, used for kernel models with 5 steps and `λ = 0.8`.
    `form="neumann"` sums `u = λ Σ_{i<k} ((1-λ)I + λJᵀ)ⁱ g` with the Jacobian held at the equilibrium.

    Args:
        steps: number of steps `k`.
        damping: `λ`, in (0, 1].
        form: `"unroll"` or `"neumann"`.
    """

    steps: int = 5
    damping: float = 0.8
    form: str = "unroll"

    def __post_init__(self) -> None:
        require(self.steps >= 1, self, "steps", "at least 1")
        require(0 < self.damping <= 1, self, "damping", "in (0, 1]")
        require(self.form in ("unroll", "neumann"), self, "form", "'unroll' or 'neumann'")

    def pullback(self, equation: Equation, state: State, cotangent: State, report: Report) -> Gradients:
        if self.form == "neumann":
            return self._neumann(equation, state, cotangent)
        with torch.enable_grad():
            leaves = tuple(t.detach().requires_grad_() for t in equation.tensors)
            attached = equation.with_tensors(leaves)
            z = state
            for _ in range(self.steps):
                z = map_state(self._blend, z, attached(z))
            return torch.autograd.grad(tensors_of(z), leaves, tensors_of(cotangent), allow_unused=True)

    def _neumann(self, equation: Equation, state: State, cotangent: State) -> Gradients:
        linearization = equation.linearize_evaluation(state)
        term = total = cotangent
        for _ in range(self.steps - 1):
            term = map_state(self._blend, term, linearization.vjp(term))
            total = map_state(torch.add, total, term)
        return linearization.pullback(map_state(lambda t: self.damping * t, total))

    def _blend(self, old: Tensor, new: Tensor) -> Tensor:
        return torch.lerp(old, new, self.damping)
