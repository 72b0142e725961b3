"""The linear operators of the cells, as bare PyTorch calls and as the library's modules."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from opteq.operators.base import LinearOperator
from opteq.operators.conv import Conv2d
from opteq.operators.dense import Dense

Shape = tuple[int, ...]


class Operator(ABC):
    """`W` and `Wᵀ` for any weight. `layouts` are the memory layouts that are worth trying."""

    layouts: tuple[str, ...]

    @abstractmethod
    def domain(self, channels: int, size: int) -> Shape:
        """Shape of one sample with `channels` channels and, for images, `size × size` pixels."""

    @abstractmethod
    def weight_shape(self, in_channels: int, out_channels: int) -> Shape: ...

    @abstractmethod
    def apply(self, weight: Tensor, x: Tensor) -> Tensor:
        """`W x`."""

    @abstractmethod
    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        """`Wᵀ y`."""

    @abstractmethod
    def weight_gradient(self, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Gradient of `⟨y, W x⟩` with respect to the weight."""

    @abstractmethod
    def module(self, in_channels: int, out_channels: int) -> LinearOperator:
        """The library's operator of this kind."""


@dataclass(frozen=True)
class Convolution(Operator):
    """A zero-padded `kernel × kernel` convolution."""

    kernel: int = 3
    layouts = ("contiguous", "channels_last")

    def domain(self, channels: int, size: int) -> Shape:
        return (channels, size, size)

    def weight_shape(self, in_channels: int, out_channels: int) -> Shape:
        return (out_channels, in_channels, self.kernel, self.kernel)

    def apply(self, weight: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=self.kernel // 2)

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        return F.conv_transpose2d(y, weight, padding=self.kernel // 2)

    def weight_gradient(self, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return conv2d_weight(x, list(weight.shape), y, padding=self.kernel // 2)

    def module(self, in_channels: int, out_channels: int) -> LinearOperator:
        return Conv2d(in_channels, out_channels, self.kernel)


@dataclass(frozen=True)
class Matrix(Operator):
    """A dense matrix on vectors."""

    layouts = ("contiguous",)

    def domain(self, channels: int, size: int) -> Shape:
        return (channels,)

    def weight_shape(self, in_channels: int, out_channels: int) -> Shape:
        return (out_channels, in_channels)

    def apply(self, weight: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, weight)

    def adjoint(self, weight: Tensor, y: Tensor) -> Tensor:
        return y @ weight

    def weight_gradient(self, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return y.mT @ x

    def module(self, in_channels: int, out_channels: int) -> LinearOperator:
        return Dense(in_channels, out_channels)


@torch.no_grad()
def largest_singular_value(
    normal: Callable[[Tensor], Tensor], start: Tensor, tolerance: float = 1e-7, max_steps: int = 400
) -> float:
    """Largest singular value of an operator `W` from `normal = WᵀW`, by the Lanczos method.

    The basis is orthogonalised in full, so that the only error is that of the Krylov space. Stops when
    the residual `‖WᵀW v - λ v‖` of the leading Ritz pair is below `√tolerance · λ`, whence `λ`, which
    approaches from below with the residual squared over the gap, is exact to about `tolerance`.

    Raises:
        RuntimeError: if `max_steps` vectors are not enough.
    """
    basis = [start / start.norm()]
    diagonal, off_diagonal = [], []
    for _ in range(max_steps):
        image = normal(basis[-1])
        diagonal.append(torch.sum(basis[-1] * image).item())
        flat = torch.stack(basis).flatten(1)
        rest = image.flatten()
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            rest = rest - (flat @ rest) @ flat
        off_diagonal.append(rest.norm().item())
        ridge = torch.tensor(off_diagonal[:-1], dtype=torch.float64)
        tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        tridiagonal += torch.diag(ridge, 1) + torch.diag(ridge, -1)
        values, vectors = torch.linalg.eigh(tridiagonal)
        value = values[-1].item()
        if off_diagonal[-1] * abs(vectors[-1, -1].item()) <= math.sqrt(tolerance) * value:
            return math.sqrt(value)
        basis.append(rest.reshape(start.shape) / off_diagonal[-1])
    raise RuntimeError(f"{max_steps} Lanczos steps did not settle the operator norm.")
