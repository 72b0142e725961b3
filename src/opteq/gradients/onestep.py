"""One-step gradients."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.equation import Equation, Gradients
from opteq.gradients.base import AdjointMethod, Report
from opteq.options import strict_options
from opteq.results import State


@strict_options
@dataclass(frozen=True)
class OneStep(AdjointMethod):
    """Differentiate one application of `T` at the equilibrium, or Jacobian-free (Fung et al. 2022).

    The cheapest approximation: the adjoint `u = g + Jᵀu` is replaced by `u = g`. Where an evaluation goes
    through branches one after the other, what is differentiated is the whole sweep.
    """

    def pullback(self, equation: Equation, state: State, cotangent: State, report: Report) -> Gradients:
        return equation.linearize_evaluation(state).pullback(cotangent)
