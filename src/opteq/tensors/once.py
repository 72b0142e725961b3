"""Gradients that are right but must not be differentiated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def once(gradient: Tensor, sources: Sequence[Tensor], advice: str) -> Tensor:
    """`gradient`, which raises `NotImplementedError` when differentiated with respect to `sources`.

    For the backward pass of functions whose second derivative is not tracked, where it would be
    silently taken for zero.

    Args:
        gradient: the gradient, computed without a graph.
        sources: all that it depends on.
        advice: what to do instead, the end of the error message.
    """
    return _Once.apply(advice, gradient, *sources) if torch.is_grad_enabled() else gradient


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, advice: str, gradient: Tensor, *sources: Tensor) -> Tensor:
        ctx.advice = advice
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(f"Second derivatives are not available here; {ctx.advice}")
