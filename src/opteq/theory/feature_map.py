"""The Gaussian similarity as an inner product of infinitely many features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.options import check_counts, check_positive
from opteq.results import Certificate

_MOST_FEATURES = 2**20


def gaussian_features(v: Tensor, gamma: float, levels: int) -> Tensor:
    """The first `levels` levels of the feature map `Φ` of the Gaussian similarity.

        Φ(v) = e^{-γ‖v‖²}/√(2γ) · [1, √(2γ) v, …, √((2γ)ⁱ/i!) v^{⊗i}, …]
        ⟨Φ(c), Φ(W y)⟩ = (1/2γ) e^{-γ‖c - W y‖²}     for infinitely many levels,

    by the series of `e^{2γ⟨c, W y⟩}`. With it the Gaussian model is an OptEq model whose inputs and
    outputs are mapped to infinite width by the weights it has (Li et al. 2023, Proposition 1). The print
    has lost `1/(2γ)` and the square on `‖W z‖`, gives level `i` the width `i nⁱ` where it has `nⁱ`, and keeps
    the factor `e^{-γ‖W z‖²}` outside, where the coefficient of the inner product would depend on `z`.

    Args:
        v: `(batch, n)`, an injection `c` or an image `W y`.
        gamma: `γ`.
        levels: how many levels, `i = 0, …, levels - 1`.

    Returns:
        `(batch, 1 + n + … + n^{levels-1})`.

    Raises:
        ConfigError: if `γ` is not positive, `levels` is below 1, or the features are too many.
    """
    _check(gamma, levels)
    n = v.shape[1]
    width = sum(n**i for i in range(levels))
    if width > _MOST_FEATURES:
        raise ConfigError(
            f"{levels} levels of {n} numbers are {width} features, more than {_MOST_FEATURES};"
            " take fewer levels."
        )
    level = torch.ones_like(v[:, :1])
    features = [level]
    for i in range(1, levels):
        level = math.sqrt(2 * gamma / i) * (level[:, :, None] * v[:, None, :]).flatten(1)
        features.append(level)
    weight = torch.exp(-gamma * v.square().sum(1, keepdim=True)) / math.sqrt(2 * gamma)
    return weight * torch.cat(features, 1)


def truncation_bound(c: Tensor, v: Tensor, gamma: float, levels: int) -> Certificate:
    """`(batch,)` bound on what the levels left out would add to `⟨Φ(c), Φ(v)⟩`.

    The remainder of the exponential series after `m` terms is at most `|t|ᵐ/m! · e^{|t|}`, `t = 2γ⟨c, v⟩`.

    Args:
        c: `(batch, n)`.
        v: `(batch, n)`.
        gamma: `γ`.
        levels: `m`.

    Raises:
        ConfigError: if `γ` is not positive or `levels` is below 1.
    """
    _check(gamma, levels)
    c, v = c.double(), v.double()
    t = 2 * gamma * torch.linalg.vecdot(c, v).abs()
    lengths = gamma * (c.square().sum(1) + v.square().sum(1))
    value = torch.exp(t - lengths + torch.xlogy(levels, t) - math.lgamma(levels + 1)) / (2 * gamma)
    return Certificate(value, "bound")


def _check(gamma: float, levels: int) -> None:
    check_positive("gamma", gamma)
    check_counts(levels=levels)
