"""The hidden objective of a unit in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.maps.optequnit import OptEqEquation
from opteq.operators.dense import BoundDense


def closed_form_objective(equation: OptEqEquation, z: Tensor) -> Tensor:
    """`(batch,)` `φ(z) = (1/μ)1ᵀσ̃*(μW⁻ᵀz) - ⟨c, W⁻ᵀz⟩ - ½‖z‖²` (Xie et al. 2022, Eq. 4).

    `σ̃*(v) = f(v) + ½v²`; where `μW⁻ᵀz` leaves the range of `σ` by more than rounding, `φ` is infinite. For
    ReLU it is a quadratic on the cone `W⁻ᵀz ≥ 0`. For other operators use `equation.objective`, the dual `Q`,
    which has the same minimisers.

    Raises:
        ConfigError: if `W` is not a square invertible dense matrix.
    """
    if not isinstance(equation.W, BoundDense):
        raise ConfigError(
            "The closed form needs a dense `W`; use `objective`, which has the same minimisers, for others."
        )
    (weight,) = equation.W.tensors
    if weight.shape[0] != weight.shape[1] or torch.linalg.matrix_rank(weight) < len(weight):
        raise ConfigError(
            f"The closed form needs a square invertible `W`, got one of shape {tuple(weight.shape)}"
            f" and rank {int(torch.linalg.matrix_rank(weight))}; use `objective`, with the same minimisers."
        )
    lifted = torch.linalg.solve(weight.mT, z.mT).mT
    y = equation.mu * lifted
    # Equilibria lie on the border of the range, or as near to it as a saturated σ comes, where rounding
    # decides between a number and infinity.
    inside = y.clamp(*equation.activation.limits)
    slack = torch.finfo(y.dtype).eps ** 0.5 * y.abs().amax(1, keepdim=True)
    y = torch.where((y - inside).abs() <= slack, inside, y)
    conjugate = equation.activation.penalty(y) + 0.5 * y.square()
    terms = conjugate / equation.mu - equation.injection * lifted - 0.5 * z.square()
    return terms.sum(1)
