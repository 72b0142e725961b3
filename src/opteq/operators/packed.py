"""Products of many matrices with one: in C, which packs that one once, where it can be, else with PyTorch."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.native import load_native, readable
from opteq.untraced import untraced

_SOURCE = Path(__file__).with_name("packed.c")
# Numbers in a vector, at most.
_LANES = 16


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
    for name in ("pack", "multiply", "gram"):
        getattr(library, f"opteq_packed_{name}").restype = None
