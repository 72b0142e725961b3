"""What solvers do with the rows of matrices, one row per sample: in C where it can be, else with PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.native.calling import call, table
from opteq.native.serving import reads, takes


def row_norms(x: Tensor) -> Tensor:
    """`(batch,)` Euclidean norms of the rows, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=1, dtype=wide)


def norms(g: Tensor, f: Tensor) -> Tensor:
    """`(batch, 2)` norms of the rows of `g` and of `f`, in float64."""
    return torch.stack((row_norms(g), row_norms(f)), dim=1).double()


def row_products(p: Tensor, q: Tensor) -> Tensor:
    """`(batch,)` inner products of the rows in float64, without a `(batch, n)` tensor of products."""
    # As a row times a matrix of one row, which runs many times faster than times a column.
    return torch.bmm(p[:, None], q[:, None].mT)[:, 0, 0].double()


def observe(image: Sequence[Tensor], x: Tensor, f: Tensor, g: Tensor) -> Tensor:
    """Write an image into `f` and its difference to `x` into `g`, and measure both.

    Args:
        image: matrices, side by side as wide as `x`.
        x: `(batch, n)`.
        f: where the image goes.
        g: where the difference goes.

    Returns:
        `norms` of `g` and `f`.
    """
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    if reads(*image, x, f, g) and all(part.shape[0] == x.shape[0] for part in image):
        found = x.new_empty(x.shape[0], 2, dtype=torch.float64)
        places = [value for t in (x, f, g) for value in (t, t.stride(0))]
        call("rows_observe", table(image), len(image), *places, x.shape[0], found)
        return found
    for place, part in zip(f.split([part.shape[1] for part in image], 1), image, strict=True):
        place.copy_(part)
    torch.sub(f, x, out=g)
    return norms(g, f)


def hold(x: Tensor, following: Tensor, active: Tensor) -> Tensor:
    """The rows of `following`, in new memory, and those of `x` where a row is no longer active."""
    if not reads(x, following) or following.shape != x.shape:
        # Under autocast a map may change the dtype from one iterate to the next.
        return torch.where(active[:, None], following.to(x.dtype), x)
    held = x.new_empty(*x.shape)
    call("rows_hold", x, x.stride(0), following, following.stride(0), active, held, *x.shape)
    return held


def judge(
    norms: Tensor,
    active: Tensor,
    converged: Tensor,
    taken: Tensor,
    step: int,
    scale: float,
    tol: float,
    tiny: float,
) -> tuple[Tensor, int, int]:
    """Enter one evaluation: rows that have reached the tolerance or are no longer finite stop, in place.

    Args:
        norms: `(batch, 2)` of `T(z) - z` and of `T(z)`, in float64.
        active: `(batch,)` which rows go on.
        converged: `(batch,)` which have converged.
        taken: `(batch,)` the step at which a row stopped.
        step: the number of this one.
        scale: factor on residuals.
        tol: relative residual at which a row stops.
        tiny: the least size that residuals are relative to.

    Returns:
        `(batch,)` relative residuals, NaN for rows that had stopped; the number of rows that go on, and of
        those that are not finite, lately or since long.
    """
    if takes() and norms.is_cpu:
        residuals, counts = norms.new_empty(len(norms)), norms.new_empty(2, dtype=torch.long)
        options = (len(norms), step, scale, tol, tiny)
        call("rows_judge", norms, active, converged, taken, residuals, counts, *options)
        going, lost = counts.tolist()
        return residuals, going, lost
    changes, sizes = norms.unbind(1)
    # Finite is asked of the change: where T(z) = 0 and z is not, the residual is rightly infinite.
    infinite = ~torch.isfinite(changes)
    residuals = scale * changes / sizes.clamp(min=tiny)
    # An image too large for its norm has come nowhere.
    residuals.masked_fill_(sizes.isinf() & ~infinite, torch.inf)
    residuals.masked_fill_(~active, torch.nan)
    reached = residuals <= tol
    stops = active & (reached | infinite)
    converged |= reached
    taken.masked_fill_(stops, step)
    active &= ~stops
    going, lost = torch.stack((active.sum(), infinite.sum())).tolist()
    return residuals, going, lost


# A residual this many times the best one seen sends a sample back to the best iterate.
_GROWTH = 3.0


@dataclass(frozen=True)
class History:
    """What Anderson's method keeps of each row.

    Attributes:
        changes: `(batch, memory, n)` `g_i`.
        candidates: `(batch, memory, n)` `z_i + β g_i`.
        gram: `(batch, memory, memory)` `⟨g_i, g_j⟩` in float64.
        best: `(batch,)` the smallest `‖g_i‖` since the last restart, in float64.
        before: `(batch,)` the same at the last look for stagnation.
        born: `(batch,)` the number of the first iterate that may be used.
        ridge: the regularisation, relative to the diagonal of `gram`.
    """

    changes: Tensor
    candidates: Tensor
    gram: Tensor
    best: Tensor
    before: Tensor
    born: Tensor
    ridge: float

    @staticmethod
    def like(x: Tensor, memory: int) -> History:
        """An empty one for `(batch, n)` iterates like `x`."""
        batch, n = x.shape
        wide = {"dtype": torch.float64, "device": x.device}
        infinite = torch.full((batch,), torch.inf, **wide)
        return History(
            x.new_empty(batch, memory, n),
            x.new_empty(batch, memory, n),
            torch.zeros(batch, memory, memory, **wide),
            infinite,
            infinite.clone(),
            torch.zeros(batch, dtype=torch.long, device=x.device),
            # Proportional to each change; a tiny number serves exact zeros. What falling residuals do to the
            # scales of the system, elimination in float64 does not mind.
            10 * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps,
        )


