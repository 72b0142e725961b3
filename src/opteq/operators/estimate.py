"""An estimate of an operator's norm that follows its training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opteq.operators.bound import BoundOperator, same
from opteq.operators.norms.base import Weights
from opteq.tensors.lanczos import largest_ritz_pair
from opteq.tensors.once import once
from opteq.tensors.precision import full_precision
from opteq.tensors.tracing import forward_mode, refuse_tangents, refuse_transforms, tracing, unrecorded

# Lanczos steps that follow the weights in training, and those between restarts of a settled estimate.
_TRAIN_STEPS, _SETTLED_STEPS, _RESTARTS = 10, 20, 50
_SHARE = 0.1
# Residual of a settled singular vector, in units of the machine epsilon.
_SETTLED_EPS = 100


class NormEstimate:
    """`‖W‖₂`, by power iteration on `WᵀW` speeded up by Lanczos' method.

    Never above the true norm, to rounding. Differentiable, once, with respect to the weights; a value right
    to a relative `ε` has a derivative right to about `√ε`. The singular vector persists: in training a few
    steps follow the changing weights, and while the weights stay the same so does the estimate. In eval mode,
    and at the first call, the iteration runs until it has settled.

    Attributes:
        value: the last estimate, None before the first.
    """

    def __init__(self) -> None:
        self._known: _SingularVector | None = None
        self.value: Tensor | None = None

    def __call__(self, bound: BoundOperator, training: bool) -> Tensor:
        """The estimate for an operator whose products are as exact as the dtype.

        Raises:
            ConfigError: within a transform of `torch.func`, whose tensors must not be kept.
        """
        refuse_transforms()
        # Low precision would spoil the estimate, which is cheap, so it ignores autocast.
        device = bound.tensors[0].device if bound.tensors else torch.device("cpu")
        with full_precision(device):
            with unrecorded():
                vector = self._vector(bound.detach(), training)
            # A trace takes no functions of Python; the gradient is the same.
            norm = bound(vector).norm() if tracing() else _Norm.apply(bound, vector, *bound.tensors)
        self.value = norm.detach()
        return norm

    @property
    def domain(self) -> tuple[int, ...]:
        """Shape of the inputs that the last estimate was for."""
        return () if self._known is None else tuple(self._known.vector.shape[1:])

    def knows(self, weights: Weights) -> bool:
        """Whether the last estimate was of these weights."""
        return self._known is not None and same(self._known.weights, weights)

    # What is kept must serve a later backward pass too, which tensors of inference mode cannot.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _vector(self, bound: BoundOperator, training: bool) -> Tensor:
        weights, known = bound.tensors, self._known
        example = weights[0] if weights else torch.empty(0)
        if known is not None and known.vector.shape[1:] != bound.domain:
            known = None
        settled = not (training and known is not None)
        if known is not None and known.serves(weights, settled):
            return known.vector

        unit = _unit(weights)

        def gram(v: Tensor) -> Tensor:
            return bound.adjoint(bound(v) / unit) / unit

        if known is not None and not settled:
            # A step of an optimizer can turn the singular vectors altogether. Every direction keeps a
            # share, and a few Lanczos steps find the one that has become the largest.
            start = known.vector.to(example) + _SHARE * _random_unit(bound.domain).to(example)
            _, vector = largest_ritz_pair(gram, start, _TRAIN_STEPS)
        else:
            # In eval mode the estimate depends on the weights alone, whatever went before.
            start = _random_unit(bound.domain).to(example)
            # The value settles long before the vector, on which the gradient of the norm rests.
            tol = _SETTLED_EPS * torch.finfo(example.dtype).eps
            _, vector = largest_ritz_pair(gram, start, _SETTLED_STEPS, tol, _RESTARTS)
        self._known = _SingularVector(vector, tuple(w.clone() for w in weights), settled)
        return vector


@dataclass(frozen=True)
class _SingularVector:
    """A right singular vector of the largest value for these weights; settled, or a few steps near it."""

    vector: Tensor
    weights: Weights
    settled: bool

    def serves(self, weights: Weights, settled: bool) -> bool:
        alike = all(a.dtype == b.dtype for a, b in zip(self.weights, weights, strict=True))
        return self.settled >= settled and alike and same(self.weights, weights)


class _Norm(torch.autograd.Function):
    """`‖W v‖` as a function of the weights, for a right singular vector `v` of the largest value.

    Its gradient is that of the largest singular value, in which the change of `v` does not enter. In
    the second derivative it does, so that one is refused.
    """

    @staticmethod
    def forward(ctx: Any, bound: BoundOperator, vector: Tensor, *weights: Tensor) -> Tensor:
        unit = _unit(weights)
        image = bound.with_tensors(weights)(vector) / unit
        norm = image.norm()
        ctx.bound = bound.with_tensors(())
        saved = vector, image / norm.clamp(min=torch.finfo(norm.dtype).tiny), *weights
        ctx.save_for_backward(*saved)
        if forward_mode():  # unlike what is for backward it is not let go of
            ctx.save_for_forward(*saved)
        return norm * unit

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        _, _, *moves = tangents
        pairs = zip(_Norm._gradients(ctx.bound, *ctx.saved_tensors), moves, strict=True)
        return torch.stack([(g * t).sum() for g, t in pairs if t is not None]).sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # checkpoints allow to look once
        weights = saved[2:]
        refuse_tangents(lambda: weights)
        gradients = _Norm._gradients(ctx.bound, *saved)
        return (None, None, *(grad_outputs[0] * once(g, weights) for g in gradients))

    @staticmethod
    def _gradients(bound: BoundOperator, vector: Tensor, direction: Tensor, *weights: Tensor) -> Weights:
        with torch.no_grad(), full_precision(vector.device):
            bound = bound.with_tensors(tuple(w.detach() for w in weights))
            return bound.weight_gradient((vector, direction))


def _unit(weights: Weights) -> float:
    """A power of two of the size of the weights, in units of which squares neither overflow nor underflow."""
    largest = [w.abs().amax().item() for w in weights if w.numel()]
    exponents = [math.frexp(size)[1] - 1 for size in largest if math.isfinite(size) and size]
    return 2.0 ** max(-126, min(sum(exponents), 127))


def _random_unit(domain: tuple[int, ...]) -> Tensor:
    # A seeded start makes runs and data-parallel processes agree.
    vector = torch.randn((1, *domain), generator=torch.Generator().manual_seed(0))
    return vector / vector.norm()
