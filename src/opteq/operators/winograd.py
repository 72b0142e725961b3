"""3×3 convolutions with a quarter of the multiplications, where a solve tolerates their rounding."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from opteq.layouts import has_channels_last
from opteq.native import load_native, plain
from opteq.operators.packed import filled
from opteq.rounding import tolerated

SMALLEST_TOLERANCE = 2e-5
"""The tolerance of a solve from which on its rounding does not matter, some four times its largest error."""

_SOURCE = Path(__file__).with_name("winograd.c")
_POINTS, _SIDE = 36, 4
_LANES = 16  # channels that are worked on together, at most
_FEWEST_TILES, _MOST_WASTE = 16, 1.8
# Every thread sums a gradient of its own, of four times as many numbers as the weight has.
_LARGEST_GRADIENT = 256 * 256


def available() -> bool:
    """Whether this machine can, and `opteq.native` is enabled: see `opteq.native.load_native`."""
    return _library() is not None


def convolve(x: Tensor, weight: Tensor, groups: int = 1, adjoint: bool = False) -> Tensor | None:
    """The "same" convolution of `x` with a 3×3 `weight`, or its adjoint; None where this is not the way.

    Winograd's minimal filtering F(4×4, 3×3) (Lavin and Gray 2016) takes 36 multiplications per tile of 4×4
    pixels and pair of channels in place of 144. Its rounding errors are some ten times those of the direct
    convolution, relatively 1e-6 to 5e-6, so it serves only inside `tolerating` of at least
    `SMALLEST_TOLERANCE`; besides, tensors must be float32, on a CPU, and free of a graph, and in one group.

    Args:
        x: `(batch, in, H, W)`, for the adjoint `(batch, out, H, W)`.
        weight: `(out, in, 3, 3)`. What is computed from it alone is kept as long as the tensor is, and made
            anew when it has changed with a trace: not through its `data`, nor in inference mode.
        groups: number of groups of channels.
        adjoint: whether to apply the adjoint.

    Returns:
        `(batch, out, H, W)`, for the adjoint `(batch, in, H, W)`, with channels last.
    """
    channels = weight.shape[0 if adjoint else 1]
    if not _serves(weight, groups, (x, channels)) or (library := _library()) is None:
        return None
    kernels = _kernels(library, weight, adjoint)
    x = _channels_last(x)
    batch, channels, height, width = x.shape
    shape = (batch, weight.shape[1 if adjoint else 0], height, width)
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    pointers = (x.data_ptr(), kernels.data_ptr(), y.data_ptr())
    sizes = (batch, height, width, channels, shape[1], x.stride(0))
    return None if library.opteq_winograd_convolve(*pointers, *sizes, torch.get_num_threads()) else y


def weight_gradient(x: Tensor, y: Tensor, weight: Tensor, groups: int = 1) -> Tensor | None:
    """The gradient of `⟨y, w * x⟩` with respect to the `weight`; None where this is not the way.

    As exact as `convolve` is, and where that is.

    Args:
        x: `(batch, in, H, W)`.
        y: `(batch, out, H, W)`.
        weight: `(out, in, 3, 3)`.
        groups: number of groups of channels.
    """
    out, channels = weight.shape[:2]
    if out * channels > _LARGEST_GRADIENT or not _serves(weight, groups, (x, channels), (y, out)):
        return None
    if (len(x), *x.shape[2:]) != (len(y), *y.shape[2:]):
        return None
    if (library := _library()) is None:
        return None
    x, y = _channels_last(x), _channels_last(y)
    threads = torch.get_num_threads()
    gradient = x.new_empty(weight.shape)
    sums = x.new_empty(threads * _POINTS * filled(channels) * filled(out))
    pointers = [t.data_ptr() for t in (x, y, gradient, sums)]
    sizes = (len(x), *x.shape[2:], channels, out, x.stride(0), y.stride(0))
    return None if library.opteq_winograd_gradient(*pointers, *sizes, threads) else gradient


def _serves(weight: Tensor, groups: int, *images: tuple[Tensor, int]) -> bool:
    """Whether this is the way for these images, each with its number of channels."""
    # In loops, which take half the time of `all`: a small convolution takes no longer than these questions.
    if tolerated() < SMALLEST_TOLERANCE or groups != 1 or weight.shape[2:] != (3, 3):
        return False
    if torch.is_autocast_enabled("cpu"):
        return False
    tensors = (weight, *(image for image, _ in images))
    if not plain(*tensors):
        return False
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return False
    for image, channels in images:
        # What does not fit PyTorch is to refuse: here it would be read beyond its end.
        if image.dim() != 4 or image.shape[1] != channels:
            return False
    return _pays(weight, images[0][0])


def _pays(weight: Tensor, x: Tensor) -> bool:
    """Whether there is enough work, by measurements: filled tiles and channels, and kernels used often."""
    batch, _, height, width = x.shape
    tiles = -(-height // _SIDE) * -(-width // _SIDE)
    return (
        min(weight.shape[:2]) >= _LANES
        and batch * tiles >= _FEWEST_TILES
        and tiles * _SIDE**2 <= _MOST_WASTE * height * width
    )


def _channels_last(x: Tensor) -> Tensor:
    return x if has_channels_last(x) else x.contiguous(memory_format=torch.channels_last)


def _library() -> ctypes.CDLL | None:
    return load_native(_SOURCE, _declare)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.opteq_winograd_kernels.argtypes = [pointer] * 2 + [size] * 2 + [number] * 2
    library.opteq_winograd_kernels.restype = None
    library.opteq_winograd_convolve.argtypes = [pointer] * 3 + [size] * 6 + [number]
    library.opteq_winograd_gradient.argtypes = [pointer] * 4 + [size] * 7 + [number]


@dataclass
class _Kernels:
    """The transformed kernels of one weight in one of its states, by whether they are the adjoint's."""

    version: tuple[int, int]
    of: dict[bool, Tensor]


_known: Any = WeakTensorKeyDictionary()


def _kernels(library: ctypes.CDLL, weight: Tensor, adjoint: bool) -> Tensor:
    # Tensors of inference mode count no versions.
    version = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
    known = _known.get(weight)
    if known is None or known.version != version:
        known = _known[weight] = _Kernels(version, {})
    if adjoint not in known.of:
        known.of[adjoint] = _transformed(library, weight, adjoint)
    return known.of[adjoint]


def _transformed(library: ctypes.CDLL, weight: Tensor, adjoint: bool) -> Tensor:
    dense = weight.detach().contiguous()
    rows, columns = dense.shape[:2] if adjoint else dense.shape[1::-1]
    kernels = dense.new_empty(_POINTS * rows * filled(columns))
    sizes = (*dense.shape[:2], adjoint, torch.get_num_threads())
    library.opteq_winograd_kernels(dense.data_ptr(), kernels.data_ptr(), *sizes)
    return kernels
