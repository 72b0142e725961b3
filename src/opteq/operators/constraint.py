"""Keeping an operator's norm below a ceiling."""

from __future__ import annotations

from opteq.operators.base import LinearOperator, Weights


def constrained_weights(operator: LinearOperator, domain: tuple[int, ...], ceiling: float | None) -> Weights:
    """Weights of `W · min(1, ceiling / ‖W‖₂)`, differentiable, the stored parameters untouched.

    The norm is that of the operator on inputs of shape `domain`, padding included, estimated by power
    iteration; the weights are returned as they are when the ceiling is not exceeded or is None.
    The first factor of a product carries the scale.
    """
    weights = operator.weights
    if ceiling is None or not weights:
        return weights
    norm = operator.norm(domain)
    if norm <= ceiling:
        return weights
    first, *rest = weights
    return (first * (ceiling / norm).to(first.dtype), *rest)
