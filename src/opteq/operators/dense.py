"""Dense matrices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.native.packed import Packed, gram
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.operators.norms.base import NormControl, Weights
from opteq.operators.starts import Start, initial_weight
from opteq.options import check_counts


class Dense(LinearOperator):
    """`x ↦ x Aᵀ` on vectors `(batch, in_channels)`, with `A` of shape `(out_channels, in_channels)`.

    Args:
        in_channels: columns of `A`.
        out_channels: rows of `A`.
        norm: the way that `‖A‖₂` is kept; `Ceiling()` unless given.
        start: the initial values of `A`; `UniformStart()` unless given.

    Raises:
        ConfigError: if a size is no whole number of at least 1, or for another `norm` or `start`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        norm: NormControl | None = None,
        start: Start | None = None,
    ) -> None:
        super().__init__(norm)
        check_counts(in_channels=in_channels, out_channels=out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = initial_weight((out_channels, in_channels), start)
        self.norm_control.install(self)

    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundDense:
        return BoundDense(weights, domain, error, self._memo)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, norm={self.norm_control}"


@dataclass(frozen=True, eq=False)
class BoundDense(BoundOperator):
    """`x ↦ x Aᵀ`."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[0])

    def adjoint(self, y: Tensor) -> Tensor:
        return F.linear(y, self.tensors[0].mT)

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        # Into one matrix, which may be the largest tensor of a backward pass.
        (x, y), *others = pairs
        total = y.mT @ x
        for x, y in others:
            total.addmm_(y.mT, x)
        return (total,)

    @property
    def codomain(self) -> tuple[int, ...]:
        return (self.tensors[0].shape[0],)

    def quick_norm_bound(self) -> Tensor:
        return torch.linalg.matrix_norm(self.tensors[0].double(), 2) * (1 + 1e-12)

    def gram(self, products: int) -> Packed | None:
        out_channels, in_channels = self.tensors[0].shape
        saved = products * (2 * in_channels - out_channels)
        return self._gram if saved > in_channels * out_channels else None

    @cached_property
    def _gram(self) -> Packed:
        return Packed(gram(self.tensors[0]))
