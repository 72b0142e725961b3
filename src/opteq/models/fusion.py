"""Fusion of branches of different resolutions after their equilibrium."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.operators.conv import Conv2d

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


class AverageFusion(nn.Module):
    """`(1/L) Σ_j P_{1:j} z_j`, a single tensor at the size of the first branch (Li et al. 2023, §4.1)."""

    def forward(self, z: Branches) -> Branches:
        return (_sum(resample(z_j, z[0]) for z_j in z) / len(z),)


def fusion(name: str, branches: int, channels: int) -> tuple[nn.Module, int]:
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


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)
