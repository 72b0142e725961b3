"""Singular values of operators as they act within a solve."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.operators.bound import BoundOperator, gram_matrix, smaller_gram
from opteq.results import Described
from opteq.tensors.lanczos import spectral_quadrature

# Side of the largest matrix whose singular values are all computed, some seconds on one core.
_LARGEST = 2048
# Of the quadrature beyond: how many random vectors, most steps from each, and how many numbers the basis of
# one of them may hold.
_PROBES = 4
_STEPS = 60
_NUMBERS = 2**26


@dataclass(frozen=True, slots=True, repr=False)
class Spectrum(Described):
    """The singular values of an operator `W`, `min(n, m)` of them for `W` from `n` to `m` numbers.

    Attributes:
        values: `(k,)` in float64, descending.
        shares: `(k,)` what share of the singular values each stands for; they sum to 1.
        kind: `"exact"`, all singular values to rounding, or `"estimate"`, see `singular_values`.
        domain: shape of what `W` acts on, without the batch.
        codomain: shape of `W x`.
    """

    values: Tensor
    shares: Tensor
    kind: str
    domain: tuple[int, ...]
    codomain: tuple[int, ...]

    @property
    def largest(self) -> float:
        """`‖W‖₂`; an estimate of it from below where the spectrum is one."""
        return self.values[0].item()

    def above(self, share: float) -> float:
        """The singular value that is at least reached by this share of them, 0.5 for the median."""
        place = int((self.shares.cumsum(0) < share * (1 - 1e-9)).sum())
        return self.values[min(place, len(self.values) - 1)].item()


@torch.no_grad()
def singular_values(operator: BoundOperator) -> Spectrum:
    """The singular values of an operator with its weights bound in, at the size that it is bound for.

    What keeps the norm in training is not asked. Where `W` or its adjoint acts on at most 2048 numbers they
    are the roots of the eigenvalues of the smaller of `WᵀW` and `WWᵀ`, assembled in float64: exact, but for
    values below `1e-7‖W‖`, which may come out as anything below that. Beyond they are estimated by stochastic
    Lanczos quadrature of the same matrix (Ubaru, Chen and Saad 2017), up to 60 steps from each of 4 random
    vectors, in memory for one basis of at most 2²⁶ numbers: the largest lies below `‖W‖₂` and near it, and
    means over the spectrum are right on average.

    Args:
        operator: what `LinearOperator.bind` gives.
    """
    sides = operator.domain, operator.codomain
    if min(map(math.prod, sides)) <= _LARGEST:
        squares = torch.linalg.eigvalsh(gram_matrix(operator)).flip(0)
        shares = torch.full_like(squares, 1 / len(squares))
        return Spectrum(squares.clamp(min=0).sqrt(), shares, "exact", *sides)
    weights = tuple(w.detach().to(torch.promote_types(w.dtype, torch.float32)) for w in operator.tensors)
    product, shape = smaller_gram(operator.with_tensors(weights))
    size = math.prod(shape)
    steps = max(2, min(_STEPS, _NUMBERS // size))
    example = weights[0] if weights else torch.empty(0)
    generator = torch.Generator().manual_seed(0)
    rules = []
    for _ in range(_PROBES):
        start = torch.randn(1, size, generator=generator).to(example)
        rules.append(spectral_quadrature(lambda v: product(v.view(1, *shape)).flatten(1), start, steps))
    squares, shares = (torch.cat(column) for column in zip(*rules, strict=True))
    squares, order = squares.clamp(min=0).sort(descending=True)
    return Spectrum(squares.sqrt(), shares[order] / _PROBES, "estimate", *sides)
