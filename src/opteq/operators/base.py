"""The interface of linear operators and the estimate of their norm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opteq.errors import ShapeError
from opteq.once import once
from opteq.operators.lanczos import largest_eigenvalue_bound, largest_ritz_pair
from opteq.rounding import tolerating

Weights = tuple[Tensor, ...]

# Lanczos steps that follow the weights in training, and those between restarts of a settled estimate.
_TRAIN_STEPS, _SETTLED_STEPS, _RESTARTS = 10, 20, 50
_SHARE = 0.1
# Residual of a settled singular vector, in units of the machine epsilon.
_SETTLED_EPS = 100
# Side of the largest matrix that a sharp bound factorises, some seconds on one core and half a gigabyte, and
# how many of its rows are computed together.
_LARGEST_DENSE = 4096
_ROWS = 128


class LinearOperator(nn.Module, ABC):
    """A linear map `W` together with its exact adjoint `Wᵀ`.

    The arithmetic is stateless: `matvec` and `rmatvec` take the weights as an argument, so that an
    equation can use rescaled weights and differentiate with respect to them while the stored
    parameters stay untouched. `forward` and `adjoint` are the same maps with the stored weights.

    Shapes: `matvec` takes `(batch, *domain)` to `(batch, *codomain)`, `rmatvec` the reverse; the
    channel (first) dimension of each is fixed, spatial sizes are those of the input.
    """

    in_channels: int
    out_channels: int
    sides: tuple[str, ...] = ()
    """Names of the dimensions after the channels: none for vectors, height and width for images."""

    def __init__(self) -> None:
        super().__init__()
        # Both are derived from the weights, so neither is saved with them.
        self._singular: _SingularVector | None = None
        self._bound: _Bound | None = None
        self._sharp = False

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The stored weights, in the order `matvec` expects."""

    @abstractmethod
    def matvec(self, weights: Weights, x: Tensor) -> Tensor:
        """`W x`, in memory of its own: callers write into it."""

    @abstractmethod
    def rmatvec(self, weights: Weights, y: Tensor) -> Tensor:
        """`Wᵀ y`, in memory of its own."""

    @abstractmethod
    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        """Gradient of `⟨y, W x⟩` with respect to the weights, in memory of its own."""

    def summed_weight_gradient(self, weights: Weights, *pairs: tuple[Tensor, Tensor]) -> Weights:
        """The sum of `weight_gradient` over pairs `(x, y)`, in memory of its own."""
        total = self.weight_gradient(weights, *pairs[0])
        for pair in pairs[1:]:
            total = tuple(map(Tensor.add_, total, self.weight_gradient(weights, *pair)))
        return total

    def gram(self, weights: Weights, products: int) -> Callable[[Tensor], Tensor] | None:
        """`y ↦ W Wᵀ y`, by the matrix; None where it is not worth its cost for so many products with it.

        A product with it stands in the place of one with `Wᵀ` and one with `W`.
        """
        return None

    @abstractmethod
    def codomain(self, domain: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `W x`, without the batch dimension, for `x` of shape `domain`."""

    @abstractmethod
    def compute_norm_bound(self, weights: Weights, domain: tuple[int, ...]) -> Tensor:
        """A number that is never below `‖W‖₂` on inputs of shape `domain`, in float64."""

    @property
    def norm_assumption(self) -> str:
        """What a certificate says of a `norm_bound`."""
        return "The norm of W is bounded" + (" for this height and width." if self.sides else ".")

    def forward(self, x: Tensor) -> Tensor:
        """`W x` with the stored weights.

        Raises:
            ShapeError: if the channels of `x` do not fit.
        """
        self.check_input(x)
        return self.matvec(self.weights, x)

    def adjoint(self, y: Tensor) -> Tensor:
        """`Wᵀ y` with the stored weights."""
        return self.rmatvec(self.weights, y)

    def check_input(self, x: Tensor, name: str = "x") -> None:
        """Raise a `ShapeError` unless `x` is a batch of elements of the domain."""
        if x.dim() != 2 + len(self.sides) or x.shape[1] != self.in_channels:
            shape = ", ".join(("batch", str(self.in_channels), *self.sides))
            raise ShapeError(f"Expected `{name}` of shape ({shape}), got {tuple(x.shape)}.")

    def norm(self, domain: tuple[int, ...]) -> Tensor:
        """Estimate of `‖W‖₂`, power iteration on `WᵀW` speeded up by Lanczos' method.

        Never above the true norm, to rounding. Differentiable, once, with respect to the weights; a
        value right to a relative `ε` has a derivative right to about `√ε`. The singular vector
        persists: in training a few steps follow the changing weights, and while the weights stay the
        same so does the estimate. In eval mode, and at the first call, the iteration runs until it has
        settled.
        """
        weights = self.weights
        # Low precision would spoil the estimate, which is cheap, so it ignores autocast.
        # Nor may it be as rough as the solve that it is for.
        with torch.autocast(_example(weights).device.type, enabled=False), tolerating(0.0):
            return _Norm.apply(self, self._singular_vector(domain), *weights)

    def norm_bound(self, domain: tuple[int, ...], weights: Weights | None = None) -> Tensor:
        """A float64 number that is never below `‖W‖₂`; recomputed only when weights or shape change.

        Inside `sharp_norms` it is the norm itself, as a rule to a relative 1e-8, wherever `W` or its
        adjoint acts on at most 4096 numbers.

        Args:
            domain: shape of the inputs, without the batch.
            weights: weights to take in place of the stored ones.
        """
        weights = tuple(w.detach() for w in (self.weights if weights is None else weights))
        known = self._bound
        if known is not None and known.serves(domain, weights, self._sharp):
            return known.value
        with torch.inference_mode(False), torch.no_grad(), tolerating(0.0):
            value = self.compute_norm_bound(weights, domain)
            if self._sharp:
                value = torch.minimum(value, _dense_norm_bound(self, weights, domain).to(value))
            self._bound = _Bound(domain, _copy(weights), value, self._sharp)
        return value

    # What is kept must serve a later backward pass too, which tensors of inference mode cannot.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _singular_vector(self, domain: tuple[int, ...]) -> Tensor:
        weights = tuple(w.detach() for w in self.weights)
        example = _example(weights)
        known = self._singular
        if known is not None and known.vector.shape[1:] != domain:
            known = None
        settled = not (self.training and known is not None)
        if known is not None and known.settled >= settled and _same(known.weights, weights):
            return known.vector

        def gram(v: Tensor) -> Tensor:
            return self.rmatvec(weights, self.matvec(weights, v))

        if known is not None and not settled:
            # A step of an optimizer can turn the singular vectors altogether. Every direction keeps a
            # share, and a few Lanczos steps find the one that has become the largest.
            start = known.vector.to(example) + _SHARE * _random_unit(domain).to(example)
            _, vector = largest_ritz_pair(gram, start, _TRAIN_STEPS)
        else:
            # In eval mode the estimate depends on the weights alone, whatever went before.
            vector = _random_unit(domain).to(example)
            for _ in range(_RESTARTS):
                value, vector = largest_ritz_pair(gram, vector, _SETTLED_STEPS)
                # The value settles long before the vector, on which the gradient of the norm rests.
                residual = (gram(vector) - value * vector).norm()
                if residual <= _SETTLED_EPS * torch.finfo(example.dtype).eps * value:
                    break
        self._singular = _SingularVector(vector, _copy(weights), settled)
        return vector

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_singular": None, "_bound": None, "_sharp": False}  # type: ignore[misc]


class _Norm(torch.autograd.Function):
    """`‖W v‖` as a function of the weights, for a right singular vector `v` of the largest value.

    Its gradient is that of the largest singular value, in which the change of `v` does not enter. In
    the second derivative it does, so that one is refused.
    """

    @staticmethod
    def forward(ctx: Any, operator: LinearOperator, vector: Tensor, *weights: Tensor) -> Tensor:
        image = operator.matvec(weights, vector)
        norm = image.norm()
        ctx.operator = operator
        ctx.save_for_backward(vector, image / norm.clamp(min=torch.finfo(norm.dtype).tiny), *weights)
        return norm

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        vector, direction, *weights = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(vector.device.type, enabled=False):
            gradients = ctx.operator.weight_gradient(tuple(weights), vector, direction)
        advice = "set max_norm=None to go without the norm constraint."
        return (None, None, *(grad_outputs[0] * once(g, weights, advice) for g in gradients))


@dataclass(frozen=True)
class _SingularVector:
    """A right singular vector of the largest value for these weights; settled, or a few steps near it."""

    vector: Tensor
    weights: Weights
    settled: bool


@dataclass(frozen=True)
class _Bound:
    domain: tuple[int, ...]
    weights: Weights
    value: Tensor
    sharp: bool

    def serves(self, domain: tuple[int, ...], weights: Weights, sharp: bool) -> bool:
        return self.domain == domain and self.sharp >= sharp and _same(self.weights, weights)


@contextmanager
def sharp_norms(module: nn.Module) -> Iterator[None]:
    """Let every norm bound computed inside `module` while active be as sharp as its size allows.

    The Fourier bound of a zero-padded convolution leaves a margin that grows as images shrink: up to
    about a tenth at 8×8 pixels, a few hundredths at 16×16. Operators on few enough numbers are
    factorised as matrices instead, which takes too long for every training step.
    """
    operators = [m for m in module.modules() if isinstance(m, LinearOperator)]
    before = [operator._sharp for operator in operators]
    for operator in operators:
        operator._sharp = True
    try:
        yield
    finally:
        for operator, sharp in zip(operators, before, strict=True):
            operator._sharp = sharp


def _dense_norm_bound(operator: LinearOperator, weights: Weights, domain: tuple[int, ...]) -> Tensor:
    """A bound on `‖W‖₂` from the smaller of `WᵀW` and `WWᵀ`; infinite where both are too large."""
    codomain = operator.codomain(domain)
    sizes = math.prod(domain), math.prod(codomain)
    options = {"dtype": torch.float64, "device": _example(weights).device}
    n = min(sizes)
    if n > _LARGEST_DENSE:
        return torch.tensor(math.inf, **options)
    weights = tuple(w.double() for w in weights)
    first, second, shape = operator.matvec, operator.rmatvec, domain
    if n < sizes[0]:
        first, second, shape = operator.rmatvec, operator.matvec, codomain
    gram = torch.eye(n, **options)
    for rows in gram.split(_ROWS):
        rows.copy_(second(weights, first(weights, rows.view(-1, *shape))).flatten(1))
    # Sums of products are wrong by at most ε times their number of terms times what they come to without
    # signs. Of a plain W that is |W|ᵀ|W|, whose norm is at most the trace of WᵀW. The factors of a product
    # may cancel, so there the Schur test has to bound it: the largest row sum times the largest column sum.
    unsigned = tuple(w.abs() for w in weights)
    row = operator.matvec(unsigned, torch.ones(1, *domain, **options)).max()
    column = operator.rmatvec(unsigned, torch.ones(1, *codomain, **options)).max()
    terms = sum(sizes) + sum(w.numel() // min(w.shape, default=1) for w in weights)
    rounding = torch.finfo(torch.float64).eps * terms * torch.maximum(gram.trace(), row * column)
    return (largest_eigenvalue_bound(gram) + rounding).sqrt()


def _random_unit(domain: tuple[int, ...]) -> Tensor:
    # A seeded start makes runs and data-parallel processes agree.
    vector = torch.randn((1, *domain), generator=torch.Generator().manual_seed(0))
    return vector / vector.norm()


def _example(weights: Weights) -> Tensor:
    return weights[0] if weights else torch.empty(0)


def _copy(weights: Weights) -> Weights:
    return tuple(w.clone() for w in weights)


def _same(left: Weights, right: Weights) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


class FixedOperator(LinearOperator, ABC):
    """An operator without weights, such as resampling."""

    @property
    def weights(self) -> Weights:
        return ()

    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        return ()
