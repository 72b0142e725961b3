"""How the weight of an operator starts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.options import check_kind, is_number, require, strict_options
from opteq.system.shortage import shortage


class Start(ABC):
    """The first values of a weight `(out, in, ...)`: immutable options."""

    @abstractmethod
    def fill_(self, weight: Tensor, groups: int) -> None:
        """Write them into `weight`."""


@strict_options
@dataclass(frozen=True)
class UniformStart(Start):
    """Uniform in `±1/√(fan in)`, as in `torch.nn.Linear` and `torch.nn.Conv2d`."""

    def fill_(self, weight: Tensor, groups: int) -> None:
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


@strict_options
@dataclass(frozen=True)
class GaussianStart(Start):
    """Independent `N(0, s²)`.

    Args:
        std: `s ≥ 0`; near zero for `Unconstrained` weights (Xie et al. 2022, §7.3).
    """

    std: float = 1e-2

    def __post_init__(self) -> None:
        require(is_number(self.std) and self.std >= 0, self, "std", "at least 0 and finite")

    def fill_(self, weight: Tensor, groups: int) -> None:
        nn.init.normal_(weight, std=self.std)


@strict_options
@dataclass(frozen=True)
class OrthogonalStart(Start):
    """A random matrix with orthonormal rows or columns, for kernels in the middle and else zeros.

    A convolution with such a delta-orthogonal kernel (Xiao et al. 2018) has all singular values equal to
    `gain`, or to zero where the shape asks for it. In each group of channels by itself.

    Args:
        gain: factor, positive.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        require(is_number(self.gain) and self.gain > 0, self, "gain", "positive and finite")

    @torch.no_grad()
    def fill_(self, weight: Tensor, groups: int) -> None:
        weight.zero_()
        for part in weight.chunk(groups):
            matrix = torch.empty(part.shape[:2], dtype=weight.dtype, device=weight.device)
            centre = tuple(n // 2 for n in part.shape[2:])
            part[(..., *centre)] = nn.init.orthogonal_(matrix, self.gain)


def initial_weight(shape: tuple[int, ...], start: Start | None, groups: int = 1) -> nn.Parameter:
    """A weight `(out, in / groups, ...)` with the values of a start, `UniformStart()` unless given.

    Raises:
        ConfigError: if `start` is none, or there is no memory for the weight.
    """
    start = UniformStart() if start is None else start
    check_kind(Start, "start", start, "one such as OrthogonalStart()")
    try:
        weight = torch.empty(shape)
    except RuntimeError as error:
        if (lack := shortage(error)) is None:
            raise
        raise ConfigError(f"{lack}, a weight of shape {shape}; choose smaller sizes.") from error
    start.fill_(weight, groups)
    return nn.Parameter(weight)
