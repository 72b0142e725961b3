"""Average pooling and its transpose, for models whose branches have different resolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.errors import ShapeError
from opteq.native import pooling
from opteq.native.serving import takes
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
        if _attached(x):
            return _Attached.apply(self, False, x)
        if pooling.fits_average(x, self.factor):
            return pooling.average(x, self.factor)
        return F.avg_pool2d(x, self.factor)

    def adjoint(self, y: Tensor) -> Tensor:
        if _attached(y):
            return _Attached.apply(self, True, y)
        if pooling.fits_spread(y, self.factor, None):
            return pooling.spread(y, self.factor)
        return F.interpolate(y / self.factor**2, scale_factor=self.factor, mode="nearest")

    def add_adjoint(self, total: Tensor | None, y: Tensor) -> Tensor:
        """`total + Wᵀ y`, in place of `total`; without one, `Wᵀ y`."""
        if total is None:
            return self.adjoint(y)
        if pooling.fits_spread(y, self.factor, total):
            return pooling.spread(y, self.factor, total)
        return total.add_(self.adjoint(y))

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        return ()

    @property
    def codomain(self) -> tuple[int, ...]:
        return (self.domain[0], *(n // self.factor for n in self.domain[1:]))

    def quick_norm_bound(self) -> Tensor:
        return torch.tensor(1 / self.factor, dtype=torch.float64)


def _attached(image: Tensor) -> bool:
    """Whether compiled code may do a product that is to be in the graph."""
    return torch.is_grad_enabled() and image.requires_grad and takes(image.detach())


class _Attached(torch.autograd.Function):
    """A mean or its adjoint in the autograd graph; PyTorch's own gradient transposes images in memory."""

    @staticmethod
    def forward(ctx: Any, bound: BoundPool, adjoint: bool, image: Tensor) -> Tensor:
        ctx.bound, ctx.adjoint = bound, adjoint
        return bound.adjoint(image) if adjoint else bound(image)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        return None, None, ctx.bound(g) if ctx.adjoint else ctx.bound.adjoint(g)
