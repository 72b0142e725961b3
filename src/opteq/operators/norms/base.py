"""The interface of ways to keep an operator's norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from opteq.tensors.precision import full_precision

Weights = tuple[Tensor, ...]


class NormControl:
    """A way to keep `‖W‖₂ ≤ ζ`: immutable options; parameters that it needs belong to the operator.

    The ceiling `ζ` is asked for by the map that `W` belongs to, see `LinearOperator.bind`. What acts is a
    function of the parameters alone, the same in training and in eval mode: there is no state beside them.

    Attributes:
        certified: whether `weight` has a norm of at most 1 by construction, on images of every size. It is
            then scaled to `ζ` itself (1 where none is asked for): no norm is estimated.
        forgets_size: whether above `ζ` the size of the stored weight no longer counts, so that a layer in
            training may bring it down when it grows.
    """

    certified: ClassVar[bool] = False
    forgets_size: ClassVar[bool] = False

    def install(self, operator: nn.Module) -> None:
        """Make parameters of an operator from its initial `weight`, which is a parameter already."""

    def weight(self, operator: nn.Module) -> Tensor:
        """The weight of an operator before it is scaled."""
        return operator.weight  # type: ignore[return-value]

    def kept(self, ceiling: float | None) -> float:
        """What `‖W‖₂` is kept below where a map asks for `ceiling`; infinite where nothing keeps it."""
        return math.inf

    def scaled(self, weights: Weights, ceiling: float | None, norm: Callable[[], Tensor]) -> Weights:
        """Weights as they act, from those of `weight`; of several factors the first carries the scale.

        Those that keep no norm leave them as they are.

        Args:
            weights: of the operator, or of the factors of a product.
            ceiling: `ζ`, or None.
            norm: the estimate of `‖W‖₂` with these weights, differentiable.
        """
        return weights


class Nonexpansive(NormControl):
    """`ζ W` with a `W` whose norm is at most 1, rounding included, in float32 and float64.

    Without a `contracted` of its own it is for operators that have such a norm as they are. A way of yours is
    taken at its word where its class says `certified = True` itself; else the norm is bounded as that of any
    weight.
    """

    certified = True

    def weight(self, operator: nn.Module) -> Tensor:
        stored = super().weight(operator)
        # Low precision would spoil the norm, and takes its share only when the weight is cast to it.
        with full_precision(stored.device):
            wide = torch.promote_types(stored.dtype, torch.float32)
            return self.contracted(operator, stored.to(wide)).to(stored.dtype)

    def contracted(self, operator: nn.Module, stored: Tensor) -> Tensor:
        """The weight that acts where `stored` is kept, with a norm of at most 1."""
        return stored

    def kept(self, ceiling: float | None) -> float:
        return 1.0 if ceiling is None else ceiling

    def scaled(self, weights: Weights, ceiling: float | None, norm: Callable[[], Tensor]) -> Weights:
        return weights if ceiling is None or not weights else times(weights, ceiling)


def times(weights: Weights, factor: float | Tensor) -> Weights:
    """The weights of a multiple of an operator."""
    first, *rest = weights
    return (first * factor, *rest)


def unit_of(weight: Tensor) -> Tensor:
    """A power of two near the largest entry, by which dividing rounds nothing.

    Where the size of a weight does not count, its squares in this unit neither overflow nor vanish.
    """
    largest = weight.detach().abs().amax()
    return torch.where(largest > 0, largest, 1.0).log2().floor().exp2()


def rounding(weight: Tensor) -> float:
    """A factor below 1 that makes up for what rounding in float32 adds to the norm of a weight of this size.

    It is the same in float64: a network would be another one there, and certificates, which look at it in
    float64, would be of that one.
    """
    terms = weight.numel() // min(weight.shape[:2])
    return 1 - 4 * terms * torch.finfo(torch.float32).eps
