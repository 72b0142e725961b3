"""Operators with their weights bound in: what one solve needs of them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from opteq.operators.norms.base import Weights
from opteq.tensors.lanczos import largest_eigenvalue_bound

# Side of the largest matrix that is factorised, some seconds on one core and half a gigabyte, and how many of
# its rows are computed together.
_LARGEST = 4096
_ROWS = 128


@dataclass(frozen=True, eq=False)
class BoundOperator(ABC):
    """A linear map `W` with its exact adjoint `Wᵀ`, for inputs of one shape. Immutable.

    What is derived from the weights, such as the kernels of a faster method, hangs on this object and goes
    with it. Products are differentiable, in the weights as well.

    Attributes:
        tensors: the weights as they act, through which gradients flow.
        domain: shape of the inputs, without the batch.
        error: the relative rounding error that is allowed to products; 0 for that of the dtype.
        memo: what is known about the norms of such weights.
    """

    tensors: Weights
    domain: tuple[int, ...]
    error: float
    memo: NormMemo

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """`W x`, in memory of its own: callers write into it."""

    @abstractmethod
    def adjoint(self, y: Tensor) -> Tensor:
        """`Wᵀ y`, in memory of its own."""

    @abstractmethod
    def weight_gradient(self, *pairs: tuple[Tensor, Tensor]) -> Weights:
        """Gradient of `Σ ⟨y, W x⟩` over pairs `(x, y)` with respect to the weights, in memory of its own."""

    @property
    @abstractmethod
    def codomain(self) -> tuple[int, ...]:
        """Shape of `W x`, without the batch."""

    @abstractmethod
    def quick_norm_bound(self) -> Tensor:
        """A float64 number that is never below `‖W‖₂`, in the time of some products."""

    @property
    def norm_assumption(self) -> str:
        """What a certificate says of `norm_bound`."""
        return "The norm of W is bounded" + (" for this height and width." if len(self.domain) > 1 else ".")

    def gram(self, products: int) -> Callable[[Tensor], Tensor] | None:
        """`y ↦ W Wᵀ y` by the matrix, constant to autograd; None where so many products do not pay for it.

        A product with it stands in the place of one with `Wᵀ` and one with `W`.
        """
        return None

    def norm_bound(self) -> Tensor:
        """A float64 number that is never below `‖W‖₂`; the better one where no `error` is allowed.

        A way of keeping the norm that is certified by construction gives it at once. Else, for products as
        exact as the dtype, it is as a rule the norm itself, to a relative 1e-8, wherever `W` or its adjoint
        acts on at most 4096 numbers; the Fourier bound of a zero-padded convolution, which serves solves,
        leaves a margin that grows as images shrink, up to about a tenth at 8×8 pixels.
        """
        return self.memo.norm_bound(self)

    def with_tensors(self, tensors: Weights) -> Self:
        """The same operator with other weights."""
        return replace(self, tensors=tuple(tensors))

    def detach(self) -> Self:
        """The same operator cut off from the graph."""
        return self.with_tensors(tuple(t.detach() for t in self.tensors))


class NormMemo:
    """What is known about the norms of an operator's weights, in each precision that they were asked for in.

    It belongs to the module; a copy in float64, in which certificates look at it, may have the same one.
    """

    def __init__(self) -> None:
        self._promises: dict[torch.dtype, tuple[Weights, float]] = {}
        self._known: dict[torch.dtype, tuple[tuple[int, ...], Weights, bool, Tensor]] = {}

    def promise(self, weights: Weights, limit: float) -> None:
        """Note that these weights have a norm of at most `limit` by construction."""
        self._promises[_dtype(weights)] = tuple(w.detach() for w in weights), limit

    def norm_bound(self, bound: BoundOperator) -> Tensor:
        """`BoundOperator.norm_bound`, computed anew only for other weights or shapes."""
        weights, sharp = tuple(w.detach() for w in bound.tensors), bound.error == 0
        for promised, limit in tuple(self._promises.values()):
            if same(promised, weights):
                return torch.tensor(limit, dtype=torch.float64, device=weights[0].device)
        for domain, known, was_sharp, value in tuple(self._known.values()):
            if domain == bound.domain and was_sharp >= sharp and same(known, weights):
                return value
        with torch.inference_mode(False), torch.no_grad():
            exact = replace(bound, tensors=weights, error=0.0)
            value = exact.quick_norm_bound()
            if sharp:
                value = torch.minimum(value, dense_norm_bound(exact).to(value))
            self._known[_dtype(weights)] = bound.domain, tuple(w.clone() for w in weights), sharp, value
        return value


def _dtype(weights: Weights) -> torch.dtype:
    # An operator such as pooling has none.
    return weights[0].dtype if weights else torch.float64


def smaller_gram(operator: BoundOperator) -> tuple[Callable[[Tensor], Tensor], tuple[int, ...]]:
    """`WᵀW`, or `WWᵀ` where that acts on fewer numbers, on batches of the shape that is returned with it."""
    if math.prod(operator.codomain) < math.prod(operator.domain):
        return lambda y: operator(operator.adjoint(y)), operator.codomain
    return lambda x: operator.adjoint(operator(x)), operator.domain


def gram_matrix(operator: BoundOperator) -> Tensor:
    """The matrix of `smaller_gram`, in float64."""
    weights = tuple(w.double() for w in operator.tensors)
    product, shape = smaller_gram(operator.with_tensors(weights))
    gram = torch.eye(
        math.prod(shape), dtype=torch.float64, device=weights[0].device if weights else torch.device("cpu")
    )
    for rows in gram.split(_ROWS):
        rows.copy_(product(rows.view(-1, *shape)).flatten(1))
    return gram


def dense_norm_bound(operator: BoundOperator) -> Tensor:
    """A bound on `‖W‖₂` from the smaller of `WᵀW` and `WWᵀ`; infinite where both are too large."""
    domain, codomain = operator.domain, operator.codomain
    sizes = math.prod(domain), math.prod(codomain)
    weights = operator.tensors
    options = {"dtype": torch.float64, "device": weights[0].device if weights else None}
    if min(sizes) > _LARGEST:
        return torch.tensor(math.inf, **options)
    gram = gram_matrix(operator)
    # Sums of products are wrong by at most ε times their number of terms times what they come to without
    # signs. Of a plain W that is |W|ᵀ|W|, whose norm is at most the trace of WᵀW. The factors of a product
    # may cancel, so there the Schur test has to bound it: the largest row sum times the largest column sum.
    unsigned = operator.with_tensors(tuple(w.double().abs() for w in weights))
    row = unsigned(torch.ones(1, *domain, **options)).max()
    column = unsigned.adjoint(torch.ones(1, *codomain, **options)).max()
    terms = sum(sizes) + sum(w.numel() // min(w.shape, default=1) for w in weights)
    rounding = torch.finfo(torch.float64).eps * terms * torch.maximum(gram.trace(), row * column)
    return (largest_eigenvalue_bound(gram) + rounding).sqrt()


def same(left: Weights, right: Weights) -> bool:
    """Whether weights have the same values, in whatever precision they are kept."""
    return all(
        a.shape == b.shape and a.device == b.device and torch.equal(*_widened(a, b))
        for a, b in zip(left, right, strict=True)
    )


def _widened(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