def mix(history: History, norms: Tensor, count: int, look: bool) -> Tensor:
    """Anderson's next iterate `Σ α_i (z_i + β g_i)`, `(batch, n)`.

    The weights `α` with sum 1 make `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` smallest; a row that restarts takes the
    candidate of its smallest change, and forgets all.

    Args:
        history: with the newest change and candidate at `count` modulo its memory.
        norms: `(batch, 2)`, of the newest change first.
        count: how many iterates came before.
        look: whether to look for stagnation.
    """
    h = history
    batch, memory, n = h.changes.shape
    if takes(h.changes, h.candidates):
        following = h.changes.new_empty(batch, n)
        kept = (h.changes, h.candidates, h.gram, h.best, h.before, h.born)
        call("rows_mix", *kept, norms, following, batch, memory, n, count, look, h.ridge, _GROWTH)
        return following
    slot, used = count % memory, min(count + 1, memory)
    # As a product of a row with a matrix this runs many times faster than matrix times column.
    products = torch.bmm(h.changes[:, slot, None], h.changes[:, :used].mT)[:, 0]
    h.gram[:, slot, :used] = products
    h.gram[:, :used, slot] = products
    gram = h.gram[:, :used, :used]
    steps_back = (slot - torch.arange(used, device=gram.device)) % memory
    usable = count - steps_back >= h.born[:, None]
    restart = _restarts(h, norms[:, 0], count, look)[:, None]
    measured = gram.diagonal(dim1=1, dim2=2).masked_fill(~usable, torch.inf)
    best = F.one_hot(measured.argmin(1), used).to(gram.dtype)
    weights = torch.where(restart, best, _weights(gram, usable, slot, h.ridge)).to(h.candidates.dtype)
    return torch.bmm(weights[:, None], h.candidates[:, :used])[:, 0]


def _restarts(h: History, sizes: Tensor, count: int, look: bool) -> Tensor:
    """`(batch,)` whose residual grows, or, at a look, has not improved since the last one."""
    restart = sizes > _GROWTH * h.best
    h.best.copy_(torch.where(sizes < h.best, sizes, h.best))
    if look:
        restart |= h.best >= h.before
        h.before.copy_(h.best)
    h.best.masked_fill_(restart, torch.inf)
    h.before.masked_fill_(restart, torch.inf)
    h.born.masked_fill_(restart, count + 1)
    return restart


def _weights(gram: Tensor, usable: Tensor, newest: int, ridge: float) -> Tensor:
    """`(batch, used)` mixing weights `α`, zero for iterates that a sample may not use."""
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    regular = torch.addcmul(torch.finfo(gram.dtype).tiny * identity, gram, 1 + ridge * identity)
    both = usable[:, :, None] & usable[:, None, :]
    system = torch.where(both, regular, identity)
    solution, info = torch.linalg.solve_ex(system, usable.to(gram.dtype))
    weights = solution / solution.sum(1, keepdim=True)
    # Where the history has an exact dependence, a Picard step needs none of it.
    return torch.where((info > 0)[:, None], identity[newest], weights)


def descend(
    x: Tensor, r: Tensor, p: Tensor, q: Tensor, mp: Tensor, rr: Tensor, active: Tensor, steps: Tensor
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

    Returns:
        `(batch,)` `α` in float64, 0 where a row takes no step, and `(batch,)` the `rr` of the active rows,
        NaN for the others.
    """
    if _dense(x, r, p, q, mp):
        lengths, seen = torch.empty_like(rr), torch.empty_like(rr)
        call("rows_descend", x, r, p, q, mp, rr, active, steps, seen, lengths, *x.shape)
        return lengths, seen
    steps += active
    seen = torch.where(active, rr, torch.nan)
    curvature = row_products(mp, q)
    active &= curvature > 0
    lengths = torch.where(active, rr / curvature, 0.0)
    alpha = lengths.to(x.dtype)[:, None]
    x.addcmul_(alpha, p)
    r.addcmul_(alpha, q, value=-1)
    return lengths, seen


def turn(
    p: Tensor, mp: Tensor, r: Tensor, mr: Tensor, rr: Tensor, goal: float, active: Tensor, seen: Tensor
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

    Returns:
        How many rows go on.
    """
    if _dense(p, mp, r, mr):
        return call("rows_turn", p, mp, r, mr, rr, goal, active, seen, *p.shape)
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


def _dense(*matrices: Tensor) -> bool:
    return reads(*matrices) and all(m.is_contiguous() for m in matrices)
