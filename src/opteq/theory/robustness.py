"""Certified robustness of classifiers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from opteq.errors import NonFiniteError, ShapeError
from opteq.gradients.implicit import Implicit
from opteq.layer import EquilibriumLayer
from opteq.solvers.anderson import Anderson
from opteq.theory.exact import in_float64
from opteq.theory.lipschitz import (
    applies,
    check_stages,
    expect_module,
    expect_settled,
    lipschitz_bound,
    stages_of,
)


@torch.no_grad()
def robust_radius(classifier: nn.Module, x: Tensor) -> Tensor:
    """`(batch,)` Euclidean radii around `x` within which the predicted class cannot change.

    With features `h(x)` of Lipschitz constant `L` and a linear last stage with rows `w_k`, the margin
    `m_k = logit_y - logit_k` has the constant `‖w_y - w_k‖ L`, so that no input closer than
    `min_k m_k / (‖w_y - w_k‖ L)` is classified otherwise. Without a linear last stage the radius is
    `min_k m_k / (√2 L)` with `L` that of the logits.

    The radii belong to exact equilibria: they are computed from a copy in float64 whose layers are
    solved to a residual of 1e-10, and presume that the classifier at work solves as well.

    Args:
        classifier: anything that `lipschitz_bound` covers, in eval mode, giving logits
            `(batch, classes)`.
        x: the inputs.

    Raises:
        ConfigError: if a part has no known Lipschitz constant, or hooks; the message names it.
        ConvergenceError: if an equilibrium is not found to that precision.
        NonFiniteError: for inputs, weights or logits that are NaN or infinite.
        ShapeError: if the classifier does not give logits.
    """
    expect_module(classifier)
    expect_settled(classifier)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"Expected the inputs to be a tensor of floating-point numbers, got {got}.")
    if not bool(x.isfinite().all()):
        raise NonFiniteError("Expected finite inputs, got NaN or infinite values; clean or drop them.")
    x, classifier = x.double(), _precise(classifier)
    *stages, last = stages_of(classifier)
    linear = applies(last, nn.Linear)
    features = nn.Sequential(*stages) if linear else nn.Sequential(*stages, last)
    constant, logits = lipschitz_bound(features, x).value, features(x)
    if linear:
        assert isinstance(last, nn.Linear)
        logits = last(logits)
        gauge = _norms(last.weight[logits.argmax(1)][:, None] - last.weight)
    else:
        gauge = torch.full_like(logits, math.sqrt(2))
    if logits.dim() != 2:
        raise ShapeError(
            f"Expected a classifier with logits of shape (batch, classes), got {tuple(logits.shape)}; put a"
            " head behind the features."
        )
    if not bool(logits.isfinite().all()):
        raise NonFiniteError("The logits are NaN or infinite in float64; scale inputs or weights down.")
    top, predicted = logits.max(1, keepdim=True)
    # 0 / 0 where two classes are a tie that no input breaks.
    radii = ((top - logits) / (gauge * constant)).nan_to_num(0.0, math.inf)
    check_stages(classifier, x[:1], logits[:1])
    return radii.scatter(1, predicted, math.inf).amin(1)


def _norms(rows: Tensor) -> Tensor:
    """Norms along the last dimension, of which none is 0 because squares underflow."""
    largest = rows.abs().amax(-1, keepdim=True)
    unit = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(rows / unit, dim=-1) * unit[..., 0]


def _precise(classifier: nn.Module) -> nn.Module:
    classifier = in_float64(classifier)
    for layer in classifier.modules():
        if isinstance(layer, EquilibriumLayer):
            # Also in place of a gradient that comes from a fixed number of steps and replaces the solve.
            layer.gradient = Implicit()
            layer.solver, layer.on_unconverged = Anderson(tol=1e-10, max_steps=2000), "raise"
    return classifier
