"""Maps of kernels of an inner product."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from opteq.activations import Activation, get_activation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, Injection, check_max_norm, expect_operator
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.inner_product import (
    InnerProductKernel,
    InnerProductSimilarity,
    get_kernel,
    inner_product,
)
from opteq.operators.base import LinearOperator
from opteq.options import check_flag
from opteq.results import State
from opteq.tensors.precision import full_precision

# Half of the room below the ceiling is for the kernel, half for W.
_SHARE = 0.5


class KernelMap(EquilibriumMap):
    """`y = σ(WᵀW y + k'(⟨c, y⟩/n) c)`, `c = U x + b`: linear, polynomial and sigmoid kernels.

    Equilibria are stationary for `G(y) = 1ᵀf(y) + ½‖y‖² - n k(⟨c, y⟩/n) - ½‖W y‖²`; `n = 1` gives the
    models of Li et al. 2023, Table 4, and the linear kernel that of OptEq, in terms of `y`.

    | kernel | `k(t)` | `k'(t)` |
    |---|---|---|
    | `"linear"` | `t` | `1` |
    | `"polynomial"` | `(1 + t)²` | `2(1 + t)` |
    | `"sigmoid"` | `tanh t` | `1 - tanh² t` |

    The curvature of the kernel along `c` is `|k''|‖c‖²/n`. With `n = 1` and a large injection the map is far
    from a contraction, and plain iteration fails. So with `normalise`, `n = max(1, K‖c‖²/(½ζ²))` per sample,
    `K` the largest `|k''(t)|` on `|t| ≤ 1`, and `‖W‖² ≤ ½ζ²`: together they keep `‖∇²S‖ ≤ ζ²`, at every state
    for the sigmoid and for degree 2. Polynomials of higher degree are unbounded, and so are their
    objectives; but with `offset=1` and an activation with `σ(0) = 0` the map takes the ball
    `‖y‖ ≤ n/‖c‖`, in which `|t| ≤ 1`, into itself and contracts there, so that the equilibrium that
    solves reach from zero is the only one near. Without `normalise` a step short enough for any
    injection is that of `Nesterov`.

    State and readout: `y`, of shape `(batch, W.in_channels, ...)`; `c` has the same shape.

    Args:
        W: opteq operator on the state.
        U: opteq operator (or any module) from the input to the state's channels.
        kernel: `"linear"`, `"polynomial"`, `"sigmoid"`, or an object such as `PolynomialKernel(3)`.
        normalise: measure inner products in units of `n`; False for `n = 1`.
        activation: name of an activation in `opteq.activations`, or an object.
        bias: whether there is a `b`.
        max_norm: the `ζ` above; without `normalise` and for the linear kernel the ceiling on `‖W‖₂`.
            `L_σ ζ² < 1` makes the map a contraction. None trusts the weights to stay small by
            themselves, and sets `n = 1`.

    Raises:
        ConfigError: for a `W` that is no opteq operator, channels that do not match, or options out
            of range.
    """

    def __init__(
        self,
        W: LinearOperator,
        U: nn.Module,
        kernel: str | InnerProductKernel = "linear",
        normalise: bool = True,
        activation: str | Activation = "relu",
        bias: bool = True,
        max_norm: float | None = 0.97,
    ) -> None:
        super().__init__()
        expect_operator(W, "W")
        if isinstance(U, LinearOperator) and U.out_channels != W.in_channels:
            raise ConfigError(
                f"Expected `U` to produce the {W.in_channels} channels of the state, which `W` takes,"
                f" got {U.out_channels}."
            )
        check_flag("normalise", normalise)
        check_max_norm(max_norm)
        self.W = W
        self.injection = Injection(U, W.in_channels, bias)
        self.kernel, self.activation = get_kernel(kernel), get_activation(activation)
        self.normalise, self.max_norm = normalise, max_norm
        zero = torch.zeros((), device="cpu")  # modules may be built on the meta device
        if not self.kernel.slope(zero) and not self.activation(zero):
            warnings.warn(
                f"{self.kernel} is degenerate: y = 0 is an equilibrium for every input, and solves start"
                " there; use an offset above 0.",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return (self.injection,)

    def bind(self, x: State, error: float = 0.0) -> SimilarityEquation:
        c = self.injection(x, error=error)
        self.W.check_input(c, "U x")
        unit = None
        if self.share and self.max_norm is not None:
            unit = self._unit(c, self.share * self.max_norm**2)
        W = self.W.bind(tuple(c.shape[1:]), self.ceiling(self.max_norm), error)
        steepness = self.curvature_bound(self.max_norm)
        return SimilarityEquation(InnerProductSimilarity(c, unit, W, self.kernel, steepness), self.activation)

    @property
    def share(self) -> float:
        """`a` of `|k''|‖c‖²/n ≤ a ζ²` for `|t| ≤ 1` and `‖W‖² ≤ (1 - a) ζ²`; 0 where `n = 1`."""
        normalised = self.normalise and self.max_norm is not None and self.kernel.unit_curvature > 0
        return _SHARE if normalised else 0.0

    def ceiling(self, max_norm: float | None) -> float | None:
        """What `‖W‖` is to be kept below, `√(1 - a) ζ`, for a `ζ` of `max_norm`."""
        return None if max_norm is None else math.sqrt(1 - self.share) * max_norm

    def curvature_bound(self, max_norm: float | None) -> float:
        """`sup |k''|‖c‖²/n` over all inputs, for a `ζ` of `max_norm`; infinite where it is unbounded."""
        if not self.kernel.largest_curvature:
            return 0.0
        if not self.share or max_norm is None:
            return math.inf
        return self.kernel.largest_curvature / self.kernel.unit_curvature * self.share * max_norm**2

    def _unit(self, c: Tensor, largest: float) -> Tensor:
        with full_precision(c.device):
            return (self.kernel.unit_curvature / largest * inner_product(c, c)).clamp(min=1.0)

    def extra_repr(self) -> str:
        return (
            f"kernel={self.kernel}, normalise={self.normalise}, activation={self.activation},"
            f" max_norm={self.max_norm}"
        )
