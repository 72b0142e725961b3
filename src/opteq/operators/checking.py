"""A checker for operators of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.errors import ConfigError, NonFiniteError, ShapeError
from opteq.operators.base import LinearOperator
from opteq.operators.bound import BoundOperator
from opteq.options import check_kind
from opteq.results import Described
from opteq.tensors.lanczos import largest_ritz_pair

# Vectors that products are compared on, and by how much, relative to their size, they may differ in float64.
_PAIRS, _TOLERANCE = 3, 1e-9
# Lanczos steps between restarts, and the relative residual at which they end; a value is right to its square.
_STEPS, _RESTARTS, _SETTLED = 20, 50, 1e-6


@dataclass(frozen=True, slots=True, repr=False)
class OperatorReport(Described):
    """What `check_operator` found of an operator that keeps its promises.

    Attributes:
        error: the largest relative difference of products that ought to be equal.
        norm: `‖W‖₂` by power iteration, which comes near it from below.
        bound: what `norm_bound` says, at least `norm`.
        quick_bound: what `quick_norm_bound` says, at least `norm`.
    """

    error: float
    norm: float
    bound: float
    quick_bound: float


@torch.enable_grad()
def check_operator(W: LinearOperator, shape: tuple[int, ...]) -> OperatorReport:
    """See whether an operator is what it says: its adjoint, its gradient and its bounds, on random vectors.

    In float64, on a copy in eval mode, it compares products of a batch with those of its vectors one by one;
    `⟨W x, y⟩` with `⟨x, Wᵀy⟩`, which agree for all `x` and `y` only if `W` is linear and `Wᵀ` its adjoint;
    the gradient of `⟨y, W x⟩` towards the weights with automatic differentiation; and both norm bounds with
    `‖W v‖`, for a unit vector `v` found by power iteration on `WᵀW`. A difference refutes the operator;
    random vectors that show none do not prove it.

    Args:
        W: the operator.
        shape: that of its inputs, without the batch, such as `(channels, height, width)`.

    Raises:
        ConfigError: saying what does not hold, and by how much.
        NonFiniteError: if the weights are not finite.
        ShapeError: if `shape` is not that of its inputs, or a product or gradient has another than it should.
    """
    check_kind(LinearOperator, "W", W, "an opteq operator, a subclass of LinearOperator")
    name, domain = type(W).__name__, _domain(W, shape)
    attached = copy.deepcopy(W).double().eval().bind(domain)
    weights = tuple(t.detach().requires_grad_() for t in attached.tensors)
    if not all(t.isfinite().all() for t in weights):
        raise NonFiniteError(
            f"The weights of {name} contain NaN or infinite values; check it before training."
        )
    bound = attached.with_tensors(weights)
    generator = torch.Generator().manual_seed(0)
    device = weights[0].device if weights else torch.device("cpu")

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(device)

    if len(bound.codomain) != len(domain) or bound.codomain[0] != W.out_channels:
        raise ShapeError(
            f"Expected `codomain` of {name} to begin with its `out_channels`, {W.out_channels}, and to have"
            f" {len(domain)} sides as `shape` has, got {tuple(bound.codomain)}."
        )
    x, y = random(_PAIRS, *domain), random(_PAIRS, *bound.codomain)
    image = bound(x)
    _check_shape(f"`W x` of {name}, after its `codomain`,", image, y)
    back = bound.adjoint(y)
    _check_shape(f"`Wᵀ y` of {name}", back, x)
    if image.data_ptr() == x.data_ptr() or back.data_ptr() == y.data_ptr():
        raise ConfigError(
            f"A product of {name} lies in the memory of what it is of, which callers would write into; give"
            " it memory of its own, such as x.clone()."
        )
    for what, product, of, made in (("W x", bound, x, image), ("Wᵀ y", bound.adjoint, y, back)):
        gap = _batch_error(product, of, made)
        if gap > _TOLERANCE:
            raise ConfigError(
                f"`{what}` of {name} for one vector depends on the others of a batch: alone it differs by"
                f" {gap:.1e} of its size; take nothing over the first dimension."
            )
    error = _adjoint_error(image, x, y, back)
    if not error <= _TOLERANCE:
        raise ConfigError(
            f"`adjoint` of {name} is not the adjoint of what it computes, or that is not linear: ⟨W x, y⟩ and"
            f" ⟨x, Wᵀy⟩ differ by {error:.1e} of their size; correct one of the two."
        )
    gradient_error = _gradient_error(bound, image, x, y)
    if not gradient_error <= _TOLERANCE:
        raise ConfigError(
            f"`weight_gradient` of {name} is not the gradient of ⟨y, W x⟩ towards the weights: it differs by"
            f" {gradient_error:.1e} from that of automatic differentiation; correct it."
        )
    norm = _norm(bound, random(1, *domain))
    bounds = {key: float(getattr(bound.detach(), key)()) for key in ("quick_norm_bound", "norm_bound")}
    for key, value in bounds.items():
        if not value >= norm * (1 - _TOLERANCE):
            raise ConfigError(
                f"`{key}` of {name} says {value:.6g}, but there is a vector that W makes {norm:.6g} times as"
                " long; certificates need a bound that is never below the norm."
            )
    return OperatorReport(max(error, gradient_error), norm, bounds["norm_bound"], bounds["quick_norm_bound"])


def _domain(W: LinearOperator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of inputs, if it is one that `W` says it is for."""
    name = type(W).__name__
    for number in ("in_channels", "out_channels"):
        if not hasattr(W, number):
            raise ConfigError(f"{name} has no `{number}`, which maps ask for; set it in __init__.")
    expected = ", ".join((str(W.in_channels), *W.sides))
    given = isinstance(shape, Sequence) and all(isinstance(n, int) for n in shape)
    if not given or len(shape) != 1 + len(W.sides) or shape[0] != W.in_channels:
        raise ShapeError(
            f"Expected `shape` like ({expected}), the `in_channels` of {name} and its `sides`, without the"
            f" batch, got {tuple(shape) if given else type(shape).__name__}."
        )
    return tuple(shape)


