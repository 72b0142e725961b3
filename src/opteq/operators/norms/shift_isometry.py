"""Channels that are mixed, moved by a pixel each, and mixed again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.operators.norms.base import Nonexpansive, rounding
from opteq.operators.norms.orthogonal import middle_of, orthonormal
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class ShiftIsometry(Nonexpansive):
    """`W = ζ Q S P`: `P` and `Q` mix the channels of each pixel, `S` moves each channel by an offset.

    `P` has orthonormal columns (rows, where fewer channels come out), `Q` is orthogonal, and the offsets go
    round those of the kernel, nearest first. All singular values are `ζ`, or 0 by the shape, but for what `S`
    moves out of a zero-padded image: the norm is at most `ζ` on images of every size. These are some of the
    kernels of `Orthogonal`, a good deal cheaper to keep. As `T` may carry what it knows from pixel to pixel
    at hardly any loss, they are for equilibria that have to look far. For a matrix `S = I`.

    Have more channels come out than go in: with as many `W Wᵀ = ζ² I` but for the border of the image, and
    each hidden number of an OptEq unit, `y = σ(ζ² y + c)`, knows nothing of the others.

    Its parameters are the `weight`, `(out, in / groups, 1, 1)` for a convolution, whose QR factorisation has
    `P`, and `mixing`, that of `Q`, `(groups, out / groups, out / groups)`, which starts at random.

    Raises:
        ConfigError: for a convolution with one output channel to a group, which nothing would move.
    """

    def install(self, operator: nn.Module) -> None:
        middle, groups = middle_of(operator), getattr(operator, "groups", 1)
        operator.weight = nn.Parameter(middle)
        out = middle.shape[0] // groups
        if out == 1 and getattr(operator, "kernel_size", 1) > 1:
            raise ConfigError(
                "A shift isometry of one output channel to a group moves nothing; use another `norm`, such as"
                " AlmostOrthogonal(), or fewer groups."
            )
        operator.register_parameter("mixing", nn.Parameter(torch.randn(groups, out, out)))

    def contracted(self, operator: nn.Module, stored: Tensor) -> Tensor:
        groups, size = getattr(operator, "groups", 1), getattr(operator, "kernel_size", 1)
        p = orthonormal(stored.flatten(1).unflatten(0, (groups, -1)))
        q = orthonormal(operator.mixing.to(stored))  # type: ignore[union-attr, operator]
        moves = _offsets(p.shape[1], size).to(stored)
        kernel = torch.einsum("goh,hs,ghi->gois", q, moves, p).flatten(0, 1)
        return kernel.view(*kernel.shape[:2], *[size] * (stored.dim() - 2)) * rounding(kernel)


def _offsets(channels: int, size: int) -> Tensor:
    """Which offset of a `k×k` kernel each channel is moved by, `(channels, k²)` zeros and ones."""
    rows, columns = torch.meshgrid(*[torch.arange(size) - size // 2] * 2, indexing="ij")
    nearest = (rows**2 + columns**2).flatten().argsort(stable=True)
    return torch.eye(size**2)[nearest[torch.arange(channels) % size**2]]
