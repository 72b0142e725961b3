"""A norm that is scaled down where it exceeds its ceiling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from opteq.operators.norms.base import NormControl, Weights, times
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class Ceiling(NormControl):
    """`W · min(1, ζ/‖W‖₂)`, differentiable (Xie et al. 2022, §5; the norm that of the operator).

    The norm is that of `W` on its inputs, padding included, followed by an estimate from below; certificates
    use a bound in its place. Without a `ζ` the weights are used as they are. What lies above `ζ` does not
    change the function, so that nothing keeps the stored weight from growing in training but `settle_norms`.
    """

    forgets_size = True

    def kept(self, ceiling: float | None) -> float:
        return math.inf if ceiling is None else ceiling

    def scaled(self, weights: Weights, ceiling: float | None, norm: Callable[[], Tensor]) -> Weights:
        if ceiling is None or not weights:
            return weights
        size = norm()
        if size <= ceiling:
            return weights
        # The derivative `-ζ/‖W‖²` would lose its digits in float32 where the norm is above 1e19.
        return times(weights, (ceiling / size.double()).to(weights[0].dtype))
