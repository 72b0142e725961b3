"""What a computed equilibrium is for its hidden objective: a minimiser, or only stationary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.similarity import SimilarityEquation
from opteq.objectives.gaussian import GaussianSimilarity
from opteq.objectives.similarity import Similarity
from opteq.operators.lanczos import extreme_ritz_values
from opteq.results import Certificate, State, map_state
from opteq.theory.lipschitz import CONCAVITY

_LANCZOS_STEPS = 50


@dataclass(frozen=True, slots=True)
class EquilibriumKind:
    """How convex the hidden objective `G = 1ᵀf + ½‖·‖² - S` is, per sample, in float64.

    Attributes:
        everywhere: bound on the largest eigenvalue of `∇²S` over all states. At most 1 makes `G` convex.
        here: estimate of the largest eigenvalue of `∇²S` at the equilibrium.
    """

    everywhere: Certificate
    here: Certificate

    @property
    def minimiser(self) -> Tensor:
        """`(batch,)` whether the equilibrium is certified to minimise `G` over all states."""
        return (self.everywhere.value <= 1) & (self.everywhere.kind != "estimate")

    @property
    def local_minimiser(self) -> Tensor:
        """`(batch,)` whether it appears to minimise `G` among the states nearby."""
        return self.minimiser | (self.here.value < 1)

    def __str__(self) -> str:
        certified, local = int(self.minimiser.sum()), int(self.local_minimiser.sum())
        total = len(self.minimiser)
        return (
            f"Of {total} equilibria {certified} are certified minimisers of the hidden objective,"
            f" {local - certified} are local minimisers by an estimate, and {total - local} are known to be"
            f" stationary points only; the largest eigenvalue of ∇²S is at most"
            f" {self.everywhere.value.max().item():.3g} ({self.everywhere.kind}), and"
            f" {self.here.value.max().item():.3g} at the equilibria (estimate)."
        )


@torch.no_grad()
def equilibrium_kind(layer: EquilibriumLayer, x: State) -> EquilibriumKind:
    """Say what the equilibria that a layer finds are for its hidden objective.

    An equilibrium of a kernel map is stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - S(y)`, `f` convex. Where
    `I - ∇²S ⪰ 0` everywhere `G` is convex and the equilibrium minimises it; where `I - ∇²S ≻ 0` at the
    equilibrium alone, it is a local minimiser. For maps that are gradients, as an `OptEqUnit`, `Q` with
    `∇²Q = I - J` takes the place of `G` and `J` that of `∇²S`.

    Args:
        layer: of a kernel map, or of one that is a gradient.
        x: a batch of inputs.

    Raises:
        ConfigError: for maps that are neither, about whose equilibria nothing is known but that they are
            fixed points.
    """
    equation = layer.bind(x)
    state = map_state(Tensor.double, layer.solve(x).value)
    equation = equation.with_tensors(tuple(t.detach().double() for t in equation.tensors))
    everywhere, product = _curvature(equation, state)
    assert isinstance(state, Tensor)
    largest = extreme_ritz_values(product, state, _LANCZOS_STEPS)[1]
    settled = f"{_LANCZOS_STEPS} steps of Lanczos' method settle."
    return EquilibriumKind(everywhere, Certificate(largest, "estimate", (settled,)))


def largest_curvature(similarity: Similarity) -> Certificate:
    """`(batch,)` bound on the largest eigenvalue of `∇²S` over all states.

    `2e^{-3/2}` times the bound on the norm for the Gaussian similarity, whose Hessian is mostly
    negative; the bound on the norm itself for others.
    """
    bound = similarity.hessian_bound()
    if isinstance(similarity, GaussianSimilarity):
        return Certificate(CONCAVITY * bound.value, bound.kind, bound.assumptions)
    return bound


def _curvature(equation: Equation, state: State) -> tuple[Certificate, Callable[[Tensor], Tensor]]:
    if isinstance(equation, SimilarityEquation) and isinstance(state, Tensor):
        return largest_curvature(equation.similarity), equation.similarity.linearize(state).product
    if equation.conservative and isinstance(state, Tensor):
        return equation.contraction(), equation.linearize(state).jvp  # type: ignore[return-value]
    raise ConfigError(
        f"The equilibria of {type(equation).__name__} are fixed points, of which no objective is known that"
        " they would be stationary for; see opteq.theory.deep for deep models."
    )
