"""What solvers do with the rows of matrices, one row per sample: in C where it can be, else with PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from opteq.native import load_native, readable

_SOURCE = Path(__file__).with_name("rows.c")
_POINTER, _SIZE, _DOUBLE, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double, ctypes.c_int


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
    library = compiled() if readable(*image, x, f, g) else None
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    if library is not None and all(part.shape[0] == x.shape[0] for part in image):
        found = x.new_empty(x.shape[0], 2, dtype=torch.float64)
        parts = (_Part * len(image))(*[(p.data_ptr(), p.stride(0), p.shape[1]) for p in image])
        places = [number for t in (x, f, g) for number in (t.data_ptr(), t.stride(0))]
        options = (x.shape[0], found.data_ptr(), torch.get_num_threads())
        if not library.opteq_rows_observe(parts, len(image), *places, *options):
            return found
    for place, part in zip(f.split([part.shape[1] for part in image], 1), image, strict=True):
        place.copy_(part)
    torch.sub(f, x, out=g)
    return norms(g, f)


def hold(x: Tensor, following: Tensor, active: Tensor) -> Tensor:
    """The rows of `following`, in new memory, and those of `x` where a row is no longer active."""
    library = compiled() if readable(x, following) and following.shape == x.shape else None
    if library is None:
        # Under autocast a map may change the dtype from one iterate to the next.
        return torch.where(active[:, None], following.to(x.dtype), x)
    held = x.new_empty(*x.shape)
    pointers = (x.data_ptr(), x.stride(0), following.data_ptr(), following.stride(0))
    others = (active.data_ptr(), held.data_ptr(), *x.shape)
    library.opteq_rows_hold(*pointers, *others, torch.get_num_threads())
    return held


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
    library = compiled() if _dense(x, r, p, q, mp) else None
    if library is not None:
        lengths, seen = torch.empty_like(rr), torch.empty_like(rr)
        pointers = [t.data_ptr() for t in (x, r, p, q, mp, rr, active, steps, seen, lengths)]
        library.opteq_rows_descend(*pointers, *x.shape, torch.get_num_threads())
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
    library = compiled() if _dense(p, mp, r, mr) else None
    if library is not None:
        pointers = [t.data_ptr() for t in (p, mp, r, mr, rr)]
        others = (goal, active.data_ptr(), seen.data_ptr())
        return library.opteq_rows_turn(*pointers, *others, *p.shape, torch.get_num_threads())
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
    return readable(*matrices) and all(m.is_contiguous() for m in matrices)


def compiled() -> ctypes.CDLL | None:
    """The library, None where all is to be done by PyTorch."""
    return load_native(_SOURCE, _declare)


class _Part(ctypes.Structure):
    """Some of the columns of a matrix, as C has it."""

    _fields_: ClassVar = [("rows", _POINTER), ("apart", _SIZE), ("width", _SIZE)]


class History(ctypes.Structure):
    """What Anderson's method keeps of its rows, as C has it."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("changes", "candidates", "gram", "best", "before", "born")),
        *((name, _DOUBLE) for name in ("ridge", "growth")),
        *((name, _SIZE) for name in ("rows", "memory", "n")),
    ]


class Record(ctypes.Structure):
    """Which rows of a solve go on, as C has it."""

    _fields_: ClassVar = [
        *((name, _POINTER) for name in ("active", "converged", "taken")),
        *((name, _DOUBLE) for name in ("scale", "tol", "tiny")),
        ("rows", _SIZE),
    ]


def _declare(library: ctypes.CDLL) -> None:
    library.opteq_rows_observe.argtypes = (
        [ctypes.POINTER(_Part), _SIZE] + [_POINTER, _SIZE] * 3 + [_SIZE, _POINTER, _INT]
    )
    library.opteq_rows_hold.argtypes = [_POINTER, _SIZE] * 2 + [_POINTER] * 2 + [_SIZE] * 2 + [_INT]
    library.opteq_rows_hold.restype = None
    library.opteq_rows_descend.argtypes = [_POINTER] * 10 + [_SIZE] * 2 + [_INT]
    library.opteq_rows_descend.restype = None
    library.opteq_rows_turn.argtypes = [_POINTER] * 5 + [_DOUBLE] + [_POINTER] * 2 + [_SIZE] * 2 + [_INT]
    library.opteq_rows_turn.restype = _SIZE
    library.opteq_rows_mix.argtypes = [ctypes.POINTER(History), _POINTER, _SIZE, _INT, _POINTER, _INT]
    library.opteq_rows_judge.argtypes = [
        *(ctypes.POINTER(Record), _POINTER, _SIZE, _POINTER),
        ctypes.POINTER(_SIZE),
    ]
    library.opteq_rows_judge.restype = _SIZE
