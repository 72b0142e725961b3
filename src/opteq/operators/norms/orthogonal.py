"""Weights that stay orthogonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.operators.norms.base import Nonexpansive, rounding, unit_of
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class Orthogonal(Nonexpansive):
    """`W = ζ Q` with orthonormal rows or columns, all of whose singular values are `ζ`, or 0 by its shape.

    A matrix: `Q` of the QR factorisation of the weight, the one with a positive diagonal of `R`.

    A `k×k` convolution: `Q` as its middle, after `2(k - 1)` convolutions of two pixels each, `[P, I - P]`,
    across and down, with orthogonal projections `P` onto half of the channels (Xiao et al. 2018; Li et al.
    2019, block convolution orthogonal parametrisation). Two of them with `P` and `I - P` come to a shift by
    one pixel and nothing else, which is where they start: the kernel is delta-orthogonal then, and orthogonal
    on an infinite plane, hence of a norm of at most 1 on a zero-padded image, ever after. Its parameters are
    the `weight` of the middle, `(out, in, 1, 1)`, and `spans`, whose columns span what the `P` project onto.

    Raises:
        ConfigError: for a convolution with one input channel to a group, which could only be a shift.
    """

    def install(self, operator: nn.Module) -> None:
        stored: Tensor = operator.weight.detach()  # type: ignore[union-attr, assignment]
        middle = middle_of(operator)
        if stored.dim() == 2:
            return
        groups, channels, size = getattr(operator, "groups", 1), stored.shape[1], stored.shape[2]
        half = size // 2
        if channels == 1 and size > 1:
            raise ConfigError(
                "An orthogonal convolution of one input channel to a group can only be a shift; use another"
                " `norm`, such as AlmostOrthogonal(), or fewer groups."
            )
        operator.weight = nn.Parameter(middle)
        # For each group, pair of convolutions and axis: the columns of P's span, then those of I - P.
        bases = torch.linalg.qr(torch.randn(groups, half, 2, channels, channels)).Q
        # Not of five dimensions, which `to(memory_format=torch.channels_last)` would refuse.
        operator.register_parameter("spans", nn.Parameter(bases.to(stored).flatten(0, 2).contiguous()))

    def contracted(self, operator: nn.Module, stored: Tensor) -> Tensor:
        if stored.dim() == 2:
            return orthonormal(stored) * rounding(stored)
        groups = getattr(operator, "groups", 1)
        middle = orthonormal(stored[..., 0, 0].unflatten(0, (groups, -1)))
        spans = operator.spans.to(stored).unflatten(0, (groups, -1, 2))  # type: ignore[union-attr, operator]
        across, down = (_shifts(part) for part in spans.unbind(2))
        kernel = torch.einsum("goa,gyab,gxbc->gocyx", middle, down, across).flatten(0, 1)
        return kernel * rounding(kernel)


def middle_of(operator: nn.Module) -> Tensor:
    """A copy of a matrix, or of the middle of a kernel, `(out, in, 1, 1)`, to be made orthogonal.

    Raises:
        ConfigError: if it has not full rank, in each group by itself.
    """
    stored: Tensor = operator.weight.detach()  # type: ignore[union-attr, assignment]
    half = tuple(slice(n // 2, n // 2 + 1) for n in stored.shape[2:])
    middle = stored[(..., *half)].clone()
    matrices = middle.flatten(1).unflatten(0, (getattr(operator, "groups", 1), -1)).double()
    if (torch.linalg.matrix_rank(matrices) < min(matrices.shape[1:])).any():
        raise ConfigError("An orthogonal operator needs a start of full rank, such as OrthogonalStart().")
    return middle


def orthonormal(matrix: Tensor) -> Tensor:
    """The `Q` of `QR` with a positive diagonal of `R`, of the transpose where that is taller."""
    matrix = matrix / unit_of(matrix)
    tall = matrix.shape[-2] >= matrix.shape[-1]
    q, r = torch.linalg.qr(matrix if tall else matrix.mT)
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)[..., None, :]
    return q if tall else q.mT


def _shifts(spans: Tensor) -> Tensor:
    """The product of all `[P, I - P]` of an axis, `(groups, k, n, n)`, from spans `(groups, pairs, n, n)`."""
    groups, _, n, _ = spans.shape
    identity = torch.eye(n, dtype=spans.dtype, device=spans.device)
    product = identity.expand(groups, 1, n, n)
    for pair in spans.unbind(1):
        for columns in pair.split((n // 2, n - n // 2), dim=-1):
            q = torch.linalg.qr(columns / unit_of(columns)).Q
            p = (q @ q.mT)[:, None]
            # One pixel further for the part of I - P.
            product = F.pad(product @ p, (0, 0, 0, 0, 0, 1)) + F.pad(
                product @ (identity - p), (0, 0, 0, 0, 1, 0)
            )
    return product
