"""What a computed equilibrium is for its hidden objective: a minimiser, or only stationary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.chain import ChainEquation
from opteq.maps.kernelbranches import KernelBranchesEquation
from opteq.maps.multibranch import MultiBranchEquation
from opteq.maps.parallel import ParallelEquation
from opteq.maps.similarity import SimilarityEquation
from opteq.objectives.gaussian import GaussianSimilarity
from opteq.objectives.similarity import Similarity
from opteq.operators.base import sharp_norms
from opteq.operators.lanczos import extreme_ritz_values
from opteq.results import Certificate, Described, State, combined, map_state, tensors_of
from opteq.solvers.space import Space
from opteq.theory.lipschitz import CONCAVITY

_LANCZOS_STEPS = 50


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
        ConfigError: as `kind_at` does.
    """
    equation, state = layer.bind(x), layer.solve(x).state
    equation = equation.with_tensors(tuple(t.detach().double() for t in equation.tensors))
    with sharp_norms(layer.map):
        return kind_at(equation, map_state(Tensor.double, state))


@torch.no_grad()
def kind_at(equation: Equation, state: State) -> EquilibriumKind:
    """What an equilibrium of `equation` is for the hidden objective.

    - An equilibrium of a kernel map is stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - S(y)`, `f` convex. Where
      `I - ∇²S ⪰ 0` everywhere `G` is convex and the equilibrium minimises it; where `I - ∇²S ≻ 0` at the
      equilibrium alone, it is a local minimiser.
    - For maps that are gradients, as an `OptEqUnit`, `Q` with `∇²Q = I - J` takes the place of `G` and `J`
      that of `∇²S`.
    - Chains of two have the objective `E_1 + F_2` of `ChainEquation`, which is convex if both of their
      Jacobians are at most 1: the larger counts. So it does for independent branches, whose objectives add.
    - Coupled branches have the `G` of `MOptEq`. In the variables `y_i/√(μ_iL_σ)` its convex rest has a
      modulus of at least 1, and the coupling takes the place of `-S`: `∇²S` is `B ∂h Bᵀ` with the
      `B = diag(√(L_σ/μ_i) W_i)`, and everywhere at most `q`. With kernels it is `L_σ` times the `H` of
      `J = D H`.

    Args:
        equation: in float64.
        state: an equilibrium of it.

    Raises:
        ConfigError: for other maps, about whose equilibria nothing is known but that they are fixed points,
            and for branches coupled by the hard sign, which need not have any.
    """
    everywhere = curvature_bound(equation)
    settled = f"{_LANCZOS_STEPS} steps of Lanczos' method settle."
    return EquilibriumKind(everywhere, Certificate(_curvature(equation, state), "estimate", (settled,)))


def certified_convex(everywhere: Certificate) -> Tensor:
    """`(batch,)` whether a `curvature_bound` proves that every equilibrium is a minimiser."""
    return (everywhere.value <= 1) & (everywhere.kind != "estimate")


def curvature_bound(equation: Equation) -> Certificate:
    """`(batch,)` bound on the largest eigenvalue, over all states, of what `kind_at` takes for `∇²S`.

    Raises:
        ConfigError: as `kind_at` does.
    """
    match equation:
        case ParallelEquation(branches=parts):
            return _largest([curvature_bound(part) for part in parts])
        case ChainEquation(units=parts) if equation.has_energy:
            return _largest([curvature_bound(part) for part in parts])
        case MultiBranchEquation() | KernelBranchesEquation() if not equation.coupling.options.hard:
            return equation.uniqueness()
        case SimilarityEquation():
            return largest_curvature(equation.similarity)
    if equation.conservative:
        return equation.contraction()
    raise ConfigError(
        f"The equilibria of {type(equation).__name__} are fixed points, of which no objective is known that"
        " they would be stationary for; see opteq.theory.deep for deep models."
    )


def largest_curvature(similarity: Similarity) -> Certificate:
    """`(batch,)` bound on the largest eigenvalue of `∇²S` over all states.

    `2e^{-3/2}` times the bound on the norm for the Gaussian similarity, whose Hessian is mostly
    negative; the bound on the norm itself for others.
    """
    bound = similarity.hessian_bound()
    if isinstance(similarity, GaussianSimilarity):
        return Certificate(CONCAVITY * bound.value, bound.kind, bound.assumptions)
    return bound


def _largest(bounds: Sequence[Certificate]) -> Certificate:
    return combined(bounds, torch.stack([bound.value for bound in bounds]).amax(0))


def _curvature(equation: Equation, state: State) -> Tensor:
    """Estimate of that eigenvalue at `state`, for equations that have a `curvature_bound`."""
    match equation:
        case ParallelEquation(branches=parts):
            here = [_curvature(part, z) for part, z in zip(parts, tensors_of(state), strict=True)]
            return torch.stack(here).amax(0)
        case ChainEquation(units=(first, second)):
            return torch.maximum(_curvature(first, state), _curvature(second, first(state)))
        case MultiBranchEquation():
            return _coupled_curvature(equation, state)
        case KernelBranchesEquation():
            space, hessian = Space(state), equation.linearize(state).hessian
            largest = _largest_eigenvalue(
                lambda v: space.flatten(hessian(space.restore(v))), space.flatten(state)
            )
            return equation.lipschitz * largest
    assert isinstance(state, Tensor)
    if isinstance(equation, SimilarityEquation):
        product = equation.similarity.linearize(state).product
    else:
        product = equation.linearize(state).jvp
    return _largest_eigenvalue(product, state)  # type: ignore[arg-type]


def _coupled_curvature(equation: MultiBranchEquation, state: State) -> Tensor:
    """The largest eigenvalue of `B ∂h Bᵀ`, which acts on the hidden states of all branches."""
    units, coupling = equation.units, equation.coupling.linearize(state)
    scales = [math.sqrt(unit.activation.lipschitz / unit.mu) for unit in units]
    injections = tuple(unit.injection for unit in units)
    hidden = Space(injections)

    def product(flat: Tensor) -> Tensor:
        parts = zip(units, scales, tensors_of(hidden.restore(flat)), strict=True)
        pooled = tuple(scale * unit.operator.rmatvec(unit.weights, v) for unit, scale, v in parts)
        moved = zip(units, scales, coupling.product(pooled), strict=True)
        return hidden.flatten(tuple(s * unit.operator.matvec(unit.weights, h) for unit, s, h in moved))

    return _largest_eigenvalue(product, hidden.flatten(injections))


def _largest_eigenvalue(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    return extreme_ritz_values(product, like, _LANCZOS_STEPS)[1]
