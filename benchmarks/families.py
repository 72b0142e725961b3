"""The equilibrium maps of the cells, each written three times.

As plain PyTorch functions, the way a user of another library would write them from the papers; as a
layer of opteq; and as the bare operators that any exact method has to run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from benchmarks.operators import Operator, largest_singular_value
from opteq.maps.base import EquilibriumMap
from opteq.maps.deep import DeepOptEq
from opteq.maps.gaussian import GaussianMap
from opteq.maps.optequnit import OptEqUnit
from opteq.objectives.patches import Patches
from opteq.results import State

Tensors = Mapping[str, Tensor]
Leaves = dict[str, nn.Parameter]
# From a state, a tensor or a tuple with one per branch, to such a state.
Map = Callable[[Any], Any]
L = TypeVar("L", bound=Tensor)
# An operator with its arguments, ready to run.
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What a map is built for; `size` is height and width, ignored by dense operators."""

    batch: int
    channels: int
    hidden: int
    size: int
    norm: float


@dataclass(frozen=True)
class Family(ABC):
    """An equilibrium map with `U` and `W`, both from `channels` to `hidden`, and a bias `b`."""

    operator: Operator

    def draw(self, sizes: Sizes) -> Tensors:
        """Float64 leaves of one problem: the input `x`, and `W`, `U` and `b`.

        `W` is scaled so that the operator's own norm (zero padding at this image size included) is
        `sizes.norm`. Injections `U x + b` have mean zero and standard deviation near 0.6, so that about
        half of the units are active.
        """
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        domain = self.operator.domain(sizes.channels, sizes.size)
        shape = self.operator.weight_shape(sizes.channels, sizes.hidden)
        fan_in = torch.Size(shape[1:]).numel()
        W = normal(*shape)
        W *= sizes.norm / self.norm(W, domain)
        return {
            "x": normal(sizes.batch, *domain),
            "W": W,
            "U": 0.6 * normal(*shape) / fan_in**0.5,
            "b": 0.1 * normal(sizes.hidden),
        }

    def norm(self, W: Tensor, domain: tuple[int, ...]) -> float:
        """Norm of the operator with weight `W` on samples of shape `domain`."""
        start = torch.randn((1, *domain), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return largest_singular_value(lambda v: self.operator.adjoint(W, self.operator.apply(W, v)), start)

    def injection(self, leaves: Tensors) -> Tensor:
        """`c = U x + b`."""
        product = self.operator.apply(leaves["U"], leaves["x"])
        return product + leaves["b"].view(-1, *[1] * (product.dim() - 2))

    def zero(self, leaves: Tensors) -> State:
        """The state to start from."""
        return torch.zeros_like(leaves["x"])

    @abstractmethod
    def equation(self, leaves: Tensors) -> Map:
        """`T`, attached to the graph of the leaves."""

    @abstractmethod
    def units(self, leaves: Tensors, state: Any) -> Tensor:
        """The rectified units at a state: positive where active."""

    @abstractmethod
    def map(self, leaves: Leaves, max_norm: float | None) -> EquilibriumMap:
        """The library's map with the leaves as its parameters; `max_norm` is its ceiling on `‖W‖`."""

    def products(self, leaves: Tensors) -> list[Call]:
        """The products with `W` and `Wᵀ` of one evaluation of `T`."""
        W, state, hidden = leaves["W"], leaves["x"], self.operator.apply(leaves["W"], leaves["x"])
        return [lambda: self.operator.apply(W, state), lambda: self.operator.adjoint(W, hidden)]

    def bare_evaluation(self, leaves: Tensors) -> list[Call]:
        """The operators of one evaluation of `T`."""
        return self.products(leaves)

    def bare_first(self, leaves: Tensors) -> list[Call]:
        """The operators of `T(0)`, which needs no `W`; solves of ours start from it."""
        return self.bare_evaluation(leaves)[1:]

    def bare_product(self, leaves: Tensors) -> list[Call]:
        """The operators of one product with the Jacobian."""
        return self.bare_evaluation(leaves)

    def bare_injection(self, leaves: Tensors) -> list[Call]:
        """The operators that the forward pass runs once."""
        return [lambda: self.operator.apply(leaves["U"], leaves["x"])]

    def bare_gradients(self, leaves: Tensors) -> list[Call]:
        """The operators that turn the adjoint solution `u` into gradients.

        One `W u` (the gradient of the injection is `D W u`), two gradients of `W`, which `T` uses twice,
        and the gradients of `U` and of the input.
        """
        W, U, x = leaves["W"], leaves["U"], leaves["x"]
        hidden = self.operator.apply(W, x)
        gradient = lambda: self.operator.weight_gradient(W, x, hidden)  # noqa: E731
        return [
            lambda: self.operator.apply(W, x),
            gradient,
            gradient,
            gradient,
            lambda: self.operator.adjoint(U, hidden),
        ]

    def _fill(self, module: OptEqUnit | GaussianMap, leaves: Leaves) -> None:
        module.W.weight, module.injection.operator.weight = leaves["W"], leaves["U"]
        module.injection.bias = leaves["b"]

    def _unit(self, leaves: Leaves, max_norm: float | None) -> OptEqUnit:
        hidden, channels = leaves["W"].shape[:2]
        W, U = (self.operator.module(channels, hidden) for _ in range(2))
        unit = OptEqUnit(W, U, max_norm=max_norm)
        self._fill(unit, leaves)
        return unit


@dataclass(frozen=True)
class OptEq(Family):
    """`z = Wᵀ relu(W z + U x + b)`."""

    def equation(self, leaves: Tensors) -> Map:
        W, c = leaves["W"], self.injection(leaves)
        return lambda z: self.operator.adjoint(W, torch.relu(self.operator.apply(W, z) + c))

    def units(self, leaves: Tensors, state: Tensor) -> Tensor:
        return self.operator.apply(leaves["W"], state) + self.injection(leaves)

    def map(self, leaves: Leaves, max_norm: float | None) -> EquilibriumMap:
        return self._unit(leaves, max_norm)


@dataclass(frozen=True)
class Deep(Family):
    """Units `z ← α Wᵀ relu(W z + U x + b) + (1 - α) z`, one after the other, with these hidden channels.

    The `hidden` of the sizes is not used. The leaves of unit `i` are `Wi`, `Ui` and `bi`.
    """

    hidden: tuple[int, ...] = (16, 32, 64, 128, 128)
    alpha: float = 0.8

    def draw(self, sizes: Sizes) -> Tensors:
        leaves = {}
        for index, hidden in enumerate(self.hidden):
            drawn = super().draw(replace(sizes, hidden=hidden))
            leaves |= {"x": drawn["x"], **{f"{name}{index}": drawn[name] for name in ("U", "b")}}
            # Units of one size are drawn alike: another order of the rows makes them different.
            leaves[f"W{index}"] = drawn["W"].roll(index, 0)
        return leaves

    def equation(self, leaves: Tensors) -> Map:
        units = [(own["W"], self.injection(own)) for own in self._units(leaves)]

        def T(z: Tensor) -> Tensor:
            for W, c in units:
                image = self.operator.adjoint(W, torch.relu(self.operator.apply(W, z) + c))
                z = self.alpha * image + (1 - self.alpha) * z
            return z

        return T

    def units(self, leaves: Tensors, state: Tensor) -> Tensor:
        first = self._units(leaves)[0]
        return self.operator.apply(first["W"], state) + self.injection(first)

    def map(self, leaves: Leaves, max_norm: float | None) -> EquilibriumMap:
        return DeepOptEq([self._unit(own, max_norm) for own in self._units(leaves)], self.alpha)

    def products(self, leaves: Tensors) -> list[Call]:
        return self._of_units("products", leaves)

    def bare_injection(self, leaves: Tensors) -> list[Call]:
        return self._of_units("bare_injection", leaves)

    def bare_gradients(self, leaves: Tensors) -> list[Call]:
        """Those of every unit, and the products with `Wᵀ` that carry the cotangent to the unit before."""
        carried = [OptEq(self.operator).bare_evaluation(own)[1] for own in self._units(leaves)[1:]]
        return self._of_units("bare_gradients", leaves) + carried

    def _of_units(self, what: str, leaves: Tensors) -> list[Call]:
        alone = OptEq(self.operator)
        return [call for own in self._units(leaves) for call in getattr(alone, what)(own)]

    def _units(self, leaves: Mapping[str, L]) -> list[dict[str, L]]:
        """The leaves of each unit under the names they have alone."""
        names = ("W", "U", "b")
        return [
            {"x": leaves["x"], **{name: leaves[f"{name}{index}"] for name in names}}
            for index in range(len(self.hidden))
        ]


@dataclass(frozen=True)
class Gaussian(Family):
    """`y = relu(Wᵀ merge(e^{-γ‖r_i W_h‖²} r_i W_h W_hᵀ))` with `r_i = patch_i(U x + b - W y)`."""

    patch_channels: int = 8
    patch_size: int = 2
    patch_hidden: int = 64

    def draw(self, sizes: Sizes) -> Tensors:
        leaves = super().draw(sizes)
        generator = torch.Generator().manual_seed(2)
        shape = (self.patch_channels * self.patch_size**2, self.patch_hidden)
        W_h = torch.randn(shape, generator=generator, dtype=torch.float64)
        # A shade under 1, where the library's own constraint on W_h leaves it alone.
        return {**leaves, "W_h": 0.99 * W_h / torch.linalg.matrix_norm(W_h, 2)}

    def equation(self, leaves: Tensors) -> Map:
        W, W_h, c = leaves["W"], leaves["W_h"], self.injection(leaves)
        start = (self.split(c) @ W_h).square().sum(-1)
        nearest = torch.maximum(start.amin(1), 0.01 * start.mean(1))
        gamma = (0.2 / nearest)[:, None, None]

        def T(y: Tensor) -> Tensor:
            projected = self.split(c - self.operator.apply(W, y)) @ W_h
            weight = torch.exp(-gamma * projected.square().sum(-1, keepdim=True))
            pulled = self.merge((weight * projected) @ W_h.mT, c)
            return torch.relu(self.operator.adjoint(W, pulled))

        return T

    def units(self, leaves: Tensors, state: Tensor) -> Tensor:
        return self.equation(leaves)(state)

    def map(self, leaves: Leaves, max_norm: float | None) -> EquilibriumMap:
        hidden, channels = leaves["W"].shape[:2]
        W, U = (self.operator.module(channels, hidden) for _ in range(2))
        patches = Patches(self.patch_channels, self.patch_size)
        module = GaussianMap(W, U, patches, self.patch_hidden, max_norm=max_norm)
        self._fill(module, leaves)
        module.projection = leaves["W_h"]
        return module

    def bare_evaluation(self, leaves: Tensors) -> list[Call]:
        gram = leaves["W_h"] @ leaves["W_h"].mT
        patches = self.split(leaves["x"]).flatten(0, 1)
        return [*super().bare_evaluation(leaves), lambda: patches @ gram]

    def bare_gradients(self, leaves: Tensors) -> list[Call]:
        gram = leaves["W_h"] @ leaves["W_h"].mT
        patches = self.split(leaves["x"]).flatten(0, 1)
        return [*super().bare_gradients(leaves), lambda: patches @ gram, lambda: patches.mT @ patches]

    def split(self, x: Tensor) -> Tensor:
        """`(batch, C, H, W) ↦ (batch, patches, dimension)`, pixels before channels within a patch."""
        c, p = self.patch_channels, self.patch_size
        batch, channels, height, width = x.shape
        blocks = x.view(batch, channels // c, c, height // p, p, width // p, p)
        return blocks.permute(0, 3, 5, 1, 4, 6, 2).reshape(batch, -1, c * p * p)

    def merge(self, patches: Tensor, like: Tensor) -> Tensor:
        """The inverse of `split`, in the shape and memory layout of `like`."""
        c, p = self.patch_channels, self.patch_size
        batch, channels, height, width = like.shape
        blocks = patches.view(batch, height // p, width // p, channels // c, p, p, c)
        if like.is_contiguous():
            return blocks.permute(0, 3, 6, 1, 4, 2, 5).reshape(like.shape)
        pixels = blocks.permute(0, 1, 4, 2, 5, 3, 6).reshape(batch, height, width, channels)
        return pixels.permute(0, 3, 1, 2)
