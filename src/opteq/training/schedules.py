"""Learning rate over the course of a training, as a factor of the peak."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from opteq.errors import ConfigError

Schedule = Literal["constant", "cosine", "step", "linear", "poly"]

MILESTONES = (0.5, 0.75)


def learning_rate_factor(
    schedule: Schedule,
    total_steps: int,
    warmup: float = 0.0,
    milestones: Sequence[float] | None = None,
    drop: float = 0.1,
) -> Callable[[int], float]:
    """Make the function from optimizer step to learning rate factor.

    The factor rises linearly to 1 in the first part of the steps. With `p` from 0 to 1 the part of the
    others that is done, it goes on as:

    - `"constant"`: 1
    - `"cosine"`: `(1 + cos πp) / 2` (Loshchilov and Hutter 2017)
    - `"step"`: `drop` times what it was from every milestone on; by default a tenth at `p = 1/2` and
      `p = 3/4` (He et al. 2016)
    - `"linear"`: `1 - p`; with a warm-up of 0.3 this is one-cycle (Smith and Topin 2019)
    - `"poly"`: `(1 - p)^0.9` (Xie et al. 2022 (OptEq), §7.5)

    Args:
        schedule: Shape of the curve.
        total_steps: Optimizer steps of the whole training.
        warmup: Part of the steps that the warm-up takes.
        milestones: The `p` at which `"step"` drops; None for its default.
        drop: By what factor it drops.

    Raises:
        ConfigError: `warmup` is not at least 0 and below 1, `drop` not between 0 and 1, or `milestones` are
            not rising between 0 and 1, or given for another schedule.
    """
    if not 0 <= warmup < 1:
        raise ConfigError(f"Expected `warmup` of at least 0 and below 1, got {warmup}.")
    if milestones is not None and schedule != "step":
        raise ConfigError(f"`milestones` are those of the schedule 'step', but it is {schedule!r}.")
    if not 0 < drop < 1:
        raise ConfigError(f"Expected `drop` between 0 and 1, got {drop}.")
    drops = MILESTONES if milestones is None else tuple(milestones)
    if list(drops) != sorted(set(drops)) or not all(0 < p < 1 for p in drops):
        raise ConfigError(f"Expected rising `milestones` between 0 and 1, got {list(drops)}.")
    warmup_steps = math.floor(warmup * total_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        # A training of no steps has a schedule too; what it trained is told of elsewhere.
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        match schedule:
            case "constant":
                return 1.0
            case "cosine":
                return (1 + math.cos(math.pi * progress)) / 2
            case "step":
                # So that a tenth of a tenth is 0.01.
                return (1 / drop) ** -sum(progress >= p for p in drops)
            case "linear":
                return 1 - progress
            case "poly":
                return (1 - progress) ** 0.9

    return factor
