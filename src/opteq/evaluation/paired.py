"""Paired differences and what they decide: of two networks by seed, or of two answers to each image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t as student

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of paired differences, with half its confidence interval.

    Attributes:
        mean: mean of the differences.
        half_width: half the width of the 95 % interval of Student's t; infinite for a single pair.
        pairs: number of pairs.
    """

    mean: float
    half_width: float
    pairs: int

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.half_width

    def text(self, scale: float, form: str) -> str:
        """`+0.50 ± 0.20` of the differences times `scale`; a single pair has no interval."""
        mean = format(self.mean * scale, f"+{form}")
        if math.isinf(self.half_width):
            return mean
        return f"{mean} ± {format(self.half_width * scale, form)}"


def paired(differences: Sequence[float]) -> Difference:
    """The mean of `differences`, of which there is at least one."""
    pairs = len(differences)
    if pairs == 1:
        return Difference(differences[0], math.inf, 1)
    quantile = float(student.ppf(0.5 + CONFIDENCE / 2, pairs - 1))
    return Difference(fmean(differences), quantile * stdev(differences) / math.sqrt(pairs), pairs)
