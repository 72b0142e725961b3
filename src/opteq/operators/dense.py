"""Dense matrices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.native.packed import Packed, gram
from opteq.operators.base import LinearOperator, Weights
from opteq.options import check_count


class Dense(LinearOperator):
    """`x ↦ x Aᵀ` on vectors `(batch, in_channels)`, with `A` of shape `(out_channels, in_channels)`.

    Raises:
        ConfigError: if a size is no whole number of at least 1.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @property
    def weights(self) -> Weights:
        return (self.weight,)

    def matvec(self, weights: Weights, x: Tensor) -> Tensor:
        return F.linear(x, weights[0])

    def rmatvec(self, weights: Weights, y: Tensor) -> Tensor:
        return F.linear(y, weights[0].mT)

    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        return (y.mT @ x,)

    def summed_weight_gradient(self, weights: Weights, *pairs: tuple[Tensor, Tensor]) -> Weights:
        # Into one matrix, which may be the largest tensor of a backward pass.
        (x, y), *others = pairs
        total = y.mT @ x
        for x, y in others:
            total.addmm_(y.mT, x)
        return (total,)

    def gram(self, weights: Weights, products: int) -> Packed | None:
        saved = products * (2 * self.in_channels - self.out_channels)
        return Packed(gram(weights[0])) if saved > self.in_channels * self.out_channels else None

    def codomain(self, domain: tuple[int, ...]) -> tuple[int, ...]:
        return (self.out_channels,)

    def compute_norm_bound(self, weights: Weights, domain: tuple[int, ...]) -> Tensor:
        return torch.linalg.matrix_norm(weights[0].double(), 2) * (1 + 1e-12)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}"
