"""Stride-1 two-dimensional convolutions with their exact adjoint."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight

from opteq.errors import ConfigError
from opteq.native import winograd
from opteq.operators.base import LinearOperator, Weights
from opteq.options import check_count
from opteq.rounding import tolerated, tolerating


class Conv2d(LinearOperator):
    """Zero-padded "same" convolution of stride 1: `(batch, in, H, W) ↦ (batch, out, H, W)`.

    The weight has shape `(out, in / groups, k, k)` as in `torch.nn.Conv2d`. The adjoint is again such
    a convolution, with channels exchanged and the kernel turned by 180°.

    Raises:
        ConfigError: if a number is not whole or below 1, `kernel_size` is even, or `groups` does not divide
            both channel numbers.
    """

    sides = ("H", "W")

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, groups: int = 1) -> None:
        super().__init__()
        check_count("in_channels", in_channels)
        check_count("out_channels", out_channels)
        check_count("kernel_size", kernel_size)
        check_count("groups", groups)
        if kernel_size % 2 == 0:
            raise ConfigError(f"Expected an odd `kernel_size` (to keep height and width), got {kernel_size}.")
        if in_channels % groups or out_channels % groups:
            raise ConfigError(
                f"Expected `groups` to divide both channel numbers, got {groups} for"
                f" {in_channels} and {out_channels}."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.groups = kernel_size, groups
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, kernel_size, kernel_size))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    @property
    def weights(self) -> Weights:
        return (self.weight,)

    def matvec(self, weights: Weights, x: Tensor) -> Tensor:
        (weight,) = weights
        if self._attached_in_tolerance(weight, x):
            return _Attached.apply(self, False, x, weight)
        if winograd.fits(x, weight, self.groups, tolerated()):
            return winograd.convolve(x, winograd.transformed(weight, adjoint=False), self.out_channels)
        return F.conv2d(x, weight, padding=self.kernel_size // 2, groups=self.groups)

    def rmatvec(self, weights: Weights, y: Tensor) -> Tensor:
        (weight,) = weights
        if self._attached_in_tolerance(weight, y):
            return _Attached.apply(self, True, y, weight)
        if winograd.fits(y, weight, self.groups, tolerated(), adjoint=True):
            return winograd.convolve(y, winograd.transformed(weight, adjoint=True), self.in_channels)
        return F.conv_transpose2d(y, weight, padding=self.kernel_size // 2, groups=self.groups)

    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        (weight,) = weights
        if winograd.fits_gradient(x, y, weight, self.groups, tolerated()):
            return (winograd.weight_gradient(x, y),)
        return (conv2d_weight(x, weight.shape, y, padding=self.kernel_size // 2, groups=self.groups),)

    def codomain(self, domain: tuple[int, ...]) -> tuple[int, ...]:
        return (self.out_channels, *domain[1:])

    def compute_norm_bound(self, weights: Weights, domain: tuple[int, ...]) -> Tensor:
        return circular_norm(weights[0], self.groups, domain[1:])

    @staticmethod
    def _attached_in_tolerance(weight: Tensor, image: Tensor) -> bool:
        attached = torch.is_grad_enabled() and (image.requires_grad or weight.requires_grad)
        # Autocast chooses a dtype of its own for each product.
        free = not torch.is_autocast_enabled(image.device.type)
        return attached and free and tolerated() >= winograd.SMALLEST_ERROR

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"{self.in_channels}, {self.out_channels}, {self.kernel_size}{groups}"


class _Attached(torch.autograd.Function):
    """`W x` or `Wᵀ x` in the autograd graph, with gradients as rough as the product may be."""

    @staticmethod
    def forward(ctx: Any, operator: Conv2d, adjoint: bool, x: Tensor, weight: Tensor) -> Tensor:
        ctx.operator, ctx.adjoint, ctx.tolerance = operator, adjoint, tolerated()
        ctx.save_for_backward(x, weight)
        return (operator.rmatvec if adjoint else operator.matvec)((weight,), x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (g,) = ctx.saved_tensors, grad_outputs
        operator, adjoint = ctx.operator, ctx.adjoint
        image, gradient = None, None
        with tolerating(ctx.tolerance):
            if ctx.needs_input_grad[2]:
                image = (operator.matvec if adjoint else operator.rmatvec)((weight,), g)
            if ctx.needs_input_grad[3]:
                pair = (g, x) if adjoint else (x, g)
                (gradient,) = operator.weight_gradient((weight,), *pair)
        return None, None, image, gradient


def circular_norm(weight: Tensor, groups: int, sides: tuple[int, ...]) -> Tensor:
    """Norm of the circular convolution on a torus with room for the padding, in float64.

    Embedding a zero-padded image into a torus of `H + k - 1` by `W + k - 1` pixels makes its
    convolution, with whatever zero padding and stride, a compression of the circular one: cropping
    and subsampling pick some of its values. The norm of the circular one is the largest spectral norm
    among the `(out, in)` matrices of its Fourier transform (the idea of Sedghi et al. 2019), and a
    compression cannot have the larger norm.

    Args:
        weight: `(out, in / groups, k, k)`.
        groups: number of groups of channels.
        sides: height and width of the images.
    """
    size = [n + k - 1 for n, k in zip(sides, weight.shape[2:], strict=True)]
    kernel = weight.double().unflatten(0, (groups, -1))
    # A real kernel's transform is symmetric, so half of the frequencies suffice.
    transform = torch.fft.rfft2(kernel, s=size).permute(0, 3, 4, 1, 2)
    return torch.linalg.matrix_norm(transform, 2).max() * (1 + 1e-12)
