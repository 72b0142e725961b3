"""Weights rescaled input channel by input channel, so that no iteration is needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.operators.norms.base import Nonexpansive, rounding, unit_of
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class AlmostOrthogonal(Nonexpansive):
    """`W = ζ P diag(d)`, `d_c = (Σ_{c',s} |(P ⋆ P)_{c,c',s}|)^{-1/2}` (Prach and Lampert 2022).

    `P ⋆ P` is the kernel of `PᵀP`: the sum runs over the channels `c'` and the shifts `s`, for a matrix over
    `|PᵀP|_{cc'}`. With `D = diag(d)` the absolute row sums of `(PD)ᵀ(PD)`, weighted by `1/d`, are at most 1,
    and with them its norm; on a zero-padded image, whose convolution is a part of that on the infinite plane,
    too. Where `P` is orthogonal `d = 1`, as behind an `OrthogonalStart`. Input channels without weights stay
    without.
    """

    def contracted(self, operator: nn.Module, stored: Tensor) -> Tensor:
        kernel = stored / unit_of(stored)
        kernel = kernel if stored.dim() == 4 else kernel[..., None, None]
        filters = kernel.unflatten(0, (getattr(operator, "groups", 1), -1))
        sums = _row_sums(filters)
        d = torch.where(sums > 0, sums, 1.0).rsqrt() * rounding(kernel)
        return (filters * d[:, None, :, None, None]).view_as(stored)


def _row_sums(filters: Tensor) -> Tensor:
    """`Σ_{c',s} |(P ⋆ P)_{c,c',s}|` of filters `(groups, out, in, k, k)`, as `(groups, in)`."""
    groups, out, channels, size, _ = filters.shape
    # A convolution of the filters with themselves: what a channel gives, with what each of its group gives.
    images = filters.permute(2, 0, 1, 3, 4).reshape(channels, groups * out, size, size)
    kernels = filters.transpose(1, 2).reshape(groups * channels, out, size, size)
    products = F.conv2d(images, kernels, padding=size - 1, groups=groups)
    return products.abs().unflatten(1, (groups, channels)).sum((2, 3, 4)).mT
