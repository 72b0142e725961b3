"""3×3 convolutions with a quarter of the multiplications, where their rounding is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.native.calling import call
from opteq.native.packed import LANES, filled
from opteq.native.registering import operator
from opteq.native.serving import serves
from opteq.tensors.layouts import has_channels_last

SMALLEST_ERROR = 2e-5
"""The error to allow from which on the rounding does not matter, some four times the largest there is."""

_POINTS, _SIDE = 36, 4
_FEWEST_TILES, _MOST_WASTE = 16, 1.8
# Every thread sums a gradient of its own, of four times as many numbers as the weight has.
_LARGEST_GRADIENT = 256 * 256


def fits(x: Tensor, weight: Tensor, groups: int, error: float, adjoint: bool = False) -> bool:
    """Whether `convolve` is the way for the "same" convolution of `x` with a 3×3 `weight`, or its adjoint.

    Winograd's minimal filtering F(4×4, 3×3) (Lavin and Gray 2016) takes 36 multiplications per tile of 4×4
    pixels and pair of channels in place of 144. Its rounding errors are some ten times those of the direct
    convolution, relatively 1e-6 to 5e-6, so it serves only where at least `SMALLEST_ERROR` is allowed; there
    must also be enough work, and one group alone.

    Args:
        x: `(batch, in, H, W)`, for the adjoint `(batch, out, H, W)`.
        weight: `(out, in, 3, 3)`.
        groups: number of groups of channels.
        error: the relative error that is allowed.
        adjoint: whether to apply the adjoint.
    """
    return _suits(weight, groups, x, weight.shape[0 if adjoint else 1], error) and serves(
        x, weight, error=error
    )


def fits_gradient(x: Tensor, y: Tensor, weight: Tensor, groups: int, error: float) -> bool:
    """Whether `weight_gradient` is the way for the gradient of `⟨y, w * x⟩` with respect to the `weight`."""
    out, channels = weight.shape[:2]
    return (
        out * channels <= _LARGEST_GRADIENT
        and _suits(weight, groups, x, channels, error)
        and y.shape == (len(x), out, *x.shape[2:])
        and serves(x, y, weight, error=error)
    )


def _kernels_like(weight: Tensor, adjoint: bool) -> Tensor:
    out, channels = weight.shape[:2]
    rows, columns = (out, channels) if adjoint else (channels, out)
    # Zeros, since vectors of eight leave some of the end as it is.
    return weight.new_zeros(_POINTS, rows, filled(columns))


@operator("winograd_transformed(Tensor weight, bool adjoint) -> Tensor", _kernels_like)
def transformed(weight: Tensor, adjoint: bool) -> Tensor:
    """What `convolve` needs of a weight `(out, in, 3, 3)`, for it or for its adjoint; constant to autograd.

    Returns:
        `(36, in, filled(out))`, for the adjoint `(36, out, filled(in))`, packed by panels.
    """
    dense = weight.detach().contiguous()
    kernels = _kernels_like(dense, adjoint)
    call("winograd_kernels", "2P2N2i", dense, kernels, *dense.shape[:2], adjoint)
    return kernels


def _images_like(x: Tensor, kernels: Tensor, out_channels: int) -> Tensor:
    shape = (x.shape[0], out_channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


@operator("winograd_convolve(Tensor x, Tensor kernels, int out_channels) -> Tensor", _images_like)
def convolve(x: Tensor, kernels: Tensor, out_channels: int) -> Tensor:
    """The "same" convolution of `x`, where it `fits`.

    Args:
        x: `(batch, in, H, W)`.
        kernels: the `transformed` weight.
        out_channels: number of channels of the result.

    Returns:
        `(batch, out_channels, H, W)`, with channels last.

    Raises:
        ShapeError: if the kernels are for other numbers of channels.
    """
    batch, channels, height, width = x.shape
    if kernels.shape != (_POINTS, channels, filled(out_channels)):
        got = f"kernels of shape {tuple(kernels.shape)}"
        raise ShapeError(f"Expected `kernels` for {channels} to {out_channels} channels, got {got}.")
    x, y = _channels_last(x), _images_like(x, kernels, out_channels)
    sizes = (batch, height, width, channels, out_channels, x.stride(0))
    call("winograd_convolve", "3P6Ni", x, kernels, y, *sizes)
    return y


def _gradient_like(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(y.shape[1], x.shape[1], 3, 3)


@operator("winograd_weight_gradient(Tensor x, Tensor y) -> Tensor", _gradient_like)
def weight_gradient(x: Tensor, y: Tensor) -> Tensor:
    """The gradient of `⟨y, w * x⟩` with respect to a weight `w`, as exact as `convolve` is, where it fits.

    Args:
        x: `(batch, in, H, W)`.
        y: `(batch, out, H, W)`.

    Returns:
        `(out, in, 3, 3)`.

    Raises:
        ShapeError: if the images of `x` and `y` are of different numbers or sizes.
    """
    (batch, channels, *sides), out = x.shape, y.shape[1]
    if (len(y), *y.shape[2:]) != (batch, *sides):
        raise ShapeError(
            f"Expected as many images of the same size, got {tuple(x.shape)} and {tuple(y.shape)}."
        )
    x, y = _channels_last(x), _channels_last(y)
    gradient = _gradient_like(x, y)
    sums = x.new_empty(torch.get_num_threads(), _POINTS, filled(channels), filled(out))
    sizes = (batch, *sides, channels, out, x.stride(0), y.stride(0))
    call("winograd_gradient", "4P7Ni", x, y, gradient, sums, *sizes)
    return gradient


def _suits(weight: Tensor, groups: int, x: Tensor, channels: int, error: float) -> bool:
    """Whether the kernel and the images of so many `channels` are what it is written for, and enough work."""
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    if error < SMALLEST_ERROR or groups != 1 or weight.shape[2:] != (3, 3) or x.dim() != 4:
        return False
    batch, given, height, width = x.shape
    tiles = -(-height // _SIDE) * -(-width // _SIDE)
    # By measurements: filled tiles and channels, and kernels used often.
    return (
        given == channels
        and min(weight.shape[:2]) >= LANES
        and batch * tiles >= _FEWEST_TILES
        and tiles * _SIDE**2 <= _MOST_WASTE * height * width
    )


def _channels_last(x: Tensor) -> Tensor:
    return x if has_channels_last(x) else x.contiguous(memory_format=torch.channels_last)
