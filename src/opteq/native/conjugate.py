"""The steps of conjugate gradients: in C where they can be, else with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.native.calling import call
from opteq.native.registering import operator
from opteq.native.rows import row_products
from opteq.native.serving import still_reads


def descend(
    x: Tensor,
    r: Tensor,
    p: Tensor,
    q: Tensor,
    mp: Tensor,
    rr: Tensor,
    active: Tensor,
    steps: Tensor,
    in_c: bool,
) -> tuple[Tensor, Tensor]:
    """The first half of a step of conjugate gradients, in place: `x += α p`, `r -= α q`, `α = rr / ⟨mp, q⟩`.

    Args:
        x: the solution so far.
        r: its residual.
        p: the direction.
        q: `A p`.
        mp: `M p`, the direction itself without a metric `M`.
        rr: `(batch,)` `⟨r, M r⟩` in float64.
        active: `(batch,)` which rows take the step; those where `⟨mp, q⟩` is not positive do no more.
        steps: `(batch,)` how many each has taken.
        in_c: whether compiled code `takes` such matrices without gaps, asked once for a solve.

    Returns:
        `(batch,)` `α` in float64, 0 where a row takes no step, and `(batch,)` the `rr` of the active rows,
        NaN for the others.
    """
    if in_c and _like(x, q, mp):
        return _descend(x, r, p, q, mp, rr, active, steps)
    steps += active
    seen = torch.where(active, rr, torch.nan)
    curvature = row_products(mp, q)
    active &= curvature > 0
    lengths = torch.where(active, rr / curvature, 0.0)
    alpha = lengths.to(x.dtype)[:, None]
    x.addcmul_(alpha, p)
    r.addcmul_(alpha, q, value=-1)
    return lengths, seen


def _numbers_like(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensors[5]), torch.empty_like(tensors[5])


@operator(
    "rows_descend(Tensor(a!) x, Tensor(b!) r, Tensor p, Tensor q, Tensor mp, Tensor rr, Tensor(c!) active,"
    " Tensor(d!) steps) -> (Tensor, Tensor)",
    _numbers_like,
)
def _descend(x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    lengths, seen = _numbers_like(x, *others)
    call("rows_descend", "10P2Ni", x, *others, seen, lengths, *x.shape)
    return lengths, seen


def turn(
    p: Tensor,
    mp: Tensor,
    r: Tensor,
    mr: Tensor,
    rr: Tensor,
    goal: float,
    active: Tensor,
    seen: Tensor,
    in_c: bool,
) -> int:
    """The second half, in place: `rr = ⟨r, mr⟩`, then `p = r + β p` and `mp = mr + β mp` with `β` its growth.

    Args:
        p: the direction.
        mp: `M p`, the same tensor as `p` without a metric.
        r: the residual.
        mr: `M r`, the same tensor as `r` without a metric.
        rr: `(batch,)` the former `⟨r, M r⟩`.
        goal: the `rr` that is small enough.
        active: `(batch,)` which rows took the step; those that have reached the goal take no more.
        seen: `(batch,)` where the new `rr` of these rows is entered.
        in_c: as for `descend`.

    Returns:
        How many rows go on.
    """
    if in_c and _like(p, mp, mr):
        return _turn(p, mp, r, mr, rr, goal, active, seen)
    # In a metric rounding may put it below zero.
    now = torch.where(active, row_products(r, mr).clamp_(min=0), rr)
    seen.copy_(torch.where(active, now, seen))
    active &= now > goal
    beta = torch.where(active, now / rr, 0.0).to(p.dtype)[:, None]
    rr.copy_(now)
    # In place: fresh tensors cost more than the arithmetic.
    torch.addcmul(r, beta, p, out=p)
    if mp is not p:
        torch.addcmul(mr, beta, mp, out=mp)
    return int(active.sum())


@operator(
    "rows_turn(Tensor(a!) p, Tensor(b!) mp, Tensor r, Tensor mr, Tensor(c!) rr, float goal,"
    " Tensor(d!) active, Tensor(e!) seen) -> int"
)
def _turn(p: Tensor, *others: Tensor | float) -> int:
    return call("rows_turn", "5Pd2P2Ni", p, *others, *p.shape)


def _like(x: Tensor, *others: Tensor) -> bool:
    """Whether these matrices are of the shape of `x` and without gaps, for C to take."""
    for m in others:
        if m.shape != x.shape or not m.is_contiguous():
            return False
    return still_reads(x, *others)
