"""Average pooling and its transpose, for models whose branches have different resolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.errors import ShapeError
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.operators.norms.base import Nonexpansive, Weights
from opteq.options import check_counts


class AveragePool(LinearOperator):
    """Mean over disjoint `factor × factor` blocks: `(batch, C, H, W) ↦ (batch, C, H/factor, W/factor)`.

    Every output averages `factor²` inputs of its own, so the norm is exactly `1 / factor`. The adjoint
    spreads each value over its block, divided by `factor²`.

    Raises:
        ConfigError: if `channels` or `factor` is no whole number of at least 1.
        ShapeError: when applied to an image whose sides `factor` does not divide.
    """

    sides = ("H", "W")
    weight_count = 0

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__(Nonexpansive())
        check_counts(channels=channels, factor=factor)
        self.in_channels = self.out_channels = channels
        self.factor = factor

    @property
    def weights(self) -> Weights:
        return ()

    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundPool:
        if any(n % self.factor for n in domain[1:]):
            raise ShapeError(f"Expected height and width divisible by {self.factor}, got {domain[1:]}.")
        return BoundPool((), domain, error, self._memo, self.factor)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, factor={self.factor}"


@dataclass(frozen=True, eq=False)
class BoundPool(BoundOperator):
    """The averaging of images of one size."""

    factor: int

    def __call__(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, self.factor)

    def adjoint(self, y: Tensor) -> Tensor:
        return F.interpolate(y / self.factor**2, scale_factor=self.factor, mode="nearest")

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        return ()

    @property
    def codomain(self) -> tuple[int, ...]:
        return (self.domain[0], *(n // self.factor for n in self.domain[1:]))

    def quick_norm_bound(self) -> Tensor:
        return torch.tensor(1 / self.factor, dtype=torch.float64)
