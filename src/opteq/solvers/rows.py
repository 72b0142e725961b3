"""What solvers do with the rows of matrices, one row per sample: in C where it can be, else with PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from opteq.native import load_native

_SOURCE = Path(__file__).with_name("rows.c")


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
    library = compiled() if is_native(*image, x, f, g) else None
    if library is not None:
        squares = torch.zeros(len(x), 2, dtype=torch.float64)
        threads, start, failed = torch.get_num_threads(), 0, 0
        for part in image:
            rows, n = part.shape
            pointers = [part.data_ptr(), part.stride(0)]
            for t in (x, f, g):
                pointers += t.data_ptr() + start * t.element_size(), t.stride(0)
            failed |= library.opteq_rows_observe(*pointers, rows, n, squares.data_ptr(), threads)
            start += n
        if not failed:
            return squares.sqrt_()
    for place, part in zip(f.split([part.shape[1] for part in image], 1), image, strict=True):
        place.copy_(part)
    torch.sub(f, x, out=g)
    return norms(g, f)


def descend(x: Tensor, r: Tensor, p: Tensor, q: Tensor, mp: Tensor, rr: Tensor, active: Tensor) -> Tensor:
    """The first half of a step of conjugate gradients, in place: `x += α p`, `r -= α q`, `α = rr / ⟨mp, q⟩`.

    Args:
        x: the solution so far.
        r: its residual.
        p: the direction.
        q: `A p`.
        mp: `M p`, the direction itself without a metric `M`.
        rr: `(batch,)` `⟨r, M r⟩` in float64.
        active: `(batch,)` which rows take the step; those where `⟨mp, q⟩` is not positive do no more.

    Returns:
        `(batch,)` `α` in float64, 0 where a row takes no step.
    """
    library = compiled() if _dense(x, r, p, q, mp) else None
    if library is not None:
        lengths = torch.empty_like(rr)
        pointers = [t.data_ptr() for t in (x, r, p, q, mp, rr, active, lengths)]
        library.opteq_rows_descend(*pointers, *x.shape, torch.get_num_threads())
        return lengths
    curvature = row_products(mp, q)
    active &= curvature > 0
    lengths = torch.where(active, rr / curvature, 0.0)
    alpha = lengths.to(x.dtype)[:, None]
    x.addcmul_(alpha, p)
    r.addcmul_(alpha, q, value=-1)
    return lengths


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
    library = compiled() if _dense(p, mp, r, mr) else None
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


def is_native(*matrices: Tensor) -> bool:
    """Whether compiled code can work on these matrices."""
    # A loop takes half the time of `all`, at every step of every solve.
    for m in matrices:
        if m.dtype != torch.float32 or not m.is_cpu or m.is_neg():
            return False
        if m.stride(1) != 1 and m.shape[1] != 1:
            return False
    return True


def _dense(*matrices: Tensor) -> bool:
    return is_native(*matrices) and all(m.is_contiguous() for m in matrices)


def compiled() -> ctypes.CDLL | None:
    """The library, None where all is to be done by PyTorch."""
    return load_native(_SOURCE, _declare)


class History(ctypes.Structure):
    """What Anderson's method keeps of its rows, as C has it."""

    _fields_: ClassVar = [
        (name, ctypes.c_void_p) for name in ("changes", "candidates", "gram", "best", "before", "born")
    ]


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.opteq_rows_observe.argtypes = [pointer, size] * 4 + [size] * 2 + [pointer, number]
    library.opteq_rows_descend.argtypes = [pointer] * 8 + [size] * 2 + [number]
    library.opteq_rows_descend.restype = None
    library.opteq_rows_turn.argtypes = [pointer] * 5 + [ctypes.c_double, pointer] + [size] * 2 + [number]
    library.opteq_rows_turn.restype = None
    doubles = [ctypes.c_double] * 2
    library.opteq_rows_mix.argtypes = (
        [History, pointer, size, *doubles, number, pointer] + [size] * 3 + [number]
    )
    library.opteq_rows_judge.argtypes = (
        [pointer, ctypes.c_double, *doubles, size] + [pointer] * 4 + [size, pointer]
    )
    library.opteq_rows_judge.restype = None
