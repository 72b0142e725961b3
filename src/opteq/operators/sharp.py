"""The norm of an operator on few numbers, by its matrix."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from opteq.operators.lanczos import largest_eigenvalue_bound

if TYPE_CHECKING:
    from opteq.operators.bound import BoundOperator

# Side of the largest matrix that is factorised, some seconds on one core and half a gigabyte, and how many of
# its rows are computed together.
_LARGEST = 4096
_ROWS = 128


def dense_norm_bound(operator: BoundOperator) -> Tensor:
    """A bound on `‖W‖₂` from the smaller of `WᵀW` and `WWᵀ`; infinite where both are too large."""
    domain, codomain = operator.domain, operator.codomain
    sizes = math.prod(domain), math.prod(codomain)
    weights = operator.tensors
    options = {"dtype": torch.float64, "device": weights[0].device if weights else None}
    n = min(sizes)
    if n > _LARGEST:
        return torch.tensor(math.inf, **options)
    exact = operator.with_tensors(tuple(w.double() for w in weights))
    first, second, shape = (
        (exact.adjoint, exact, codomain) if n < sizes[0] else (exact, exact.adjoint, domain)
    )
    gram = torch.eye(n, **options)
    for rows in gram.split(_ROWS):
        rows.copy_(second(first(rows.view(-1, *shape))).flatten(1))
    # Sums of products are wrong by at most ε times their number of terms times what they come to without
    # signs. Of a plain W that is |W|ᵀ|W|, whose norm is at most the trace of WᵀW. The factors of a product
    # may cancel, so there the Schur test has to bound it: the largest row sum times the largest column sum.
    unsigned = operator.with_tensors(tuple(w.double().abs() for w in weights))
    row = unsigned(torch.ones(1, *domain, **options)).max()
    column = unsigned.adjoint(torch.ones(1, *codomain, **options)).max()
    terms = sum(sizes) + sum(w.numel() // min(w.shape, default=1) for w in weights)
    rounding = torch.finfo(torch.float64).eps * terms * torch.maximum(gram.trace(), row * column)
    return (largest_eigenvalue_bound(gram) + rounding).sqrt()
