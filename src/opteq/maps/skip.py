"""Skip connections: the map of a Moreau envelope."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, Reformulation, SymmetricForm
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, bind_single, expect_map
from opteq.maps.hiddenvariable import HiddenVariable, with_hidden
from opteq.options import check, check_flag, is_number
from opteq.results import Certificate, State, map_state


class SkipWeight(nn.Module):
    """`α` in (0, 1], fixed or learned. Learned, it is `sigmoid(logit)`, so it stays inside (0, 1).

    Raises:
        ConfigError: if `alpha` lies outside (0, 1], or is 1 and to be learned, or `learn` is no truth value.
    """

    def __init__(self, alpha: float, learn: bool = False) -> None:
        super().__init__()
        check(is_number(alpha) and 0 < alpha <= 1, "alpha", alpha, "in (0, 1]")
        check_flag("learn_alpha", learn)
        if learn and alpha == 1:
            raise ConfigError("A learned `alpha` starts inside (0, 1), not at 1; start at 0.99 instead.")
        self.alpha = float(alpha)
        self.logit = nn.Parameter(torch.tensor(math.log(alpha / (1 - alpha)))) if learn else None

    @property
    def value(self) -> float | Tensor:
        """`α`: a number if fixed, a scalar tensor with a graph if learned."""
        return self.alpha if self.logit is None else torch.sigmoid(self.logit)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}" + ("" if self.logit is None else ", learned from there")


class MoreauSkip(EquilibriumMap):
    """`αT + (1-α)I`, a skip connection around a map (Xie et al. 2022, Table 1).

    For `T = prox_φ` it is the proximal operator of the Moreau envelope `αM_φ^{1-α}`. The fixed points
    are those of `T`, unchanged; for `α < 1` the map is strongly monotone and invertible.

    Args:
        map: the map `T`.
        alpha: `α`, in (0, 1].
        learn_alpha: learn `α`, starting from `alpha`.

    Raises:
        ConfigError: if `alpha` is out of range; when bound, for a `map` whose state has several branches.
    """

    def __init__(self, map: EquilibriumMap, alpha: float = 0.8, learn_alpha: bool = False) -> None:
        super().__init__()
        expect_map(map)
        self.map, self.weight = map, SkipWeight(alpha, learn_alpha)

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return self.map.injections

    def bind(self, x: State, error: float = 0.0) -> SkipEquation:
        return SkipEquation(bind_single(self.map, x, error)[0], self.weight.value)


@dataclass(frozen=True, eq=False)
class SkipEquation(HiddenVariable[Tensor]):
    """`z = αT(z) + (1-α)z` for a single-tensor state."""

    inner: Equation[Tensor]
    alpha: float | Tensor

    @property
    def structure(self) -> str:
        return self.inner.structure

    @property
    def batch_coupled(self) -> bool:
        return self.inner.batch_coupled

    def initial(self) -> Tensor:
        return self.inner.initial()

    def first_iterate(self) -> Tensor:
        return _blend(self.inner.initial(), self.inner.first_iterate(), self.alpha)

    def __call__(self, state: Tensor) -> Tensor:
        return _blend(state, self.inner(state), self.alpha)

    def reformulate(self, gradient: bool = False) -> Reformulation[Tensor]:
        """That of `T`, with the same fixed points and, where `0 ⪯ J ⪯ I`, the stronger contraction."""
        if self.structure == "proximal":
            return self.inner.reformulate(gradient)
        return super().reformulate(gradient)

    @property
    def objective(self) -> Callable[[Tensor], Tensor] | None:
        """`α` times that of `T`: its gradient is `z - αT(z) - (1-α)z`."""
        inner = self.inner.objective
        return None if inner is None else lambda state: self.alpha * inner(state)

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """`α‖J‖ + 1 - α`."""
        inner, alpha = self.inner.contraction(state), self._alpha
        return replace(inner, value=alpha * inner.value + (1 - alpha))

    def distance_bound(self, state: Tensor) -> Certificate:
        """That of `T`, whose equilibria are the same."""
        return self.inner.distance_bound(state)

    def curvature(self, state: Tensor | None = None) -> Certificate:
        return self.inner.curvature(state)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        push, pull = self.inner.rates(pushes)
        alpha = float(self._alpha)
        return alpha * push, alpha * pull + 1 - alpha

    def hidden(self, state: Tensor) -> State:
        """That of `T`."""
        return with_hidden(self.inner).hidden(state)

    def hidden_rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        return with_hidden(self.inner).hidden_rates(pushes)

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        return self.inner.equilibrium_lipschitz(pushes)

    @property
    def _alpha(self) -> float | Tensor:
        return self.alpha.detach() if isinstance(self.alpha, Tensor) else self.alpha

    def readout(self, state: Tensor) -> Tensor:
        return self.inner.readout(state)

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        return _SkipLinearization(self.inner.linearize(state), self.alpha, state)


class _SkipLinearization(Linearization[Tensor]):
    """`αJ + (1-α)I`."""

    def __init__(self, inner: Linearization[Tensor], alpha: float | Tensor, state: Tensor) -> None:
        self._inner, self._alpha, self._state = inner, alpha, state

    @property
    def image(self) -> Tensor:
        if isinstance(self._alpha, Tensor):
            return self._state + self._alpha * self._move
        return _blend(self._state, self._inner.image, self._alpha)

    @cached_property
    def _move(self) -> Tensor:
        """`T(z) - z`, which the gradient of a learned `α` needs as well."""
        image = self._inner.image
        return image - self._state

    @property
    def symmetric(self) -> SymmetricForm[Tensor] | None:
        """That of `J`: `w = αu` solves `w = g + Jᵀw`, and the gradients behind `T` are those of `w`."""
        form, alpha = self._inner.symmetric, self._alpha
        if form is None:
            return None

        def leave(v: Tensor, g: Tensor) -> Tensor:
            return map_state(lambda w: w / alpha, form.leave(v, g))

        # The gradient of a learned α is one more.
        pullback = None if isinstance(alpha, Tensor) else form.pullback
        return replace(form, leave=leave, pullback=pullback)

    def jvp(self, tangent: Tensor) -> Tensor:
        return _blend(tangent, self._inner.jvp(tangent), self._alpha)

    def vjp(self, cotangent: Tensor) -> Tensor:
        return _blend(cotangent, self._inner.vjp(cotangent), self._alpha)

    def pullback(self, cotangent: Tensor) -> Gradients:
        return self._with_alpha(self._inner.pullback(self._alpha * cotangent), cotangent)

    def pullback_and_vjp(self, cotangent: Tensor) -> tuple[Gradients, Tensor]:
        # αJᵀu + (1-α)u, the first term from the product with αu that the gradients need.
        gradients, image = self._inner.pullback_and_vjp(self._alpha * cotangent)
        return self._with_alpha(gradients, cotangent), image + (1 - self._alpha) * cotangent

    def _with_alpha(self, gradients: Gradients, cotangent: Tensor) -> Gradients:
        if not isinstance(self._alpha, Tensor):
            return gradients
        return (*gradients, (cotangent * self._move).sum().to(self._alpha.dtype))


def _blend(a: Tensor, b: Tensor, alpha: float | Tensor) -> Tensor:
    """`αb + (1-α)a`."""
    return torch.lerp(a, b, alpha.to(b.dtype) if isinstance(alpha, Tensor) else alpha)