def _check_shape(what: str, value: Tensor, expected: Tensor) -> None:
    if value.shape != expected.shape:
        raise ShapeError(f"Expected {what} of shape {tuple(expected.shape)}, got {tuple(value.shape)}.")


@torch.no_grad()
def _batch_error(product: Callable[[Tensor], Tensor], vectors: Tensor, images: Tensor) -> float:
    alone = torch.cat([product(vector) for vector in vectors.split(1)])
    return _largest((alone - images).norm(), images.norm())


@torch.no_grad()
def _adjoint_error(image: Tensor, x: Tensor, y: Tensor, back: Tensor) -> float:
    left, right = ((a * b).flatten(1).sum(1) for a, b in ((image, y), (x, back)))
    # The products of random vectors may nearly vanish; these are as large as they can be.
    size = image.flatten(1).norm(dim=1) * y.flatten(1).norm(dim=1)
    return _largest((left - right).abs(), size)


def _gradient_error(bound: BoundOperator, image: Tensor, x: Tensor, y: Tensor) -> float:
    if not bound.tensors:
        return 0.0
    if not image.requires_grad:
        raise ConfigError(
            "What the operator computes does not depend on its weights; use `self.tensors` of the bound"
            " operator, which are the weights as they act."
        )
    expected = torch.autograd.grad((y * image).sum(), bound.tensors, materialize_grads=True)
    with torch.no_grad():
        computed = bound.weight_gradient((x, y))
        if not isinstance(computed, tuple) or len(computed) != len(expected):
            raise ShapeError(
                f"Expected `weight_gradient` to give a tuple of {len(expected)}, one gradient for each of the"
                f" weights, got {f'{len(computed)} of them' if isinstance(computed, tuple) else 'a tensor'}."
            )
        for one, other in zip(computed, expected, strict=True):
            _check_shape("a gradient of weights", one, other)
        errors = [_largest((c - e).norm(), e.norm()) for c, e in zip(computed, expected, strict=True)]
    return max(errors)


def _largest(difference: Tensor, size: Tensor) -> float:
    return (difference / size.clamp(min=torch.finfo(size.dtype).tiny)).max().item()


@torch.no_grad()
def _norm(bound: BoundOperator, start: Tensor) -> float:
    def gram(v: Tensor) -> Tensor:
        return bound.adjoint(bound(v))

    _, vector = largest_ritz_pair(gram, start, _STEPS, _SETTLED, _RESTARTS)
    return bound(vector).norm().item()
