"""Moreau envelopes of hidden objectives, computed from objectives alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.options import check
from opteq.results import squared_norm
from opteq.solvers.linear import conjugate_gradients
from opteq.solvers.space import Space

_NEWTON_STEPS = 100
_HALVINGS = 30


class Envelope:
    """`F = αM_φ^{1-α}` for a proximal equation, `T = prox_φ`, `0 < α < 1`.

    Everything is derived from `ψ(v) = ½‖v‖² - Q(v)`, `Q` being the equation's `objective`; the map `T` is
    never evaluated. The `v` with

        (1-α) v + α∇ψ(v) = z

    has `∇ψ(v) = prox_{(1-α)φ}(z)`. It is the minimiser of the strongly convex
    `½(1-α)‖v‖² + αψ(v) - ⟨z, v⟩` and found by Newton's method with a line search on the residual.

    Args:
        equation: a proximal equation with a single-tensor state, for a batch.
        alpha: `α`, in (0, 1).

    Raises:
        ConfigError: if the equation is not proximal or `alpha` out of range.
    """

    def __init__(self, equation: Equation, alpha: float) -> None:
        if equation.structure != "proximal":
            raise ConfigError(f"Expected a proximal equation, got {type(equation).__name__}.")
        check(0 < alpha < 1, "alpha", alpha, "in (0, 1), at whose end 1 the envelope is φ and not smooth")
        self.equation, self.alpha = equation.detach(), alpha

    def prox(self, z: Tensor) -> Tensor:
        """`prox_{(1-α)φ}(z)`."""
        return gradient_of_potential(self.equation, self._preimage(z))

    def gradient(self, z: Tensor) -> Tensor:
        """`∇F(z) = α/(1-α) (z - prox_{(1-α)φ}(z))`."""
        return self.alpha / (1 - self.alpha) * (z - self.prox(z))

    def value(self, z: Tensor) -> Tensor:
        """`(batch,)` `F(z) = α(φ(p) + ‖z - p‖²/(2(1-α)))`, `p = prox_{(1-α)φ}(z)`."""
        v = self._preimage(z)
        p = gradient_of_potential(self.equation, v)
        # Fenchel's equality at p = ∇ψ(v): φ(p) = ψ*(p) - ½‖p‖² = Q(v) - ½‖v - p‖².
        phi = _objective(self.equation, v) - 0.5 * squared_norm(v - p)
        return self.alpha * (phi + 0.5 * squared_norm(z - p) / (1 - self.alpha))

    def _preimage(self, z: Tensor) -> Tensor:
        space = Space(z)
        target = space.flatten(z.detach())
        v = target
        residual, hessian = self._newton_system(space, v, target)
        for _ in range(_NEWTON_STEPS):
            size = residual.norm(dim=1)
            floor = 10 * torch.finfo(v.dtype).eps * (target.norm(dim=1) + v.norm(dim=1))
            if bool((size <= floor).all()):
                break
            direction = conjugate_gradients(hessian, -residual, 1e-12, 2 * v.shape[1])[0]
            step, moved = (size > floor).to(v.dtype), v
            for _ in range(_HALVINGS):
                moved = v + step[:, None] * direction
                residual, hessian = self._newton_system(space, moved, target)
                worse = residual.norm(dim=1) > (1 - 1e-4 * step) * size
                if not bool(worse.any()):
                    break
                step = torch.where(worse, 0.5 * step, step)
            v = moved
        return space.restore(v)  # type: ignore[return-value]

    def _newton_system(
        self, space: Space, v: Tensor, target: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """`v - α∇Q(v) - z`, the gradient of the objective, and products with its derivative at `v`."""
        with torch.enable_grad():
            point = space.restore(v).detach().requires_grad_()  # type: ignore[union-attr]
            (slope,) = torch.autograd.grad(_objective(self.equation, point).sum(), point, create_graph=True)

        def hessian(p: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(
                slope, point, space.restore(p), retain_graph=True, materialize_grads=True
            )
            return p - self.alpha * space.flatten(product)

        return v - self.alpha * space.flatten(slope.detach()) - target, hessian


def gradient_of_potential(equation: Equation, v: Tensor) -> Tensor:
    """`∇ψ(v) = v - ∇Q(v)` by automatic differentiation of the objective `Q`; `T(v)` for a proximal `T`."""
    with torch.enable_grad():
        point = v.detach().requires_grad_()
        (slope,) = torch.autograd.grad(_objective(equation, point).sum(), point)
    return point.detach() - slope


def _objective(equation: Equation, v: Tensor) -> Tensor:
    assert equation.objective is not None
    return equation.objective(v)
