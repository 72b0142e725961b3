"""Deep OptEq: several units applied in turn, one equilibrium."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from opteq.errors import ConfigError, ShapeError
from opteq.maps.base import EquilibriumMap, expect_list, fast_layout
from opteq.maps.chain import ChainEquation
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.skip import SkipEquation, SkipWeight
from opteq.options import check_choice
from opteq.results import State

_STARTS = ("zero", "input")


class DeepOptEq(EquilibriumMap):
    """`T = f_L ∘ ⋯ ∘ f_1` with `f_l(z) = αW_lᵀσ(W_l z + U_l x + b_l) + (1-α)z` (Xie et al. 2022, Eq. 5-6).

    The equilibrium of one unit or two minimises a scalar objective (Corollary 1); for three and more
    there is none, and what vanishes at the equilibrium is `opteq.theory.theorem2.theorem2_residual`. As
    `α → 0` the equilibrium tends to that of `WideOptEq` on the same units.

    State and readout: `z`. The output `W_{L+1} z*` is left to the model's head.

    Args:
        units: the units, first to last; their `W` have the same input channels.
        alpha: `α` in (0, 1], one for all units or one each. At 1 there is no skip connection.
        learn_alpha: learn one `α` per unit, starting from `alpha`.
        start: iterate from `"zero"`, or from `"input"`, that is `z⁰ = x`, of the state's shape. It
            matters to unrolled gradients, which stop before the equilibrium.

    Raises:
        ConfigError: for no units, units of different state channels, or options out of range.
    """

    def __init__(
        self,
        units: Sequence[OptEqUnit],
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        start: str = "zero",
    ) -> None:
        super().__init__()
        check_units(units)
        alphas = list(alpha) if isinstance(alpha, Sequence) else [alpha] * len(units)
        if len(alphas) != len(units):
            raise ConfigError(f"Expected one `alpha`, or {len(units)} for as many units, got {len(alphas)}.")
        check_choice("start", start, _STARTS)
        # A ModuleList does not say what it holds.
        self.units: list[OptEqUnit] = nn.ModuleList(units)  # type: ignore[assignment]
        self.skips: list[SkipWeight] = nn.ModuleList(SkipWeight(a, learn_alpha) for a in alphas)  # type: ignore[assignment]
        self.start = start

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return tuple(operator for unit in self.units for operator in unit.injections)

    def bind(self, x: State, error: float = 0.0) -> ChainEquation:
        return ChainEquation(self.bind_units(x, error), self._start(x))

    def bind_units(self, x: State, error: float) -> tuple[SkipEquation, ...]:
        """The equations of the units with their skip connections."""
        pairs = zip(self.units, self.skips, strict=True)
        return tuple(SkipEquation(unit.bind(x, error), skip.value) for unit, skip in pairs)

    def _start(self, x: State) -> Tensor | None:
        if self.start == "zero":
            return None
        channels = self.units[0].W.in_channels
        if not isinstance(x, Tensor) or x.shape[1] != channels:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(
                f"Expected `x` with the state's {channels} channels for start='input', got {got}."
            )
        return fast_layout(x)

    def extra_repr(self) -> str:
        return f"start={self.start}"


def check_units(units: Sequence[OptEqUnit]) -> None:
    """Raise a `ConfigError` unless `units` can share a state."""
    for unit in expect_list(units, "unit", "units"):
        if not isinstance(unit, OptEqUnit):
            raise ConfigError(f"Expected units such as OptEqUnit(W, U), got {type(unit).__name__}.")
    channels = [unit.W.in_channels for unit in units]
    if len(set(channels)) != 1:
        raise ConfigError(f"Expected units on one state, got `W` with {channels} input channels.")
