"""The slopes of an activation at many arguments."""

from __future__ import annotations

import torch
from torch import Tensor


class Slopes:
    """`D = diag σ'(a)`, as what is multiplied by it.

    Args:
        values: `σ'(a)`.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def times(self, t: Tensor) -> Tensor:
        """`D t`."""
        return self._values * t

    def times_(self, t: Tensor) -> Tensor:
        """`D t`, in the memory of `t` unless a graph needs that."""
        return t.mul_(self._values)

    def sqrt(self) -> Slopes:
        """`D^½`."""
        return Slopes(self._values.sqrt())


class PositivePart(Slopes):
    """The slopes of ReLU, 1 where `values` are positive and else 0.

    They need no tensor of their own, and multiplying by them takes half the time of a product.

    Args:
        values: `a`, or `σ(a)`.
    """

    def times(self, t: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(t, self._values, 0)

    def times_(self, t: Tensor) -> Tensor:
        try:
            return torch.ops.aten.threshold_backward.grad_input(t, self._values, 0, grad_input=t)
        except (RuntimeError, KeyError):
            # Graphs, vmap and forward mode differentiation have no results in given memory, and who watches
            # over saved tensors looks for it by another name.
            return self.times(t)

    def sqrt(self) -> Slopes:
        return self
