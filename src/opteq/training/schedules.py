"""Learning rate over the course of a training, as a factor of the peak."""

import math
from collections.abc import Callable
from typing import Literal

from opteq.errors import ConfigError

Schedule = Literal["constant", "cosine", "step", "linear"]


def learning_rate_factor(schedule: Schedule, total_steps: int, warmup: float = 0.0) -> Callable[[int], float]:
    """Make the function from optimizer step to learning rate factor.

    The factor rises linearly to 1 in the first part of the steps. With `p` from 0 to 1 the part of the
    others that is done, it goes on as:

    - `"constant"`: 1
    - `"cosine"`: `(1 + cos πp) / 2` (Loshchilov and Hutter 2017)
    - `"step"`: 1, from `p = 1/2` on 0.1, from `p = 3/4` on 0.01 (He et al. 2016)
    - `"linear"`: `1 - p`; with a warm-up of 0.3 this is one-cycle (Smith and Topin 2019)

    Args:
        schedule: Shape of the curve.
        total_steps: Optimizer steps of the whole training.
        warmup: Part of the steps that the warm-up takes.

    Raises:
        ConfigError: `warmup` is not at least 0 and below 1.
    """
    if not 0 <= warmup < 1:
        raise ConfigError(f"Expected `warmup` of at least 0 and below 1, got {warmup}.")
    warmup_steps = math.floor(warmup * total_steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        match schedule:
            case "constant":
                return 1.0
            case "cosine":
                return (1 + math.cos(math.pi * progress)) / 2
            case "step":
                return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01
            case "linear":
                return 1 - progress

    return factor
