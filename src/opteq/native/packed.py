"""Products of many matrices with one: in C, which packs that one once, where it can be, else with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.native.calling import call
from opteq.native.registering import operator
from opteq.native.serving import reads, serves
from opteq.tensors.tracing import tracing

LANES = 16
"""Numbers in a vector, at most."""

# Multiplications from which on a call pays, by measurements.
_FEWEST_PRODUCTS = 2**19


class Packed:
    """`x ↦ x A` for a matrix `A` that does not change meanwhile and is constant to autograd.

    Args:
        matrix: `A`, `(in, out)`.
    """

    def __init__(self, matrix: Tensor) -> None:
        matrix = matrix.detach()
        self._shape = matrix.shape
        self._in_c = reads(matrix)
        # Not both, since it may be the largest tensor of a solve.
        self._matrix = _pack(matrix) if self._in_c else matrix

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
        if not self._in_c:
            return x @ self._matrix
        if reads(x := x if x.stride(1) == 1 else x.contiguous()):
            return _multiply(x, self._matrix, columns)
        return x @ _multiply(torch.eye(rows, device=self._matrix.device), self._matrix, columns)


def gram(a: Tensor) -> Tensor:
    """`A Aᵀ`, constant to autograd."""
    a = a.detach()
    return _gram(a) if reads(a) else a @ a.mT


def multiply_each(
    left: Tensor, right: Tensor, total: Tensor | None = None, factor: float = 1.0, *, error: float
) -> Tensor:
    """`left @ right` for batches of matrices, or `total + factor · left @ right` in the place of a `total`.

    In C where that serves, there is enough work and at least as many samples as threads.

    Args:
        left: `(batch, rows, in)`.
        right: `(batch, in, out)`.
        total: `(batch, rows, out)`, contiguous.
        factor: a number other than 0.
        error: the relative error that is allowed.
    """
    given = (left, right) if total is None else (left, right, total)
    # A trace is for batches of any size, which a look at them would fix.
    if tracing() or not _fit(left, right, total) or not serves(*given, error=error):
        return left @ right if total is None else total.baddbmm_(left, right, alpha=factor)
    product = left.new_empty(*left.shape[:2], right.shape[2]) if total is None else total
    _each(product, left, right, 0.0 if total is None else factor)
    return product


def _fit(left: Tensor, right: Tensor, total: Tensor | None) -> bool:
    if left.dim() != 3 or right.dim() != 3 or len(left) < torch.get_num_threads():
        return False
    if left.numel() * right.shape[2] < _FEWEST_PRODUCTS:
        return False
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    if len(left) != len(right) or left.shape[2] != right.shape[1]:
        return False
    shape = (len(left), left.shape[1], right.shape[2])
    return total is None or (total.shape == shape and total.is_contiguous())


def filled(columns: int) -> int:
    """A number of columns with those that fill the last vector."""
    return -(-columns // LANES) * LANES


def _packed_like(matrix: Tensor) -> Tensor:
    # Zeros, since vectors of eight leave some of the end as it is.
    return matrix.new_zeros(matrix.shape[0] * filled(matrix.shape[1]))


@operator("packed(Tensor matrix) -> Tensor", _packed_like)
def _pack(matrix: Tensor) -> Tensor:
    packed = _packed_like(matrix)
    call("packed_pack", "P2NP2Ni", matrix, *matrix.stride(), packed, *matrix.shape)
    return packed


def _product_like(x: Tensor, packed: Tensor, columns: int) -> Tensor:
    return x.new_empty(x.shape[0], columns)


@operator("packed_multiply(Tensor x, Tensor packed, int columns) -> Tensor", _product_like)
def _multiply(x: Tensor, packed: Tensor, columns: int) -> Tensor:
    product = _product_like(x, packed, columns)
    call("packed_multiply", "PN2P3Ni", x, x.stride(0), packed, product, *x.shape, columns)
    return product


@operator("packed_gram(Tensor a) -> Tensor", lambda a: a.new_empty(a.shape[0], a.shape[0]))
def _gram(a: Tensor) -> Tensor:
    product = a.new_empty(a.shape[0], a.shape[0])
    call("packed_gram", "PN2P2Ni", a, a.stride(0), _pack(a.mT), product, *a.shape)
    return product


@operator("packed_each(Tensor(a!) product, Tensor left, Tensor right, float factor) -> ()")
def _each(product: Tensor, left: Tensor, right: Tensor, factor: float) -> None:
    """Overwrites the product, or adds `factor` times it where that is not 0."""
    sizes = (*left.shape, right.shape[2])
    call("packed_each", "P3NP3NP4Nfi", left, *left.stride(), right, *right.stride(), product, *sizes, factor)
