"""What solvers do with the rows of matrices, one row per sample: in C where it can be, else with PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.native import load_native

_SOURCE = Path(__file__).with_name("rows.c")


def row_norms(x: Tensor) -> Tensor:
    """`(batch,)` Euclidean norms of the rows, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=1, dtype=wide)


def row_products(p: Tensor, q: Tensor) -> Tensor:
    """`(batch,)` inner products of the rows in float64, without a `(batch, n)` tensor of products."""
    # As a row times a matrix of one row, which runs many times faster than times a column.
    return torch.bmm(p[:, None], q[:, None].mT)[:, 0, 0].double()


def observe(image: Sequence[Tensor], x: Tensor, f: Tensor, g: Tensor) -> list[list[float]]:
    """Write an image into `f` and its difference to `x` into `g`, and measure both.

    Args:
        image: matrices, side by side as wide as `x`.
        x: `(batch, n)`.
        f: where the image goes.
        g: where the difference goes.

    Returns:
        The norms of the rows of `g`, and those of the rows of `f`.
    """
    library = _library() if _native(*image, x, f, g) else None
    if library is not None:
        squares = torch.zeros(len(x), 2, dtype=torch.float64)
        threads, start, failed = torch.get_num_threads(), 0, 0
        for part in image:
            places = (t[:, start : start + part.shape[1]] for t in (x, f, g))
            pointers = [n for t in (part, *places) for n in (t.data_ptr(), t.stride(0))]
            failed |= library.opteq_rows_observe(*pointers, *part.shape, squares.data_ptr(), threads)
            start += part.shape[1]
        if not failed:
            return squares.sqrt_().T.tolist()
    for place, part in zip(f.split([part.shape[1] for part in image], 1), image, strict=True):
        place.copy_(part)
    torch.sub(f, x, out=g)
    return torch.stack((row_norms(g), row_norms(f))).tolist()


def descend(x: Tensor, r: Tensor, p: Tensor, q: Tensor, mp: Tensor, rr: Tensor, active: Tensor) -> None:
    """The first half of a step of conjugate gradients, in place: `x += α p`, `r -= α q`, `α = rr / ⟨mp, q⟩`.

    Args:
        x: the solution so far.
        r: its residual.
        p: the direction.
        q: `A p`.
        mp: `M p`, the direction itself without a metric `M`.
        rr: `(batch,)` `⟨r, M r⟩` in float64.
        active: `(batch,)` which rows take the step; those where `⟨mp, q⟩` is not positive do no more.
    """
    library = _library() if _dense(x, r, p, q, mp) else None
    if library is not None:
        pointers = [t.data_ptr() for t in (x, r, p, q, mp, rr, active)]
        library.opteq_rows_descend(*pointers, *x.shape, torch.get_num_threads())
        return
    curvature = row_products(mp, q)
    active &= curvature > 0
    alpha = torch.where(active, rr / curvature, 0.0).to(x.dtype)[:, None]
    x.addcmul_(alpha, p)
    r.addcmul_(alpha, q, value=-1)


def turn(p: Tensor, mp: Tensor, r: Tensor, mr: Tensor, rr: Tensor, goal: float, active: Tensor) -> None:
    """The second half, in place: `rr = ⟨r, mr⟩`, then `p = r + β p` and `mp = mr + β mp` with `β` its growth.

    Args:
        p: the direction.
        mp: `M p`, the same tensor as `p` without a metric.
        r: the residual.
        mr: `M r`, the same tensor as `r` without a metric.
        rr: `(batch,)` the former `⟨r, M r⟩`.
        goal: the `rr` that is small enough.
        active: `(batch,)` which rows took the step; those that have reached the goal take no more.
    """
    library = _library() if _dense(p, mp, r, mr) else None
    if library is not None:
        pointers = [t.data_ptr() for t in (p, mp, r, mr, rr)]
        library.opteq_rows_turn(*pointers, goal, active.data_ptr(), *p.shape, torch.get_num_threads())
        return
    # In a metric rounding may put it below zero.
    now = torch.where(active, row_products(r, mr).clamp_(min=0), rr)
    active &= now > goal
    beta = torch.where(active, now / rr, 0.0).to(p.dtype)[:, None]
    rr.copy_(now)
    # In place: fresh tensors cost more than the arithmetic.
    torch.addcmul(r, beta, p, out=p)
    if mp is not p:
        torch.addcmul(mr, beta, mp, out=mp)


