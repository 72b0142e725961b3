"""Products of operators, and the depthwise-separable convolution as one of them."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.operators.base import LinearOperator, Weights
from opteq.operators.conv import Conv2d
from opteq.options import check_count


class Compose(LinearOperator):
    """`W = W_n ⋯ W_1`: operators applied from first to last.

    Its norm is estimated on the product itself; its norm bound is the product of the bounds.

    Raises:
        ConfigError: if there is no operator, one is none of opteq's, or neighbouring channel numbers differ.
    """

    def __init__(self, *operators: LinearOperator) -> None:
        super().__init__()
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
        # A ModuleList does not say what it holds.
        self.operators: list[LinearOperator] = nn.ModuleList(operators)  # type: ignore[assignment]
        self.in_channels, self.out_channels = operators[0].in_channels, operators[-1].out_channels
        self.sides = operators[0].sides

    @property
    def weights(self) -> Weights:
        return tuple(w for op in self.operators for w in op.weights)

    def matvec(self, weights: Weights, x: Tensor) -> Tensor:
        for operator, part in self._split(weights):
            x = operator.matvec(part, x)
        return x

    def rmatvec(self, weights: Weights, y: Tensor) -> Tensor:
        for operator, part in reversed(self._split(weights)):
            y = operator.rmatvec(part, y)
        return y

    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        parts, inputs = self._split(weights), [x]
        for operator, part in parts[:-1]:
            inputs.append(operator.matvec(part, inputs[-1]))
        gradients: Weights = ()
        for (operator, part), before in zip(reversed(parts), reversed(inputs), strict=True):
            gradients = operator.weight_gradient(part, before, y) + gradients
            if before is not x:
                y = operator.rmatvec(part, y)
        return gradients

    def codomain(self, domain: tuple[int, ...]) -> tuple[int, ...]:
        for operator in self.operators:
            domain = operator.codomain(domain)
        return domain

    def compute_norm_bound(self, weights: Weights, domain: tuple[int, ...]) -> Tensor:
        bounds = []
        for operator, part in self._split(weights):
            bounds.append(operator.compute_norm_bound(part, domain))
            domain = operator.codomain(domain)
        return math.prod(bounds[1:], start=bounds[0])

    def _split(self, weights: Weights) -> list[tuple[LinearOperator, Weights]]:
        parts, position = [], 0
        for operator in self.operators:
            count = len(operator.weights)
            parts.append((operator, weights[position : position + count]))
            position += count
        return parts


class DepthwiseSeparableConv2d(Compose):
    """A depthwise `k×k` convolution followed by a pointwise one: `(batch, in, H, W) ↦ (batch, out, H, W)`.

    `multiplier` is the number of depthwise filters per input channel (Xie et al. 2022, Table 6).

    Raises:
        ConfigError: if a number is not whole or below 1, or `kernel_size` is even.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int = 3, multiplier: int = 1
    ) -> None:
        check_count("in_channels", in_channels)
        check_count("multiplier", multiplier)
        middle = in_channels * multiplier
        super().__init__(
            Conv2d(in_channels, middle, kernel_size, groups=in_channels),
            Conv2d(middle, out_channels, 1),
        )
