"""The interface of linear operators and the estimate of their norm."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.errors import ShapeError

Weights = tuple[Tensor, ...]

_EVAL_TOLERANCE, _EVAL_STEPS = 1e-7, 500
_TRAIN_TOLERANCE, _TRAIN_STEPS = 1e-3, 20


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

    def __init__(self) -> None:
        super().__init__()
        # Both are derived from the weights, so neither is saved with them.
        self._singular: _SingularVector | None = None
        self._bound: tuple[tuple[int, ...], Weights, Tensor] | None = None

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The stored weights, in the order `matvec` expects."""

    @abstractmethod
    def matvec(self, weights: Weights, x: Tensor) -> Tensor:
        """`W x`."""

    @abstractmethod
    def rmatvec(self, weights: Weights, y: Tensor) -> Tensor:
        """`Wᵀ y`."""

    @abstractmethod
    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        """Gradient of `⟨y, W x⟩` with respect to the weights."""

    @abstractmethod
    def codomain(self, domain: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of `W x`, without the batch dimension, for `x` of shape `domain`."""

    @abstractmethod
    def compute_norm_bound(self, domain: tuple[int, ...]) -> Tensor:
        """A number that is never below `‖W‖₂` on inputs of shape `domain`, in float64."""

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
        if x.dim() < 2 or x.shape[1] != self.in_channels:
            raise ShapeError(
                f"Expected `{name}` of shape (batch, {self.in_channels}, ...), got {tuple(x.shape)}."
            )

    def norm(self, domain: tuple[int, ...]) -> Tensor:
        """Estimate of `‖W‖₂` by power iteration on `WᵀW`: never above the true norm, to rounding.

        Differentiable with respect to the weights. The singular vector persists: in training a step
        or two follow the slowly changing weights, and while the weights stay the same so does the
        estimate. In eval mode, and at the first call, the iteration runs until it has settled.
        """
        # With the singular vector held constant the derivative of ‖Wv‖ is that of the singular value.
        # Low precision would spoil the estimate, which is cheap, so it ignores autocast.
        with torch.autocast(self.weights[0].device.type, enabled=False):
            vector = self._power_iteration(domain)
            return self.matvec(self.weights, vector).norm()

    def norm_bound(self, domain: tuple[int, ...]) -> Tensor:
        """A float64 number that is never below `‖W‖₂`; recomputed only when weights or shape change."""
        weights = tuple(w.detach() for w in self.weights)
        if self._bound is not None:
            known_domain, known_weights, bound = self._bound
            if known_domain == domain and all(map(_same, known_weights, weights)):
                return bound
        with torch.no_grad():
            bound = self.compute_norm_bound(domain)
        self._bound = (domain, tuple(w.clone() for w in weights), bound)
        return bound

    @torch.no_grad()
    def _power_iteration(self, domain: tuple[int, ...]) -> Tensor:
        weights = tuple(w.detach() for w in self.weights)
        known = self._singular
        fresh = known is None or known.vector.shape[1:] != domain
        if known is None or fresh:
            known = _SingularVector.random(domain)
        tolerance, steps = (
            (_TRAIN_TOLERANCE, _TRAIN_STEPS)
            if self.training and not fresh
            else (_EVAL_TOLERANCE, _EVAL_STEPS)
        )
        vector, value, reached = known.vector.to(weights[0]), known.value, known.tolerance
        for _ in range(steps):
            image = self.rmatvec(weights, self.matvec(weights, vector))
            new_value = image.norm().item()
            settled = abs(new_value - value) <= tolerance * new_value
            # A vector that had settled before and still fits stays as it is, so that unchanged
            # weights give an unchanged estimate.
            if new_value == 0 or (settled and reached <= tolerance):
                break
            vector, value, reached = image / new_value, new_value, tolerance if settled else math.inf
        else:
            reached = tolerance  # as settled as the allowed number of steps can make it
        self._singular = _SingularVector(vector, value, reached)
        return vector

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_singular": None, "_bound": None}  # type: ignore[misc]


@dataclass(frozen=True)
class _SingularVector:
    """`WᵀW v ≈ value · v`, settled to a relative `tolerance` of the value."""

    vector: Tensor
    value: float
    tolerance: float

    @classmethod
    def random(cls, domain: tuple[int, ...]) -> _SingularVector:
        # A seeded start makes runs and data-parallel processes agree.
        vector = torch.randn((1, *domain), generator=torch.Generator().manual_seed(0))
        return cls(vector / vector.norm(), 0.0, math.inf)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


class FixedOperator(LinearOperator, ABC):
    """An operator without weights, such as resampling."""

    @property
    def weights(self) -> Weights:
        return ()

    def weight_gradient(self, weights: Weights, x: Tensor, y: Tensor) -> Weights:
        return ()
