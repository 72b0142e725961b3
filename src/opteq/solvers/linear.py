"""Solvers for the linear systems of implicit differentiation, one system per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.native.conjugate import descend, turn
from opteq.native.rows import row_norms, row_products
from opteq.native.serving import takes
from opteq.results import SolveInfo
from opteq.solvers.base import check_tolerance

Matvec = Callable[[Tensor], Tensor]


@torch.no_grad()
def conjugate_gradients(
    matvec: Callable[..., Tensor],
    b: Tensor,
    tol: float,
    max_steps: int,
    metric: Matvec | None = None,
    follow: Callable[[Tensor], None] | None = None,
    size: Tensor | None = None,
) -> tuple[Tensor, Tensor, SolveInfo]:
    """Solve `A x = b` for symmetric positive-definite `A` (Hestenes and Stiefel 1952).

    Starts from `x = 0`; `matvec` and `b` work on flat `(batch, n)` matrices. A sample that has reached
    `‖b - A x‖ ≤ tol ‖b‖` no longer changes.

    Args:
        matvec: `p ↦ A p`; with a metric `(p, M p) ↦ A p`.
        b: right-hand side.
        tol: relative residual at which a sample stops.
        max_steps: most products.
        metric: a symmetric positive semidefinite `M` for which `M A` is symmetric, the identity unless
            given. Inner products and the norm of the residual are then `⟨p, q⟩ = pᵀM q`, and `x` is
            determined up to the kernel of `M`. Costs one product with `M` per step.
        follow: told, after each product, how far `(batch,)` the solution moves along its argument.
        size: `(batch,)` what residuals are relative to, in place of `‖b‖`.

    Returns:
        `x`, the residual `b - A x`, which the method has at hand, and the record of the solve.

    Raises:
        ConfigError: if the tolerance is below what the dtype can resolve.
    """
    check_tolerance(tol, b.dtype, "gradient")
    size = row_norms(b) if size is None else size
    # Solved for b / ‖b‖, whose squares neither underflow nor overflow.
    r = (b / torch.where(size > 0, size, 1.0)[:, None]).to(b.dtype)
    measured = r if metric is None else metric(r)
    x, p = torch.zeros_like(r), r.clone()
    # Written into, so not the residual itself, which a metric may hand back.
    mp = p if metric is None else measured.clone() if measured is r else measured
    rr, goal = row_products(r, measured).clamp_(min=0), tol**2
    active = ~(rr <= goal)
    steps = torch.zeros(len(b), dtype=torch.long, device=b.device)
    history, going = [rr.clone()], int(active.sum())
    in_c = takes(x, r, p) and x.is_contiguous() and r.is_contiguous() and p.is_contiguous()
    while len(history) <= max_steps and going:
        ap = matvec(p) if metric is None else matvec(p, mp)
        # No curvature means that the matrix is not positive definite (or not finite): stop there.
        lengths, seen = descend(x, r, p, ap, mp, rr, active, steps, in_c)
        if follow is not None:
            follow(lengths * size)
        del ap  # its memory is the next one's
        measured = r if metric is None else metric(r)
        going = turn(p, mp, r, measured, rr, goal, active, seen, in_c)
        history.append(seen)
    residuals = torch.stack(history, dim=1).sqrt_().to(size.dtype)
    # A right-hand side that is not finite gives a solution that is not.
    for t in (x, r):
        t.mul_(size[:, None].to(b.dtype))
    return x, r, SolveInfo(residuals, steps, rr <= goal, len(history) - 1, tol)


@torch.no_grad()
def gmres(matvec: Matvec, b: Tensor, tol: float, max_steps: int) -> tuple[Tensor, SolveInfo]:
    """Solve `A x = b` by the generalised minimal residual method (Saad and Schultz 1986), unrestarted.

    Starts from `x = 0`; keeps one basis vector per step. The Arnoldi basis is built with modified
    Gram-Schmidt applied twice; the small least-squares problems are solved in float64. A sample's
    solution is the one of the step at which it reached the tolerance.

    Raises:
        ConfigError: if the tolerance is below what the dtype can resolve.
    """
    check_tolerance(tol, b.dtype, "gradient")
    batch = len(b)
    size = row_norms(b)
    scale = torch.where(size > 0, size, 1.0)
    basis = [b / scale.to(b.dtype)[:, None]]
    hessenberg = torch.zeros(batch, max_steps + 1, max_steps, dtype=torch.float64, device=b.device)
    coefficients = torch.zeros(batch, max_steps, dtype=torch.float64, device=b.device)
    target = torch.zeros(batch, max_steps + 1, 1, dtype=torch.float64, device=b.device)
    target[:, 0, 0] = row_norms(b).double() / scale.double()
    relative = target[:, 0, 0].clone()
    active = ~(relative <= tol)
    steps = torch.zeros(batch, dtype=torch.long, device=b.device)
    history, evaluations = [relative], 0
    while evaluations < max_steps and bool(active.any()):
        k = evaluations
        w = matvec(basis[k])
        evaluations += 1
        steps += active
        stacked = torch.stack(basis, dim=1)
        for _ in range(2):
            overlap = torch.bmm(stacked, w[:, :, None])
            w = w - torch.bmm(overlap.mT, stacked)[:, 0]
            hessenberg[:, : k + 1, k] += overlap[..., 0].double()
        length = row_norms(w)
        hessenberg[:, k + 1, k] = length.double()
        basis.append(w / torch.where(length > 0, length, 1.0).to(w.dtype)[:, None])
        system, rhs = hessenberg[:, : k + 2, : k + 1], target[:, : k + 2]
        solution = torch.linalg.pinv(torch.nan_to_num(system)) @ rhs
        residual = (rhs - system @ solution).norm(dim=(1, 2))
        relative = torch.where(active, residual, relative)
        coefficients[:, : k + 1] = torch.where(active[:, None], solution[..., 0], coefficients[:, : k + 1])
        history.append(torch.where(active, relative, torch.nan))
        active = active & ~(relative <= tol) & torch.isfinite(relative)
    x = torch.zeros_like(b)
    for k in range(evaluations):
        x = x + (coefficients[:, k, None] * scale.double()[:, None]).to(b.dtype) * basis[k]
    return x, SolveInfo(torch.stack(history, dim=1), steps, relative <= tol, evaluations, tol)
