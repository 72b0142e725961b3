"""The largest eigenvalue of a positive semidefinite operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def largest_ritz_pair(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> tuple[float, Tensor]:
    """Largest Ritz value of a symmetric operator on a Krylov space, and its unit vector (Lanczos 1950).

    The value is the largest Rayleigh quotient on `span(v, A v, …, A^{steps-1} v)`, hence never above the
    largest eigenvalue, to rounding, and far nearer to it than as many steps of power iteration come.

    Args:
        product: `v ↦ A v`, `A` positive semidefinite, on tensors of the shape of `start`.
        start: `v`, not zero.
        steps: most products.
    """
    basis, images = [], []
    direction = start.flatten()
    for _ in range(min(steps, start.numel())):
        length = direction.norm()
        # What is left after orthogonalisation is rounding once the space is exhausted.
        if basis and length <= 10 * torch.finfo(start.dtype).eps * images[-1].norm():
            break
        basis.append(direction / length)
        images.append(product(basis[-1].view_as(start)).flatten())
        known = torch.stack(basis)
        direction = images[-1]
        for _ in range(2):
            direction = direction - (known @ direction) @ known
    known = torch.stack(basis)
    projected = (known @ torch.stack(images).mT).double()
    values, vectors = torch.linalg.eigh((projected + projected.mT) / 2)
    vector = vectors[:, -1].to(known.dtype) @ known
    return values[-1].item(), (vector / vector.norm()).view_as(start)
