"""What one evaluation of an equation passes through: its operators, activations and kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.equation import Equation
from opteq.objectives.gaussiansimilarity import GaussianSimilarity
from opteq.results import State
from opteq.tensors.held import CONSTANT

Part = TypeVar("Part")


def parts(whole: object, kind: type[Part]) -> Iterator[Part]:
    """The parts of a kind in a frozen dataclass, in its fields, in tuples there, and so on.

    What is inside of such a part is not looked at, as the factors of an operator that is a product.
    """
    if isinstance(whole, kind):
        yield whole
    else:
        for inner in whole if isinstance(whole, tuple) else _values(whole).values():
            yield from parts(inner, kind)


@dataclass(frozen=True)
class Passage:
    """What was seen in one evaluation of an equation, for each of its parts in the order of `parts`.

    Attributes:
        active: for each activation the share of its units with `σ'(a) ≠ 0`, `(batch,)`, at every call.
        weights: for each Gaussian kernel the weights `e^{-γd}` of its patches, `(batch, n)`, at every call.
    """

    active: list[list[Tensor]]
    weights: list[list[Tensor]]


@torch.no_grad()
def passage(equation: Equation, state: State) -> Passage:
    """Evaluate `T` once at a state, and look at what that passes through."""
    seen = Passage([], [])

    def noting(places: list[list[Tensor]]) -> list[Tensor]:
        places.append([])
        return places[-1]

    watched = _with_parts(equation.detach(), Activation, lambda a: _WatchedActivation(a, noting(seen.active)))
    watched = _with_parts(
        watched,
        GaussianSimilarity,
        lambda s: _WatchedKernel(**_values(s), seen=noting(seen.weights)),
    )
    watched(state)
    return seen


def _with_parts(whole: Any, kind: type[Part], change: Callable[[Part], Part]) -> Any:
    """The same as `whole` with every one of its `parts` changed."""
    if isinstance(whole, kind):
        return change(whole)
    if isinstance(whole, tuple):
        changed = [_with_parts(part, kind, change) for part in whole]
        if all(new is old for new, old in zip(changed, whole, strict=True)):
            return whole
        return type(whole)(*changed) if hasattr(whole, "_fields") else tuple(changed)
    old = _values(whole)
    new = {name: _with_parts(value, kind, change) for name, value in old.items()}
    return replace(whole, **new) if any(new[name] is not old[name] for name in old) else whole


def _values(whole: object) -> dict[str, Any]:
    """The fields of a dataclass; of anything else none."""
    if not is_dataclass(whole) or isinstance(whole, type):
        return {}
    return {f.name: getattr(whole, f.name) for f in fields(whole) if f.init}


class _WatchedActivation(Activation):
    """An activation that notes how many of its units are active."""

    def __init__(self, watched: Activation, seen: list[Tensor]) -> None:
        self.watched, self.seen = watched, seen
        self.lipschitz, self.indicator, self.limits = watched.lipschitz, watched.indicator, watched.limits

    def __call__(self, a: Tensor) -> Tensor:
        self.seen.append((self.watched.derivative(a) != 0).flatten(1).double().mean(1))
        return self.watched(a)

    def derivative(self, a: Tensor) -> Tensor:
        return self.watched.derivative(a)

    def potential(self, a: Tensor) -> Tensor:
        return self.watched.potential(a)

    def penalty(self, v: Tensor) -> Tensor:
        return self.watched.penalty(v)


@dataclass(frozen=True, eq=False)
class _WatchedKernel(GaussianSimilarity):
    """A Gaussian similarity that notes the weights of its patches."""

    seen: list[Tensor] = field(default_factory=list, metadata=CONSTANT)

    def gradient(self, y: Tensor) -> Tensor:
        self.seen.append(self.attention(y))
        return super().gradient(y)