def mix(
    changes: Tensor,
    candidates: Tensor,
    gram: Tensor,
    used: int,
    newest: int,
    usable: Tensor | None = None,
    restarts: Tensor | None = None,
) -> Tensor:
    """A step of Anderson's method: `Σ α_i c_i` over the candidates `c_i` of each row.

    The weights `α` make `‖Σ α_i g_i‖² + λ Σ (α_i ‖g_i‖)²` smallest under `Σ α_i = 1`, over the usable
    changes `g_i`; `λ` is ten times the machine epsilon. Where the system that says so is singular, which
    takes an exact dependence, the newest candidate is taken alone.

    Args:
        changes: `(batch, memory, n)`, contiguous, of which the first `used` count.
        candidates: likewise.
        gram: `(batch, memory, memory)` inner products of the changes in float64, to which those of the newest
            are added.
        used: number of changes.
        newest: index of the newest change.
        usable: `(batch, used)` which of them a row may use; all unless given, and always the newest.
        restarts: `(batch,)` which rows are to take the usable candidate of the smallest change alone.
    """
    # The regularisation is proportional to each change; the tiny number serves exact zeros.
    # What falling residuals do to the scales of the system, elimination in float64 does not mind.
    ridge = 10 * torch.finfo(torch.promote_types(changes.dtype, torch.float32)).eps
    library = _library() if _native(changes[:, 0], candidates[:, 0]) else None
    if library is not None:
        batch, memory, n = changes.shape
        following = torch.empty(batch, n)
        flags = [None if t is None else t.contiguous() for t in (usable, restarts)]
        pointers = [t.data_ptr() for t in (changes, candidates, gram)]
        pointers += [None if t is None else t.data_ptr() for t in flags]
        sizes = (batch, memory, n, used, newest, torch.get_num_threads())
        if not library.opteq_rows_mix(*pointers, ridge, following.data_ptr(), *sizes):
            return following
    # As a product of a row with a matrix this runs many times faster than matrix times column.
    products = torch.bmm(changes[:, newest, None], changes[:, :used].mT)[:, 0]
    gram[:, newest, :used] = products
    gram[:, :used, newest] = products
    products = gram[:, :used, :used]
    if usable is None:
        usable = torch.ones(len(gram), used, dtype=torch.bool, device=gram.device)
    weights = _weights(products, usable, newest, ridge)
    if restarts is not None:
        sizes = products.diagonal(dim1=1, dim2=2).masked_fill(~usable, torch.inf)
        best = F.one_hot(sizes.argmin(1), used).to(weights.dtype)
        weights = torch.where(restarts[:, None], best, weights)
    return torch.bmm(weights.to(candidates.dtype)[:, None], candidates[:, :used])[:, 0]


def _weights(gram: Tensor, usable: Tensor, newest: int, ridge: float) -> Tensor:
    """`(batch, used)` mixing weights `α`, zero for what a row may not use."""
    used = gram.shape[1]
    identity = torch.eye(used, dtype=gram.dtype, device=gram.device)
    regular = torch.addcmul(torch.finfo(gram.dtype).tiny * identity, gram, 1 + ridge * identity)
    both = usable[:, :, None] & usable[:, None, :]
    solution, info = torch.linalg.solve_ex(torch.where(both, regular, identity), usable.to(gram.dtype))
    weights = solution / solution.sum(1, keepdim=True)
    alone = F.one_hot(torch.tensor(newest, device=gram.device), used).to(weights.dtype)
    return torch.where((info > 0)[:, None], alone, weights)


def _native(*matrices: Tensor) -> bool:
    return all(
        m.dtype == torch.float32
        and m.device.type == "cpu"
        and (m.stride(1) == 1 or m.shape[1] == 1)
        and not m.is_neg()
        for m in matrices
    )


def _dense(*matrices: Tensor) -> bool:
    return _native(*matrices) and all(m.is_contiguous() for m in matrices)


def _library() -> ctypes.CDLL | None:
    return load_native(_SOURCE, _declare)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.opteq_rows_observe.argtypes = [pointer, size] * 4 + [size] * 2 + [pointer, number]
    library.opteq_rows_descend.argtypes = [pointer] * 7 + [size] * 2 + [number]
    library.opteq_rows_descend.restype = None
    library.opteq_rows_turn.argtypes = [pointer] * 5 + [ctypes.c_double, pointer] + [size] * 2 + [number]
    library.opteq_rows_turn.restype = None
    library.opteq_rows_mix.argtypes = [pointer] * 5 + [ctypes.c_double, pointer] + [size] * 5 + [number]
