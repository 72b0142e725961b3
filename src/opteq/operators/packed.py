"""Products of many matrices with one: in C, which packs that one once, where it can be, else with PyTorch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.native import load_native, plain, readable
from opteq.rounding import tolerated
from opteq.untraced import untraced

_SOURCE = Path(__file__).with_name("packed.c")
# Numbers in a vector, at most.
_LANES = 16
# Multiplications from which on a call pays, by measurements.
_FEWEST_PRODUCTS = 2**19


class Packed:
    """`x ↦ x A`, constant to autograd, for a matrix `A` that does not change meanwhile.

    Args:
        matrix: `A`, `(in, out)`.
    """

    @untraced
    def __init__(self, matrix: Tensor) -> None:
        self._shape = matrix.shape
        self._library = _library() if readable(matrix) else None
        # Not both, since it may be the largest tensor of a solve.
        self._matrix = matrix.detach() if self._library is None else _pack(self._library, matrix)

    @untraced
    def __call__(self, x: Tensor) -> Tensor:
        """`x A`.

        Raises:
            ShapeError: if `x` is no matrix that `A` can be multiplied with.
        """
        rows, columns = self._shape
        if x.dim() != 2 or x.shape[1] != rows or x.dtype != self._matrix.dtype:
            kind = str(self._matrix.dtype).removeprefix("torch.")
            raise ShapeError(
                f"Expected a {kind} matrix of shape (batch, {rows}), got {x.dtype}, {tuple(x.shape)}."
            )
        if self._library is None:
            return x @ self._matrix
        x = x if readable(x) else x.resolve_neg().contiguous()
        product = x.new_empty(x.shape[0], columns)
        pointers = (x.data_ptr(), x.stride(0), self._matrix.data_ptr(), product.data_ptr())
        self._library.opteq_packed_multiply(*pointers, x.shape[0], rows, columns, torch.get_num_threads())
        return product


@untraced
def gram(a: Tensor) -> Tensor:
    """`A Aᵀ`, constant to autograd."""
    a = a.detach()
    library = _library() if readable(a) else None
    if library is None:
        return a @ a.mT
    product = a.new_empty(a.shape[0], a.shape[0])
    packed = _pack(library, a.mT)
    pointers = (a.data_ptr(), a.stride(0), packed.data_ptr(), product.data_ptr())
    library.opteq_packed_gram(*pointers, *a.shape, torch.get_num_threads())
    return product


def multiply_each(left: Tensor, right: Tensor, total: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """`left @ right` for batches of matrices, or `total + factor · left @ right` in the place of a `total`.

    In C inside `tolerating` alone, where there is no graph, enough work and at least as many samples as
    threads.

    Args:
        left: `(batch, rows, in)`.
        right: `(batch, in, out)`.
        total: `(batch, rows, out)`, contiguous.
        factor: a number other than 0.
    """
    library = _library() if _fit_for_c(left, right, total) else None
    if library is not None:
        batch, rows, size = left.shape
        product = left.new_empty(batch, rows, right.shape[2]) if total is None else total
        places = [_Matrices(m.data_ptr(), *m.stride()) for m in (left, right)]
        sizes = (batch, rows, size, right.shape[2], 0.0 if total is None else factor)
        if not library.opteq_packed_each(*places, product.data_ptr(), *sizes, torch.get_num_threads()):
            return product
    return left @ right if total is None else total.baddbmm_(left, right, alpha=factor)


def _fit_for_c(left: Tensor, right: Tensor, total: Tensor | None) -> bool:
    if tolerated() == 0 or torch.is_grad_enabled() or left.dim() != 3 or right.dim() != 3:
        return False
    if len(left) < torch.get_num_threads() or left.numel() * right.shape[2] < _FEWEST_PRODUCTS:
        return False
    if not plain(left, right) or not (total is None or plain(total)):
        return False
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    if len(left) != len(right) or left.shape[2] != right.shape[1]:
        return False
    shape = (len(left), left.shape[1], right.shape[2])
    return total is None or (total.shape == shape and total.is_contiguous())


class _Matrices(ctypes.Structure):
    """A matrix for each sample, as C has it."""

    _fields_: ClassVar = [
        ("first", ctypes.c_void_p),
        *((name, ctypes.c_size_t) for name in ("apart", "row", "column")),
    ]


def filled(columns: int) -> int:
    """A number of columns with those that fill the last vector."""
    return -(-columns // _LANES) * _LANES


def _pack(library: ctypes.CDLL, matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    packed = matrix.new_empty(rows * filled(columns))
    pointers = (matrix.data_ptr(), *matrix.stride(), packed.data_ptr())
    library.opteq_packed_pack(*pointers, rows, columns, torch.get_num_threads())
    return packed


def _library() -> ctypes.CDLL | None:
    return load_native(_SOURCE, _declare)


def _declare(library: ctypes.CDLL) -> None:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.opteq_packed_pack.argtypes = [pointer, size, size, pointer, size, size, number]
    library.opteq_packed_multiply.argtypes = [pointer, size, pointer, pointer, size, size, size, number]
    library.opteq_packed_gram.argtypes = [pointer, size, pointer, pointer, size, size, number]
    matrices = ctypes.POINTER(_Matrices)
    library.opteq_packed_each.argtypes = [matrices] * 2 + [pointer] + [size] * 4 + [ctypes.c_float, number]
    for name in ("pack", "multiply", "gram"):
        getattr(library, f"opteq_packed_{name}").restype = None
