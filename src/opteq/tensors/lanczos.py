"""Extreme eigenvalues of symmetric operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from opteq.errors import NonFiniteError

# Steps after which the Ritz value of a matrix is its largest eigenvalue to rounding, save for eigenvalues
# that crowd there; and by what its bound may exceed it then.
_MATRIX_STEPS = 100
_SLACKS = (1e-9, 1e-6, 1e-3)
# Ritz vectors that a restart keeps, and products from one look at the residual to the next.
_KEPT, _LOOK = 8, 5


def largest_ritz_pair(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tol: float = 0.0, restarts: int = 0
) -> tuple[float, Tensor]:
    """Largest Ritz value of a symmetric operator on a Krylov space, and its unit vector (Lanczos 1950).

    Without restarts the value is the largest Rayleigh quotient on `span(v, A v, …, A^{steps-1} v)`. It is
    never above the largest eigenvalue, to rounding, and far nearer to it than as many steps of power
    iteration come. A restart goes on from the best Ritz vectors (Wu and Simon 2000, Thick-Restart Lanczos):
    where eigenvalues crowd that takes a tenth of the products of restarts from the very best one alone.

    Args:
        product: `v ↦ A v`, `A` positive semidefinite, on tensors of the shape of `start`.
        start: `v`, not zero.
        steps: most vectors that are kept, and most products before a restart.
        tol: the end is where `‖A v - θ v‖ ≤ tol θ`.
        restarts: most restarts.

    Raises:
        NonFiniteError: if the products are not finite.
    """
    steps = min(steps, start.numel())
    basis = start.new_empty(steps, start.numel())
    projected = torch.zeros(steps, steps, dtype=torch.float64, device=start.device)
    direction, length, size = start.flatten(), start.norm(), 0
    while True:
        basis[size] = direction / length
        image = product(basis[size].view_as(start)).flatten()
        size += 1
        known = basis[:size]
        row = known @ image
        projected[size - 1, :size] = projected[:size, size - 1] = row.double()
        direction = image - row @ known
        direction = direction - (known @ direction) @ known
        length = direction.norm()
        # What is left after orthogonalisation is rounding once the space is exhausted.
        exhausted = bool(length <= 10 * torch.finfo(start.dtype).eps * image.norm())
        if not (exhausted or size == steps or (tol and size % _LOOK == 0)):
            continue
        values, vectors = _spectrum(projected[:size, :size])
        settled = bool(length * vectors[-1, -1].abs() <= tol * values[-1])
        if exhausted or settled or (size == steps and not restarts):
            vector = vectors[:, -1].to(known.dtype) @ known
            return values[-1].item(), (vector / vector.norm()).view_as(start)
        if size == steps:
            restarts, size = restarts - 1, min(_KEPT, steps - 1)
            basis[:size] = vectors[:, steps - size :].mT.to(known.dtype) @ known
            projected[:size, :size] = values[steps - size :].diag()


def _spectrum(projected: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the operator on the space."""
    if not bool(projected.isfinite().all()):
        raise NonFiniteError(
            "The norm of an operator is not finite: its weights are NaN, infinite or near overflow, as when a"
            " training diverges; lower the learning rate or go back to an earlier checkpoint."
        )
    return torch.linalg.eigh(projected)


def largest_eigenvalue_bound(matrix: Tensor) -> Tensor:
    """A number that is never below the largest eigenvalue of a symmetric matrix, rounding included.

    A Ritz value `θ` comes near to it from below. That `τ = θ(1 + δ)` lies above it is shown by a Cholesky
    factorisation of `B = τI - A`: in floating-point arithmetic with unit roundoff `u = ε/2` one that does not
    break down factorises `B + Δ` with `‖Δ‖ ≤ γ tr B/(1 - γ)`, `γ = (n + 1)u/(1 - (n + 1)u)` (Rump 2006,
    Verification of Positive Definiteness), and `tr B ≤ nτ`. With the rounding of `B` itself the
    eigenvalue is at most `τ(1 + n(n + 2)ε)`. It takes `n³/3` flops, and is several times as fast as all
    eigenvalues. `δ` is `1e-9`, or more where eigenvalues crowd at the end of the spectrum.

    Args:
        matrix: `A`, `(n, n)` in float64, positive semidefinite but for rounding. Overwritten.

    Returns:
        The bound; infinite where none is found, as for `A = 0`.

    Raises:
        NonFiniteError: if the matrix is not finite.
    """
    n = len(matrix)
    start = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(matrix)
    ritz, _ = largest_ritz_pair(lambda v: matrix @ v, start, _MATRIX_STEPS)
    shifted = matrix.neg_()
    diagonal = shifted.diagonal().clone()
    rounding = n * (n + 2) * torch.finfo(matrix.dtype).eps
    for slack in _SLACKS:
        bound = ritz * (1 + slack)
        shifted.diagonal().copy_(diagonal + bound)
        if not torch.linalg.cholesky_ex(shifted).info:
            return matrix.new_tensor(bound * (1 + rounding))
    return matrix.new_tensor(math.inf)


