"""Products of operators, and the depthwise-separable convolution as one of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Self

from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.operators.conv import Conv2d
from opteq.operators.norms.base import Nonexpansive, NormControl, Weights
from opteq.operators.norms.ceiling import Ceiling
from opteq.operators.norms.unconstrained import Unconstrained
from opteq.operators.starts import Start
from opteq.options import check_counts


class Compose(LinearOperator):
    """`W = W_n ⋯ W_1`: operators applied from first to last.

    Its norm is estimated on the product itself; its norm bound is the product of the bounds. Where every
    factor keeps a norm of at most 1 by construction so does the product, and no norm is estimated; where none
    keeps any, nor does the product. Else it has a `Ceiling()`, unless `norm` says otherwise.

    Args:
        operators: the factors, first to last, each with its own way of keeping its norm.
        norm: the way that the norm of the product is kept; the first factor carries the scale.

    Raises:
        ConfigError: if there is no operator, one is none of opteq's, neighbouring channel numbers differ, or
            `norm` is a way for single weights.
    """

    def __init__(self, *operators: LinearOperator, norm: NormControl | None = None) -> None:
        for operator in operators:
            if not isinstance(operator, LinearOperator):
                kind = type(operator)
                raise ConfigError(
                    "Expected opteq operators one by one, such as Compose(Conv2d(3, 8), Conv2d(8, 8)),"
                    f" got {kind.__module__}.{kind.__name__}."
                )
        if not operators:
            raise ConfigError("Expected at least one operator to compose.")
        for first, second in pairwise(operators):
            if first.out_channels != second.in_channels:
                raise ConfigError(
                    f"Expected matching channels, got {first.out_channels} from {first}"
                    f" into {second.in_channels} of {second}."
                )
        controls = [operator.norm_control for operator in operators if operator.weight_count]
        certified = all(operator.kept_norm(None) <= 1 for operator in operators)
        if norm is None:
            free = controls and all(math.isinf(control.kept(1.0)) for control in controls)
            norm = Nonexpansive() if certified else Unconstrained() if free else Ceiling()
        elif not isinstance(norm, Ceiling | Unconstrained) and not (certified and type(norm) is Nonexpansive):
            raise ConfigError(
                f"{norm} keeps the norm of one weight; give it to the factors, not to the product."
            )
        super().__init__(norm)
        # A ModuleList does not say what it holds.
        self.operators: list[LinearOperator] = nn.ModuleList(operators)  # type: ignore[assignment]
        self.in_channels, self.out_channels = operators[0].in_channels, operators[-1].out_channels
        self.sides = operators[0].sides
        self.weight_count = sum(operator.weight_count for operator in operators)

    @property
    def weights(self) -> Weights:
        return tuple(w for op in self.operators for w in op.weights)

    def act(self, weights: Weights, domain: tuple[int, ...], error: float) -> BoundProduct:
        factors, rest = [], weights
        for operator in self.operators:
            factors.append(operator.act(rest[: operator.weight_count], domain, error))
            rest, domain = rest[operator.weight_count :], factors[-1].codomain
        counts = tuple(operator.weight_count for operator in self.operators)
        return BoundProduct(weights, factors[0].domain, error, self._memo, tuple(factors), counts)

    def forward(self, x: Tensor, error: float = 0.0) -> Tensor:
        for operator in self.operators:
            x = operator(x, error=error)
        return x


@dataclass(frozen=True, eq=False)
class BoundProduct(BoundOperator):
    """The product of bound operators, applied from first to last.

    Attributes:
        factors: the operators.
        counts: how many weights each has.
    """

    factors: tuple[BoundOperator, ...]
    counts: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = factor(x)
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            y = factor.adjoint(y)
        return y

    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        inputs, cotangents = [[x for x, _ in pairs]], [y for _, y in pairs]
        for factor in self.factors[:-1]:
            inputs.append([factor(x) for x in inputs[-1]])
        gradients: Weights = ()
        for place, factor in reversed(list(enumerate(self.factors))):
            gradients = factor.weight_gradient(*zip(inputs[place], cotangents, strict=True)) + gradients
            if place:
                cotangents = [factor.adjoint(y) for y in cotangents]
        return gradients

    def with_tensors(self, tensors: Weights) -> Self:
        ends = accumulate(self.counts)
        parts = [tensors[end - count : end] for count, end in zip(self.counts, ends, strict=True)]
        factors = tuple(factor.with_tensors(part) for factor, part in zip(self.factors, parts, strict=True))
        return replace(self, tensors=tuple(tensors), factors=factors)

    @property
    def codomain(self) -> tuple[int, ...]:
        return self.factors[-1].codomain

    def quick_norm_bound(self) -> Tensor:
        bounds = [factor.quick_norm_bound() for factor in self.factors]
        return math.prod(bounds[1:], start=bounds[0])


class DepthwiseSeparableConv2d(Compose):
    """A depthwise `k×k` convolution followed by a pointwise one: `(batch, in, H, W) ↦ (batch, out, H, W)`.

    `multiplier` is the number of depthwise filters per input channel (Xie et al. 2022, Table 6). The way
    `norm` is that of both convolutions.

    Raises:
        ConfigError: if a number is not whole or below 1, or `kernel_size` is even.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        multiplier: int = 1,
        norm: NormControl | None = None,
        start: Start | None = None,
    ) -> None:
        check_counts(in_channels=in_channels, multiplier=multiplier)
        middle = in_channels * multiplier
        super().__init__(
            Conv2d(in_channels, middle, kernel_size, groups=in_channels, norm=norm, start=start),
            Conv2d(middle, out_channels, 1, norm=norm, start=start),
        )
