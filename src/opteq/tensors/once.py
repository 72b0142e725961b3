"""Gradients that are right but must not be differentiated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_RECIPE = (
    "opteq has no second derivative here; use gradient=Unrolled(steps), which differentiates an equilibrium"
    " to any order, and for one by the weights of a `W` under Ceiling() also another `norm`, such as"
    " AlmostOrthogonal(), or max_norm=None."
)


def once(gradient: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """`gradient`, which raises `NotImplementedError` when differentiated with respect to `sources`.

    For the backward pass of functions whose second derivative is not tracked, where it would be
    silently taken for zero.

    Args:
        gradient: the gradient, computed without a graph.
        sources: all that it depends on.
    """
    return _Once.apply(gradient, *sources) if torch.is_grad_enabled() else gradient


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(_RECIPE)
