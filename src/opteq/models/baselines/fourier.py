"""Circular convolutions as products with their transfer functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Sides = tuple[int, int]


def transfer(kernel: Tensor, sides: Sides) -> Tensor:
    """The transfer function of a circular convolution, `(h, w//2 + 1, out, in)` and complex.

    One matrix per frequency; those of the other frequencies are their conjugates.

    Args:
        kernel: `(out, in, k, k)` with odd `k`, as `torch.nn.functional.conv2d` applies it.
        sides: height and width of the torus, at least `k`.
    """
    k = kernel.shape[-1]
    # conv2d correlates, hence the turned kernel; its centre belongs to the pixel at the origin.
    response = F.pad(kernel.flip(2, 3), (0, sides[1] - k, 0, sides[0] - k)).roll((-(k // 2),) * 2, (2, 3))
    return matrices(response)


def matrices(response: Tensor) -> Tensor:
    """The transfer function of an impulse response `(out, in, h, w)`."""
    return torch.fft.rfft2(response).permute(2, 3, 0, 1)


def spectrum(x: Tensor) -> Tensor:
    """The transform of images `(batch, channels, h, w)`, that of half of the frequencies."""
    # MKL refuses to transform nothing, as there is in an empty batch.
    return torch.fft.rfft2(x) if len(x) else torch.fft.rfft2(x.new_zeros(1, *x.shape[1:]))[:0]


def image(x: Tensor, sides: Sides) -> Tensor:
    """The images of this height and width that have the transform `x`."""
    return torch.fft.irfft2(x, s=sides) if len(x) else x.real.new_zeros(*x.shape[:-2], *sides)


def times(function: Tensor, x: Tensor) -> Tensor:
    """A transfer function applied to a transform, `(batch, in, …) ↦ (batch, out, …)`."""
    return torch.einsum("hwoi,bihw->bohw", function, x)


def every_other(x: Tensor) -> Tensor:
    """`S x`, every other pixel in both directions, from the first."""
    return x[..., ::2, ::2]


def spread(x: Tensor) -> Tensor:
    """`Sᵀ x`, zeros put after every pixel in both directions."""
    wide = F.pad(x[..., :, None, :, None], (0, 1, 0, 0, 0, 1))
    return wide.reshape(*x.shape[:-2], 2 * x.shape[-2], 2 * x.shape[-1])


def halved(function: Tensor, sides: Sides) -> Tensor:
    """The transfer function of `S G Sᵀ` on the halved torus: its response is every other value of `G`'s."""
    return matrices(every_other(image(function.permute(2, 3, 0, 1), sides)))


def norm(function: Tensor) -> Tensor:
    """The norm of a circular convolution in float64: the largest of its matrices'."""
    return torch.linalg.matrix_norm(function.to(torch.complex128), 2).max() * (1 + 1e-12)
