"""Stride-1 two-dimensional convolutions with their exact adjoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from opteq.errors import ConfigError
from opteq.native import winograd
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.operators.norms.base import NormControl, Weights
from opteq.operators.starts import Start, initial_weight
from opteq.options import check_counts


class Conv2d(LinearOperator):
    """Zero-padded "same" convolution of stride 1: `(batch, in, H, W) ↦ (batch, out, H, W)`.

    The weight has shape `(out, in / groups, k, k)` as in `torch.nn.Conv2d`. The adjoint is again such
    a convolution, with channels exchanged and the kernel turned by 180°.

    Args:
        in_channels: channels of the images.
        out_channels: channels that come out.
        kernel_size: `k`, odd.
        groups: number of groups of channels.
        norm: the way that the norm of the convolution, padding included, is kept; `Ceiling()` unless given.
        start: the initial values of the weight; `UniformStart()` unless given.

    Raises:
        ConfigError: if a number is not whole or below 1, `kernel_size` is even, `groups` does not divide
            both channel numbers, or for another `norm` or `start`.
    """

    sides = ("H", "W")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        groups: int = 1,
        norm: NormControl | None = None,
        start: Start | None = None,
    ) -> None:
        super().__init__(norm)
        check_counts(
            in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size, groups=groups
        )
        if kernel_size % 2 == 0:
            raise ConfigError(f"Expected an odd `kernel_size` (to keep height and width), got {kernel_size}.")
        if in_channels % groups or out_channels % groups:
            raise ConfigError(
                f"Expected `groups` to divide both channel numbers, got {groups} for"
                f" {in_channels} and {out_channels}."
            )
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.groups = kernel_size, groups
        shape = (out_channels, in_channels // groups, kernel_size, kernel_size)
        self.weight = initial_weight(shape, start, groups)
        self.norm_control.install(self)

    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundConv2d:
        return BoundConv2d(weights, domain, error, self._memo, self.groups)

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return (
            f"{self.in_channels}, {self.out_channels}, {self.kernel_size}{groups}, norm={self.norm_control}"
        )


@dataclass(frozen=True, eq=False)
class BoundConv2d(BoundOperator):
    """The convolution of a weight; by Winograd's method where the `error` allows its rounding."""

    groups: int

    def __call__(self, x: Tensor) -> Tensor:
        return self._convolved(x, adjoint=False)

    def adjoint(self, y: Tensor) -> Tensor:
        return self._convolved(y, adjoint=True)

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        first, *others = (self._gradient(x, y) for x, y in pairs)
        for gradient in others:
            first.add_(gradient)
        return (first,)

    @property
    def codomain(self) -> tuple[int, ...]:
        return (self.tensors[0].shape[0], *self.domain[1:])

    def quick_norm_bound(self) -> Tensor:
        return circular_norm(self.tensors[0], self.groups, self.domain[1:])

    def _convolved(self, image: Tensor, adjoint: bool) -> Tensor:
        (weight,) = self.tensors
        if self._attached(image, adjoint):
            return _Attached.apply(self, adjoint, image, weight)
        if winograd.fits(image, weight, self.groups, self.error, adjoint):
            kernels = self._adjoint_kernels if adjoint else self._kernels
            return winograd.convolve(image, kernels, weight.shape[1 if adjoint else 0])
        product = F.conv_transpose2d if adjoint else F.conv2d
        return product(image, weight, padding=weight.shape[2] // 2, groups=self.groups)

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        (weight,) = self.tensors
        if winograd.fits_gradient(x, y, weight, self.groups, self.error):
            return winograd.weight_gradient(x, y)
        return conv2d_weight(x, weight.shape, y, padding=weight.shape[2] // 2, groups=self.groups)

    @cached_property
    def _kernels(self) -> Tensor:
        return winograd.transformed(self.tensors[0], adjoint=False)

    @cached_property
    def _adjoint_kernels(self) -> Tensor:
        return winograd.transformed(self.tensors[0], adjoint=True)

    def _attached(self, image: Tensor, adjoint: bool) -> bool:
        """Whether a product in the graph may be as rough as `error`."""
        attached = torch.is_grad_enabled() and (image.requires_grad or self.tensors[0].requires_grad)
        return (
            attached
            and self.error > 0
            and winograd.fits(image.detach(), self.tensors[0].detach(), self.groups, self.error, adjoint)
        )


class _Attached(torch.autograd.Function):
    """`W x` or `Wᵀ x` in the autograd graph, with gradients as rough as the product may be."""

    @staticmethod
    def forward(ctx: Any, bound: BoundConv2d, adjoint: bool, image: Tensor, weight: Tensor) -> Tensor:
        # Without weights, which autograd keeps, and which it lets go.
        ctx.bound, ctx.adjoint = bound.with_tensors(()), adjoint
        ctx.save_for_backward(image, weight)
        bound = bound.detach()
        return bound.adjoint(image) if adjoint else bound(image)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (image, weight), (g,) = ctx.saved_tensors, grad_outputs
        bound, adjoint = ctx.bound.with_tensors((weight,)), ctx.adjoint
        moved, gradient = None, None
        if ctx.needs_input_grad[2]:
            moved = bound(g) if adjoint else bound.adjoint(g)
        if ctx.needs_input_grad[3]:
            (gradient,) = bound.weight_gradient((g, image) if adjoint else (image, g))
        return None, None, moved, gradient


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
