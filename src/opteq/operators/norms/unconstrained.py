"""Weights that are left alone."""

from __future__ import annotations

from dataclasses import dataclass

from opteq.operators.norms.base import NormControl
from opteq.options import strict_options


@strict_options
@dataclass(frozen=True)
class Unconstrained(NormControl):
    """`W` as it is, whatever `ζ` a map asks for: nothing is certified beforehand.

    For trainings that start near zero and stay small by themselves (Xie et al. 2022, §7.3 and §7.4), together
    with `GaussianStart(std)`. Certificates bound the norm that the weights have come to.
    """
