"""Slow and obvious counterparts of what the library computes."""

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.operators.bound import BoundOperator


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def matrix_of(function: Callable[[Tensor], Tensor], domain: tuple[int, ...]) -> Tensor:
    """The matrix of a linear function of one sample, column by column."""
    size = torch.Size(domain).numel()
    columns = [
        function(e.reshape(1, *domain)).detach().flatten() for e in torch.eye(size, dtype=torch.float64)
    ]
    return torch.stack(columns, dim=1)


def dense(bound: BoundOperator) -> Tensor:
    """The matrix of a bound operator, with the values that its weights have, in float64."""
    return matrix_of(bound.with_tensors(tuple(t.detach().double() for t in bound.tensors)), bound.domain)


def jacobian(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """`(batch, n, n)` Jacobians, by automatic differentiation, of a function that acts sample by sample."""
    z = z.detach().requires_grad_()
    value = function(z).flatten(1)
    rows = [
        torch.autograd.grad(value[:, i].sum(), z, retain_graph=True, materialize_grads=True)[0].flatten(1)
        for i in range(value.shape[1])
    ]
    return torch.stack(rows, dim=1)


def spectral_norm(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2)
