"""Fusion of branches of different resolutions after their equilibrium."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.operators.conv import Conv2d
from opteq.theory.lipschitz import lipschitz_bound

# One tensor per branch, all with the same number of channels.
Branches = tuple[Tensor, ...]


def resample(z: Tensor, like: Tensor) -> Tensor:
    """`z` at the size of `like`: average pooling or nearest up-sampling; both keep the mean over the pixels.

    Raises:
        ShapeError: if one size does not divide the other.
    """
    size, wanted = tuple(z.shape[2:]), tuple(like.shape[2:])
    if size == wanted:
        return z
    if all(n % m == 0 for n, m in zip(size, wanted, strict=True)):
        return F.avg_pool2d(z, [n // m for n, m in zip(size, wanted, strict=True)])
    if all(m % n == 0 for n, m in zip(size, wanted, strict=True)):
        return F.interpolate(z, wanted, mode="nearest")
    raise ShapeError(
        f"Expected branches whose sizes divide one another, got {size} and {wanted};"
        " change `reductions` or the image size."
    )


class SumFusion(nn.Module):
    """`Σ_j P_{i:j} z_j` at the size of every branch `i` ("sum" in Li et al. 2022, Table 1)."""

    def forward(self, z: Branches) -> Branches:
        return tuple(_sum(resample(z_j, z_i) for z_j in z) for z_i in z)

    def lipschitz(self, z: Branches) -> float:
        """`‖P‖₂ = √(Σ_i n_i · Σ_j 1/n_j)`, `n_i` the number of pixels of branch `i`.

        A matrix of blocks is at most as long as the matrix of the blocks' norms. With
        `‖P_{i:j}‖ = √(n_i/n_j)`, whether it averages or repeats pixels, that one is of rank 1. It is attained
        by constant images, which all blocks stretch at once.
        """
        return _length([[_resampling(z_j, z_i) for z_j in z] for z_i in z])


class ConvFusion(nn.Module):
    """`Σ_j K_{ij} P_{i:j} z_j` with a 3×3 convolution per pair of branches ("conv", ibidem).

    Args:
        branches: number of branches.
        channels: channels of each.
    """

    def __init__(self, branches: int, channels: int) -> None:
        super().__init__()
        self.kernels = nn.ModuleList(Conv2d(channels, channels, 3) for _ in range(branches**2))

    def forward(self, z: Branches) -> Branches:
        kernels = iter(self.kernels)
        return tuple(_sum(next(kernels)(resample(z_j, z_i)) for z_j in z) for z_i in z)

    def lipschitz(self, z: Branches) -> float:
        """The norm of the matrix of `‖K_{ij}‖ √(n_i/n_j)`, see `SumFusion`."""
        kernels = iter(self.kernels)
        return _length(
            [
                [lipschitz_bound(next(kernels), z_i).value.item() * _resampling(z_j, z_i) for z_j in z]
                for z_i in z
            ]
        )


class AverageFusion(nn.Module):
    """`(1/L) Σ_j P_{1:j} z_j`, a single tensor at the size of the first branch (Li et al. 2023, §4.1)."""

    def forward(self, z: Branches) -> Branches:
        return (_sum(resample(z_j, z[0]) for z_j in z) / len(z),)

    def lipschitz(self, z: Branches) -> float:
        """`(1/L) √(Σ_j n_1/n_j)`, see `SumFusion`."""
        return _length([[_resampling(z_j, z[0]) / len(z) for z_j in z]])


class PooledFeatures(nn.Module):
    """Every tensor `(batch, C, h_i, w_i)` averaged to `p × p` pixels, and all joined: `(batch, Σ_i C p²)`.

    Args:
        pool: `p`.
    """

    def __init__(self, pool: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(pool)

    def forward(self, z: Branches) -> Tensor:
        return torch.cat([self.pool(z_i).flatten(1) for z_i in z], 1)

    def lipschitz(self, z: Branches) -> float:
        """The largest of the tensors' constants: each has a block of its own."""
        return max(lipschitz_bound(self.pool, z_i).value.item() for z_i in z)


def fusion_named(name: str, branches: int, channels: int) -> tuple[nn.Module, int]:
    """The fusion called `"concat"`, `"sum"`, `"conv"` or `"average"`, and how many tensors it puts out.

    `"concat"` leaves the branches as they are, for a head that reads all of them.

    Raises:
        ConfigError: for another name.
    """
    match name:
        case "concat":
            return nn.Identity(), branches
        case "sum":
            return SumFusion(), branches
        case "conv":
            return ConvFusion(branches, channels), branches
        case "average":
            return AverageFusion(), 1
    raise ConfigError(f"Expected `fusion` to be concat, sum, conv or average, got {name!r}.")


def _resampling(z: Tensor, like: Tensor) -> float:
    """`‖P‖₂` of `resample`. A mean over `f` pixels has `1/√f`, a pixel that is repeated `f` times `√f`."""
    return math.sqrt(math.prod(like.shape[2:]) / math.prod(z.shape[2:]))


def _length(norms: list[list[float]]) -> float:
    """Bound on the norm of a matrix of blocks with these norms, rounding included."""
    return torch.linalg.matrix_norm(torch.tensor(norms, dtype=torch.float64), 2).item() * (1 + 1e-12)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)
