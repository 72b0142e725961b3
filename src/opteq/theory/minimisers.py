"""What a computed equilibrium is for its hidden objective: a minimiser, or only stationary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.equation import Equation
from opteq.layer import EquilibriumLayer
from opteq.results import Certificate, Described, State, map_state
from opteq.theory.arguments import expect_layer


@dataclass(frozen=True, slots=True, repr=False)
class EquilibriumKind(Described):
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
        return certified_convex(self.everywhere)

    @property
    def local_minimiser(self) -> Tensor:
        """`(batch,)` whether it appears to minimise `G` among the states nearby."""
        return self.minimiser | (self.here.value < 1)

    def __str__(self) -> str:
        certified, local = int(self.minimiser.sum()), int(self.local_minimiser.sum())
        total = len(self.minimiser)
        if not total:
            return "The batch is empty, and so there are no equilibria."
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

    Args:
        layer: of a map for which `kind_at` knows.
        x: a batch of inputs.

    Raises:
        ConfigError: for something else than a layer, and as `kind_at` does.
    """
    expect_layer(layer)
    equation, state = layer.bind(x), layer.solve(x).state
    equation = equation.with_tensors(tuple(t.detach().double() for t in equation.tensors))
    return kind_at(equation, map_state(Tensor.double, state))


@torch.no_grad()
def kind_at(equation: Equation, state: State) -> EquilibriumKind:
    """What an equilibrium of `equation` is for the hidden objective.

    What is asked is `Equation.curvature`: of a kernel map the largest eigenvalue of `∇²S`, for the objective
    `G(y) = 1ᵀf(y) + ½‖y‖² - S(y)` with `f` convex; of maps that are gradients, as an `OptEqUnit`, that of
    `J`, since `∇²Q = I - J`; of two in turn and of branches the largest one; of coupled branches see
    `opteq.maps.multibranch` and `opteq.maps.kernelbranches`.

    Args:
        equation: in float64.
        state: an equilibrium of it.

    Raises:
        ConfigError: for other maps, about whose equilibria nothing is known but that they are fixed points,
            and for branches coupled by the hard sign, which need not have any.
    """
    return EquilibriumKind(equation.curvature(), equation.curvature(state))


def certified_convex(everywhere: Certificate) -> Tensor:
    """`(batch,)` whether the curvature everywhere proves that every equilibrium is a minimiser."""
    return (everywhere.value <= 1) & (everywhere.kind != "estimate")
