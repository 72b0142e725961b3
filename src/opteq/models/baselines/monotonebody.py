"""The body of monotone operator equilibrium networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opteq.models.baselines.monotone import ForwardBackward, PeacemanRachford
from opteq.models.bodies import Equilibrium
from opteq.models.parts import known
from opteq.options import check_choice

_SPLITTINGS = {"forward-backward": ForwardBackward, "peaceman-rachford": PeacemanRachford}


class Monotone(Equilibrium):
    """Monotone operator equilibrium network of one convolution or several tiers (Winston and Kolter 2020).

    Gives the last tier, `(batch, hidden[-1], H, W)`, halved once per further tier; the head has to be told.

    Args:
        channels: channels of the features.
        hidden: channels of the tiers, each at half the height and width of the one before.
        m: the monotonicity.
        splitting: `"peaceman-rachford"` or `"forward-backward"`.
        step: the step `α` of the splitting.
        methods: `solver` and `gradient`, see `Equilibrium`; `Picard` is the plain splitting of the paper.

    Raises:
        ConfigError: for an unknown splitting, no tiers or numbers out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        hidden: Sequence[int] = (81,),
        *,
        m: float = 1.0,
        splitting: str = "peaceman-rachford",
        step: float = 1.0,
        **methods: Any,
    ) -> None:
        check_choice("splitting", splitting, _SPLITTINGS)
        super().__init__(_SPLITTINGS[splitting](known("channels", channels), hidden, m, step), **methods)
