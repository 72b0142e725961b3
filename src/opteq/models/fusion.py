"""Fusion of branches of different resolutions after their equilibrium."""

from __future__ import annotations

import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ShapeError
from opteq.operators.conv import Conv2d
from opteq.options import check_choice
from opteq.results import State, tensors_of
from opteq.theory.lipschitz import lipschitz_bound

# One tensor per branch, all with the same number of channels.
Branches = tuple[Tensor, ...]

_KINDS = ("concat", "sum", "conv", "average")


class Fusion(nn.Module):
    """Brings branches `z_j` together; `P_{i:j}` resamples branch `j` to the size of branch `i`.

    - `"concat"` leaves them as they are, for a head that reads all of them;
    - `"sum"`: `Σ_j P_{i:j} z_j` at the size of every branch `i` (Li et al. 2022, Table 1);
    - `"conv"`: `Σ_j K_{ij} P_{i:j} z_j` with a 3×3 convolution per pair of branches (ibidem);
    - `"average"`: `(1/L) Σ_j P_{1:j} z_j`, one tensor at the size of the first branch (Li et al. 2023, §4.1).

    Args:
        kind: one of these.
        branches: number of branches `L`; a single tensor is one.
        channels: channels of each.

    Raises:
        ConfigError: for another kind.
    """

    def __init__(self, kind: str, branches: int, channels: int) -> None:
        super().__init__()
        check_choice("fusion", kind, _KINDS)
        self.kind, self.branches = kind, branches
        self.outputs = 1 if kind == "average" else branches
        pairs = branches**2 if kind == "conv" else 0
        self.kernels = nn.ModuleList(Conv2d(channels, channels, 3) for _ in range(pairs))

    def forward(self, z: State) -> Branches:
        z = tensors_of(z)
        if len(z) != self.branches:
            raise ShapeError(f"Expected {self.branches} branches, got {len(z)}; set `branches` of the head.")
        if self.kind == "concat":
            return z
        rows = ([resample(z_j, z_i) for z_j in z] for z_i in z[: self.outputs])
        if self.kind == "average":
            return tuple(reduce(torch.add, row) / len(z) for row in rows)
        if self.kind == "conv":
            kernels = iter(self.kernels)
            rows = ([next(kernels)(z_j) for z_j in row] for row in rows)
        return tuple(reduce(torch.add, row) for row in rows)

    def lipschitz(self, z: State) -> float:
        """The norm of the matrix of the blocks' norms `‖K_{ij}‖ √(n_i/n_j)`, `n_i` the pixels of branch `i`.

        A matrix of blocks is at most as long as the matrix of their norms. With `‖P_{i:j}‖ = √(n_i/n_j)`,
        whether it averages or repeats pixels, that one is of rank 1 without kernels, and attained by constant
        images, which all blocks stretch at once.
        """
        z = tensors_of(z)
        if self.kind == "concat":
            return 1.0
        pixels = torch.tensor([math.prod(z_i.shape[2:]) for z_i in z], dtype=torch.float64)
        norms = (pixels[:, None] / pixels)[: self.outputs].sqrt()
        if self.kind == "average":
            norms /= len(z)
        if self.kind == "conv":
            like = [z_i for z_i in z for _ in z]
            bounds = [lipschitz_bound(*pair).value for pair in zip(self.kernels, like, strict=True)]
            norms *= torch.stack(bounds).view_as(norms)
        return torch.linalg.matrix_norm(norms, 2).item() * (1 + 1e-12)


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
