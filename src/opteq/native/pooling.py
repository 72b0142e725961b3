"""Means over blocks of pixels and their adjoint in one pass over images with channels last, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.native.calling import call
from opteq.native.registering import operator
from opteq.native.serving import takes
from opteq.tensors.layouts import has_channels_last

# Numbers in the smaller of the vectors; with fewer channels it takes PyTorch less.
_FEWEST_CHANNELS = 8


def fits_average(x: Tensor, factor: int) -> bool:
    """Whether `average` is the way for the means over `factor × factor` pixels of `x`."""
    # What does not fit PyTorch is to refuse.
    divides = x.dim() == 4 and not any(n % factor for n in x.shape[2:])
    return divides and x.shape[1] >= _FEWEST_CHANNELS and has_channels_last(x) and takes(x)


def fits_spread(y: Tensor, factor: int, total: Tensor | None) -> bool:
    """Whether `spread` is the way for the adjoint at `y`, to be added to `total` if there is one."""
    dense = y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last)
    if not dense or y.shape[1] < _FEWEST_CHANNELS:
        return False
    if total is None:
        return takes(y)
    return (
        total.shape == (*y.shape[:2], *(factor * n for n in y.shape[2:]))
        and has_channels_last(total)
        and takes(y, total)
    )


def spread(y: Tensor, factor: int, total: Tensor | None = None) -> Tensor:
    """The adjoint of `average`, where it fits: every pixel over its block, divided by their number.

    Args:
        y: `(batch, C, H, W)`.
        factor: height and width of a block.
        total: what it is added to, in place.

    Returns:
        `(batch, C, factor · H, factor · W)`, with channels last; `total` if there is one.
    """
    if total is not None:
        _spread(total, y, factor, True)
        return total
    image = _images_like(y, *(factor * n for n in y.shape[2:]))
    _spread(image, y, factor, False)
    return image


def _images_like(x: Tensor, height: int, width: int) -> Tensor:
    shape = (*x.shape[:2], height, width)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _means_like(x: Tensor, factor: int) -> Tensor:
    return _images_like(x, *(n // factor for n in x.shape[2:]))


@operator("pooling_average(Tensor x, int factor) -> Tensor", _means_like)
def average(x: Tensor, factor: int) -> Tensor:
    """The means over `factor × factor` pixels of `x`, `(batch, C, H, W)`, where it fits."""
    y = _means_like(x, factor)
    batch, channels, height, width = y.shape
    call("pooling_average", "2P6Ni", x, y, batch, height, width, channels, factor, x.stride(0))
    return y


@operator("pooling_spread(Tensor(a!) x, Tensor y, int factor, bool add) -> ()")
def _spread(x: Tensor, y: Tensor, factor: int, add: bool) -> None:
    batch, channels, height, width = y.shape
    sizes = (batch, height, width, channels, factor, x.stride(0))
    call("pooling_spread", "2P6N2i", y, x, *sizes, add)
