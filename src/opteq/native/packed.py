"""Products of many matrices with one: in C, which packs that one once, where it can be, else with PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.native.calling import call
from opteq.native.serving import reads, serves
from opteq.tensors.untraced import untraced

LANES = 16
"""Numbers in a vector, at most."""

# Multiplications from which on a call pays, by measurements.
_FEWEST_PRODUCTS = 2**19


class Packed:
    """`x ↦ x A`, constant to autograd, for a matrix `A` that does not change meanwhile.

    Args:
        matrix: `A`, `(in, out)`.
    """

    @untraced
    def __init__(self, matrix: Tensor) -> None:
        matrix = matrix.detach()
        self._shape = matrix.shape
        self._in_c = reads(matrix)
        # Not both, since it may be the largest tensor of a solve.
        self._matrix = _pack(matrix) if self._in_c else matrix

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
        if not self._in_c:
            return x @ self._matrix
        x = x if reads(x) else x.resolve_neg().contiguous()
        product = x.new_empty(x.shape[0], columns)
        call("packed_multiply", x, x.stride(0), self._matrix, product, x.shape[0], rows, columns)
        return product


@untraced
def gram(a: Tensor) -> Tensor:
    """`A Aᵀ`, constant to autograd."""
    a = a.detach()
    if not reads(a):
        return a @ a.mT
    product = a.new_empty(a.shape[0], a.shape[0])
    call("packed_gram", a, a.stride(0), _pack(a.mT), product, *a.shape)
    return product


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
    if not _fit(left, right, total) or not serves(*given, error=error):
        return left @ right if total is None else total.baddbmm_(left, right, alpha=factor)
    batch, rows, size = left.shape
    product = left.new_empty(batch, rows, right.shape[2]) if total is None else total
    sizes = (batch, rows, size, right.shape[2], 0.0 if total is None else factor)
    call("packed_each", left, *left.stride(), right, *right.stride(), product, *sizes)
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


def _pack(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    packed = matrix.new_empty(rows * filled(columns))
    call("packed_pack", matrix, *matrix.stride(), packed, rows, columns)
    return packed
