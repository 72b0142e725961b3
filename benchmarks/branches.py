"""The multi-branch cell, written three times like those of `families`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.families import Call, Family, Leaves, Map, OptEq, Sizes, Tensors
from opteq.maps.base import EquilibriumMap
from opteq.maps.multibranch import MOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.objectives.coupling import HeritageDiversity
from opteq.operators.base import LinearOperator
from opteq.operators.compose import Compose
from opteq.operators.resample import AveragePool

Branches = tuple[Tensor, ...]


@dataclass(frozen=True)
class MultiBranch(Family):
    """`z_i = W_iᵀ relu(W_i h_i(z) + U_i pool_i(x) + b_i)` on a ring, `h` of heritage and diversity.

    Branch `i` is smaller than the input by the factor `reductions[i]` and has `hidden[i]` hidden
    channels; the `hidden` of the sizes is not used. The leaves of branch `i` are `Wi`, `Ui` and `bi`.
    """

    hidden: tuple[int, ...] = (16, 32, 64, 64)
    reductions: tuple[int, ...] = (1, 2, 4, 8)
    weight: float = 1e-3
    tau: float = 1e-3

    def draw(self, sizes: Sizes) -> Tensors:
        leaves = {}
        for index, (hidden, reduction) in enumerate(zip(self.hidden, self.reductions, strict=True)):
            own = replace(sizes, hidden=hidden, size=sizes.size // reduction)
            drawn = super().draw(own)
            leaves |= {f"{name}{index}": drawn[name] for name in ("U", "b")}
            # Units of one size are drawn alike: another order of the rows makes them different.
            leaves[f"W{index}"] = drawn["W"].roll(index, 0)
            leaves |= {"x": drawn["x"]} if reduction == 1 else {}
        return leaves

    def zero(self, leaves: Tensors) -> Branches:
        x = leaves["x"]
        return tuple(torch.zeros_like(F.avg_pool2d(x, reduction)) for reduction in self.reductions)

    def equation(self, leaves: Tensors) -> Map:
        units = self._units(leaves)
        weights, injections = [own["W"] for own in units], [self.injection(own) for own in units]
        first = [self._unit_map(W, c, None) for W, c in zip(weights, injections, strict=True)]
        squares = torch.stack([z.square().flatten(1).sum(1) for z in first]).mean(0)
        width = (self.tau * squares)[:, None, None]

        def T(state: Branches) -> Branches:
            received = self.messages(state, width)
            parts = zip(weights, injections, received, strict=True)
            return tuple(self._unit_map(W, c, h) for W, c, h in parts)

        return T

    def messages(self, state: Branches, width: Tensor) -> list[Tensor]:
        """`h`: from each pair of neighbours, at the smaller of their sizes, one message to both."""
        received: list[Any] = [0.0] * len(state)
        for i, j, small in self._pairs(state):
            a, b = _pooled(state[i], small), _pooled(state[j], small)
            n = a @ b.mT
            slope = -0.5 * self.weight * (n / width).clamp(-1, 1)
            k = torch.where(torch.eye(n.shape[1], dtype=torch.bool, device=n.device), 0.5, slope)
            received[i] = received[i] + _spread(k @ b, state[i], small)
            received[j] = received[j] + _spread(k.mT @ a, state[j], small)
        return received

    def units(self, leaves: Tensors, state: Branches) -> Tensor:
        own = self._units(leaves)[0]
        return self.operator.apply(own["W"], state[0]) + self.injection(own)

    def map(self, leaves: Leaves, max_norm: float | None) -> EquilibriumMap:
        units: list[OptEqUnit] = []
        for own, reduction in zip(self._units(leaves), self.reductions, strict=True):
            unit = self._unit(own, max_norm)
            if reduction > 1:
                operator = unit.injection.operator
                assert isinstance(operator, LinearOperator)
                unit.injection.operator = Compose(AveragePool(own["W"].shape[1], reduction), operator)
            units.append(unit)
        return MOptEq(units, HeritageDiversity(self.weight, self.tau))

    def products(self, leaves: Tensors) -> list[Call]:
        return self._of_units("products", leaves)

    def bare_evaluation(self, leaves: Tensors) -> list[Call]:
        """`W` and `Wᵀ` of every branch; resampling and three matrix products of every pair."""
        return self.products(leaves) + self._bare_messages(leaves, correlations=1)

    def bare_first(self, leaves: Tensors) -> list[Call]:
        return self._of_units("bare_first", leaves)

    def bare_product(self, leaves: Tensors) -> list[Call]:
        """The same with six matrix products: both parts of the change of `N`, and two to each branch."""
        return self.products(leaves) + self._bare_messages(leaves, correlations=2)

    def bare_injection(self, leaves: Tensors) -> list[Call]:
        return self._of_units("bare_injection", leaves)

    def bare_gradients(self, leaves: Tensors) -> list[Call]:
        return self._of_units("bare_gradients", leaves)

    def _of_units(self, what: str, leaves: Tensors) -> list[Call]:
        alone = OptEq(self.operator)
        return [call for own in self._units(leaves) for call in getattr(alone, what)(own)]

    def _bare_messages(self, leaves: Tensors, correlations: int) -> list[Call]:
        state = self.zero(leaves)
        calls: list[Call] = []
        for i, j, small in self._pairs(state):
            large = state[i] if state[i].shape[2] > small else state[j]
            a = _pooled(large, small)
            b, n = torch.zeros_like(a), a @ a.mT
            if large.shape[2] > small:
                calls.append(lambda large=large, small=small: _pooled(large, small))
                calls.append(lambda a=a, large=large, small=small: _spread(a, large, small))
            calls += [lambda a=a, b=b: a @ b.mT] * correlations
            calls += [lambda n=n, b=b: n @ b] * (2 * correlations)
        return calls

    def _unit_map(self, W: Tensor, c: Tensor, h: Tensor | None) -> Tensor:
        image = c if h is None else self.operator.apply(W, h) + c
        return self.operator.adjoint(W, torch.relu(image))

    def _units(self, leaves: Any) -> list[dict[str, Any]]:
        """The leaves of each branch under the names they have alone, with the input at its size."""
        x = leaves["x"]
        return [
            {
                "x": x if reduction == 1 else F.avg_pool2d(x, reduction),
                **{name: leaves[f"{name}{index}"] for name in ("W", "U", "b")},
            }
            for index, reduction in enumerate(self.reductions)
        ]

    def _pairs(self, state: Branches) -> Iterator[tuple[int, int, int]]:
        """Neighbours on the ring, and the smaller of their heights."""
        for i in range(len(state)):
            j = (i + 1) % len(state)
            yield i, j, min(state[i].shape[2], state[j].shape[2])


def _pooled(z: Tensor, size: int) -> Tensor:
    """`(batch, C, pixels)` of `z` averaged to `size × size`."""
    factor = z.shape[2] // size
    return (z if factor == 1 else F.avg_pool2d(z, factor)).flatten(2)


def _spread(message: Tensor, like: Tensor, size: int) -> Tensor:
    """The adjoint of `_pooled`, in the shape of `like`."""
    factor = like.shape[2] // size
    image = message.unflatten(2, (size, size))
    return image if factor == 1 else F.interpolate(image / factor**2, scale_factor=factor, mode="nearest")