def extreme_ritz_values(
    product: Callable[[Tensor], Tensor], like: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Smallest and largest Ritz values of one symmetric operator per sample (Lanczos 1950).

    Both lie within the spectrum, to rounding, and tend to its ends as `steps` grows. Every sample starts
    from the same direction, so that its values do not depend on the batch.

    Args:
        product: `v ↦ A v` sample by sample, on tensors like `like`.
        like: `(batch, ...)`, for shape, dtype and device.
        steps: most products.

    Returns:
        Two tensors `(batch,)` in float64; NaN for a sample whose products are not finite.
    """
    start = torch.randn(like[:1].shape, generator=torch.Generator().manual_seed(0)).to(like)
    rows = start.expand_as(like).flatten(1)
    projected = _projected(lambda v: product(v.view_as(like)).flatten(1), rows, steps)
    finite = projected.isfinite().all(2).all(1)[:, None]
    values = torch.linalg.eigvalsh(torch.where(finite[..., None], projected, 0.0))
    values = torch.where(finite, values, torch.nan)
    return values[:, 0], values[:, -1]


def spectral_quadrature(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the Gauss quadrature of a symmetric operator's spectrum, as seen from `v`.

    `Σ_j τ_j f(θ_j)` is `vᵀf(A)v / ‖v‖²` for polynomials `f` of degree below twice the steps, and for random
    `v` of independent standard normal entries about the mean of `f` over the eigenvalues (stochastic Lanczos
    quadrature, Ubaru, Chen and Saad 2017). The nodes `θ_j` are Ritz values: they lie within the spectrum.

    Args:
        product: `v ↦ A v` on tensors `(1, n)`.
        start: `v`, `(1, n)`.
        steps: most products; so many vectors are kept.

    Returns:
        `θ` and `τ`, which sums to 1, each `(steps,)` in float64.
    """
    projected = _projected(product, start, steps)
    nodes, vectors = torch.linalg.eigh(projected[0])
    return nodes, vectors[0].square()


def _projected(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """`(batch, k, k)` `VᵀAV` in float64, `V` orthonormal in the Krylov space of each row of `start`."""
    steps = min(steps, start.shape[1])
    basis = start.new_zeros(len(start), steps, start.shape[1])
    projected = torch.zeros(len(start), steps, steps, dtype=torch.float64, device=start.device)
    direction, scale = start, torch.zeros_like(start[:, :1])
    for k in range(steps):
        length = direction.norm(dim=1, keepdim=True)
        # What is left after orthogonalisation is rounding once the space of a sample is exhausted.
        alive = length > 10 * torch.finfo(start.dtype).eps * scale
        basis[:, k] = torch.where(alive, direction / length, 0)
        direction = product(basis[:, k])
        scale, known = direction.norm(dim=1, keepdim=True), basis[:, : k + 1]
        row = (known @ direction[..., None])[..., 0].double()
        # An exhausted space adds rows of zeros; a Rayleigh quotient in their place adds nothing.
        row[:, k] += torch.where(alive[:, 0], 0, projected[:, 0, 0])
        projected[:, k, : k + 1] = projected[:, : k + 1, k] = row
        for _ in range(2):
            direction = direction - ((known @ direction[..., None]).mT @ known)[:, 0]
    return projected
