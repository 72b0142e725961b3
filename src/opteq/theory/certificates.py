"""What can be said for certain about a computed equilibrium."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.layer import EquilibriumLayer
from opteq.maps.affine import AffineEquation
from opteq.maps.kernelbranches import KernelBranchesEquation
from opteq.maps.multibranch import MultiBranchEquation
from opteq.maps.parallel import ParallelEquation
from opteq.maps.similarity import SimilarityEquation
from opteq.native.rows import row_norms
from opteq.operators.base import sharp_norms
from opteq.results import Certificate, Described, State, combined, distance, map_state
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import solve_fixed_point
from opteq.solvers.space import Space
from opteq.theory.lipschitz import expect_module
from opteq.theory.minimisers import largest_curvature

_REFERENCE = Anderson(tol=1e-12, max_steps=2000)


@dataclass(frozen=True, slots=True, repr=False)
class LayerCertificate(Described):
    """What is known about the equilibria of one batch; every number is per sample, in float64.

    Attributes:
        state: the equilibrium `z` that the layer computed. Coupled kernel maps iterate on `y`, which is here
            and of which residual and contraction are; distances are those of the `z = W y` they give.
        residual: `(batch,)` `‖T(z)-z‖ / ‖T(z)‖`.
        contraction: bound on the Lipschitz constant of `T`; below 1 the equilibrium is unique.
        local_contraction: bound on `‖J‖` at `z`.
        distance: bound on `‖z - z*‖`; infinite where none is known.
        distance_to_reference: estimate of `‖z - z*‖` from a solve to a residual of 1e-12; NaN where
            that one did not converge.
        objective: `(batch,)` hidden objective at `z`; None for maps without one.
        objective_at_reference: the same at the tightly solved equilibrium.
    """

    state: State
    residual: Tensor
    contraction: Certificate
    local_contraction: Certificate
    distance: Certificate
    distance_to_reference: Certificate
    objective: Tensor | None
    objective_at_reference: Tensor | None


@torch.no_grad()
def certify(layer: EquilibriumLayer, x: State) -> LayerCertificate:
    """Certify the equilibria that a layer finds for a batch of inputs.

    The layer runs as it is; its answer is then examined in float64, with the same weights. Where `T`
    contracts with constant `L < 1`, the Banach fixed-point theorem gives
    `‖z - z*‖ ≤ ‖T(z) - z‖ / (1 - L)`. Gaussian kernel maps have a sharper bound, see
    `distance_factor`, and so have coupled branches, see `MultiBranchEquation.distance_bound` and
    `KernelBranchesEquation.distance_bound`.

    Args:
        layer: the layer.
        x: a batch of inputs.

    Raises:
        ConfigError: for something else than a layer, a map of yours whose readout is not its state, or one
            whose samples enter each other's equation, as in training with a batch-coupled regulariser.
        NonFiniteError: for weights or inputs that are NaN or infinite.
    """
    if not isinstance(layer, EquilibriumLayer):
        raise ConfigError(
            f"Expected an EquilibriumLayer to certify, got {type(layer).__name__}; certify a layer inside it,"
            " for what that layer reads."
        )
    expect_module(layer)
    equation = layer.bind(x)
    if equation.batch_coupled:
        raise ConfigError(
            "In training the regulariser makes one system of the batch, with no certificate for a sample;"
            " call eval() first."
        )
    solution = layer.solve(x)
    computed = solution.state
    if solution.value is not computed and not isinstance(equation, KernelBranchesEquation):
        raise ConfigError(
            f"{type(layer.map).__name__} reads out something else than its state, which is what is certified."
        )
    equation = equation.with_tensors(tuple(t.detach().double() for t in equation.tensors))
    z = map_state(Tensor.double, computed)
    space = Space(z)
    image = space.flatten(equation(z))
    change = row_norms(image - space.flatten(z))
    reference, info = solve_fixed_point(equation, z, _REFERENCE)
    gap = distance(equation.readout(reference), equation.readout(z))
    with sharp_norms(layer.map):
        contraction, local = equation.contraction(), equation.contraction(z)
        if isinstance(equation, MultiBranchEquation | KernelBranchesEquation):
            bound = equation.distance_bound(z)
        else:
            factor = distance_factor(equation)
            # Not 0 · ∞: an exact fixed point need not be the only one.
            bound = replace(
                factor, value=torch.where(torch.isinf(factor.value), torch.inf, change * factor.value)
            )
    objective = at_reference = None
    if equation.has_energy:
        objective = equation.energy(z)
        at_reference = equation.energy(reference).where(info.converged, torch.nan)
    return LayerCertificate(
        computed,
        change / row_norms(image).clamp(min=torch.finfo(torch.float64).tiny),
        contraction,
        local,
        bound,
        Certificate(gap.where(info.converged, torch.nan), "estimate", ("The reference is the equilibrium.",)),
        objective,
        at_reference,
    )


def distance_factor(equation: Equation) -> Certificate:
    """`(batch,)` `κ` with `‖z - z*‖ ≤ κ ‖T(z) - z‖`; infinite where none is known.

    `1 / (1 - L)` where `T` contracts with constant `L`. A similarity with `∇²S ⪯ h I` and `‖∇²S‖ ≤ s` makes
    `G = f + ½‖·‖² - S` strongly convex with modulus `m = 1 - h`. The image `p = T(y)` has the
    subgradient `(∇S(y) - ∇S(p))`, no longer than `s‖y - p‖`, hence `‖p - y*‖ ≤ (s/m)‖y - p‖` and
    `κ = 1 + s/m`. For the Gaussian `h = 2e^{-3/2}s`, and `κ` stays finite up to `s = 2.24`. Independent
    branches have the largest of their factors. An affine change `A⁻¹∘T∘A` has `A z` no further than
    `κ‖M‖‖T(z) - z‖` from the equilibrium of `T`, hence the factor `‖M⁻¹‖‖M‖κ` with the `κ` of `T`, whether
    it contracts itself or not.
    """
    if isinstance(equation, ParallelEquation):
        parts = [distance_factor(branch) for branch in equation.branches]
        return combined(parts, torch.stack([part.value for part in parts]).amax(0))
    if isinstance(equation, AffineEquation):
        inner = distance_factor(equation.inner)
        return replace(inner, value=inner.value * torch.linalg.cond(equation.matrix))
    contraction = equation.contraction()
    value = torch.where(contraction.value < 1, 1 / (1 - contraction.value), torch.inf)
    if isinstance(equation, SimilarityEquation):
        s = equation.similarity.hessian_bound().value
        modulus = 1 - largest_curvature(equation.similarity).value
        value = torch.minimum(value, torch.where(modulus > 0, 1 + s / modulus, torch.inf))
    return Certificate(value, contraction.kind, contraction.assumptions)
