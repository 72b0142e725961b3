"""Average pooling and its transpose, for models whose branches have different resolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.errors import ShapeError
from opteq.operators.base import FixedOperator, Weights
from opteq.options import check_count


class AveragePool(FixedOperator):
    """Mean over disjoint `factor × factor` blocks: `(batch, C, H, W) ↦ (batch, C, H/factor, W/factor)`.

    Every output averages `factor²` inputs of its own, so the norm is exactly `1 / factor`. The adjoint
    spreads each value over its block, divided by `factor²`.

    Raises:
        ConfigError: if `channels` or `factor` is no whole number of at least 1.
        ShapeError: when applied to an image whose sides `factor` does not divide.
    """

    sides = ("H", "W")

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        check_count("channels", channels)
        check_count("factor", factor)
        self.in_channels = self.out_channels = channels
        self.factor = factor

    def matvec(self, weights: Weights, x: Tensor) -> Tensor:
        self._check(x.shape[2:])
        return F.avg_pool2d(x, self.factor)

    def rmatvec(self, weights: Weights, y: Tensor) -> Tensor:
        return F.interpolate(y / self.factor**2, scale_factor=self.factor, mode="nearest")

    def codomain(self, domain: tuple[int, ...]) -> tuple[int, ...]:
        self._check(domain[1:])
        return (domain[0], *(n // self.factor for n in domain[1:]))

    def compute_norm_bound(self, weights: Weights, domain: tuple[int, ...]) -> Tensor:
        return torch.tensor(1 / self.factor, dtype=torch.float64)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, factor={self.factor}"

    def _check(self, sides: tuple[int, ...]) -> None:
        if any(n % self.factor for n in sides):
            raise ShapeError(f"Expected height and width divisible by {self.factor}, got {tuple(sides)}.")
