"""Invertible affine changes of the state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, Reformulation, SymmetricForm
from opteq.errors import ConfigError, ShapeError
from opteq.maps.base import EquilibriumMap, bind_single, expect_map
from opteq.options import check
from opteq.results import Certificate, State
from opteq.tensors.held import CONSTANT


class AffineChange(EquilibriumMap):
    """`A⁻¹ ∘ T ∘ A` for an invertible `A(z) = M z + s` on the channels (Xie et al. 2022, Table 1).

    The fixed points move to `A⁻¹(z*)`. If `T = prox_φ`, they minimise `φ(A z)`, and the map is a proximal
    operator for orthogonal `M` and multiples of one; for any other `M` it is one in the metric `MᵀM`,
    and its Jacobian is similar to a symmetric matrix without being symmetric.

    Args:
        map: the map `T`, with a state of shape `(batch, m)` or `(batch, m, H, W)`.
        matrix: `M`, of shape `(m, m)`, the same at every pixel; not learned.
        shift: `s`, of shape `(m,)`; zero unless given.

    Raises:
        ConfigError: if `matrix` is not square, not (numerically) invertible, or `shift` does not fit it;
            when bound, for a `map` whose state has several branches, or that reads out something else.
        ShapeError: when bound, if `matrix` does not fit the state.
    """

    def __init__(self, map: EquilibriumMap, matrix: Tensor, shift: Tensor | None = None) -> None:
        super().__init__()
        expect_map(map)
        floating = isinstance(matrix, Tensor) and matrix.is_floating_point()
        check(floating, "matrix", getattr(matrix, "dtype", matrix), "a tensor of floating-point numbers")
        if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ConfigError(f"Expected `matrix` of shape (m, m), got {tuple(matrix.shape)}.")
        finite = bool(torch.isfinite(matrix).all())
        condition = torch.linalg.cond(matrix.double()).item() if finite else math.inf
        if not condition * torch.finfo(matrix.dtype).eps < 1e-2:
            raise ConfigError(
                f"Expected an invertible `matrix`, got one of condition number {condition:.2g};"
                " the affine change could not be undone."
            )
        shift = matrix.new_zeros(len(matrix)) if shift is None else shift
        if not isinstance(shift, Tensor):
            raise ConfigError(f"Expected `shift` to be a tensor, got {type(shift).__name__}.")
        if shift.shape != matrix.shape[:1] or not bool(torch.isfinite(shift).all()):
            raise ConfigError(
                f"Expected a finite `shift` of shape ({len(matrix)},), got {tuple(shift.shape)}:"
                f" {shift.tolist()}."
            )
        self.map = map
        self.matrix: Tensor
        self.shift: Tensor
        self.register_buffer("matrix", matrix)
        self.register_buffer("shift", shift)

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return self.map.injections

    def bind(self, x: State, error: float = 0.0) -> AffineEquation:
        inner, start = bind_single(self.map, x, error)
        if start.shape[1] != len(self.matrix):
            m = start.shape[1]
            raise ShapeError(f"Expected `matrix` of shape ({m}, {m}), got {tuple(self.matrix.shape)}.")
        if inner.readout(start) is not start:
            raise ConfigError(
                f"{type(inner).__name__} reads out something else than its state, which is what an affine"
                " change is of; change a map that gives its state."
            )
        # Whatever the dtype of the state: certificates look at a layer in float64.
        matrix = self.matrix.double()
        return AffineEquation(inner, matrix, torch.linalg.inv(matrix), self.shift.double(), self.orthogonal)

    @property
    def orthogonal(self) -> bool:
        """Whether `M` is orthogonal, to six digits."""
        gram = self.matrix.mT @ self.matrix
        return torch.allclose(gram, torch.eye(len(gram)).to(gram), atol=1e-6)

    def extra_repr(self) -> str:
        return f"orthogonal={self.orthogonal}"


@dataclass(frozen=True, eq=False)
class AffineEquation(Equation[Tensor]):
    """`z = M⁻¹(T(M z + s) - s)`, with `M` and `s` in float64."""

    inner: Equation[Tensor]
    matrix: Tensor = field(metadata=CONSTANT)
    inverse: Tensor = field(metadata=CONSTANT)
    shift: Tensor = field(metadata=CONSTANT)
    orthogonal: bool

    @property
    def structure(self) -> str:
        return self.inner.structure if self.orthogonal else "none"

    @property
    def batch_coupled(self) -> bool:
        return self.inner.batch_coupled

    def initial(self) -> Tensor:
        return self.inner.initial()

    def changed(self, state: Tensor) -> Tensor:
        """`A z`."""
        z = apply_matrix(self.matrix, state)
        return z + self._shift_of(z)

    def __call__(self, state: Tensor) -> Tensor:
        return self.back(self.inner(self.changed(state)))

    def back(self, state: Tensor) -> Tensor:
        """`A⁻¹ z`."""
        return apply_matrix(self.inverse, state - self._shift_of(state))

    def reformulate(self, gradient: bool = False) -> Reformulation[Tensor]:
        """That of `T`, carried back at the end: `A⁻¹` is applied once, and not in every evaluation.

        Relative residuals of `z` are at most the condition number times those of `M z`. A shift leaves them
        open, and what is carried back is a step further, which only a proximal `T` brings nearer for sure.
        """
        proximal = self.inner.structure == "proximal"
        if self.shift.any() or not proximal or (gradient and not self.orthogonal):
            return super().reformulate(gradient)
        return self.inner.reformulate(gradient).then(self.back, self._stretch, self._largest)

    @property
    def objective(self) -> Callable[[Tensor], Tensor] | None:
        """That of `T` at `A z`; its gradient is `MᵀM (z - T(z))` where that of `T` is `z - T(z)`."""
        inner = self.inner.objective
        return None if inner is None else lambda state: inner(self.changed(state))

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """`‖J‖ ‖M‖ ‖M⁻¹‖`."""
        inner = self.inner.contraction(None if state is None else self.changed(state))
        return replace(inner, value=inner.value * self._condition)

    def curvature(self, state: Tensor | None = None) -> Certificate:
        return self.inner.curvature(None if state is None else self.changed(state))

    def distance_bound(self, state: Tensor) -> Certificate:
        """`‖M⁻¹‖` times that of `A z`, whether the map contracts itself or not."""
        inner = self.inner.distance_bound(self.changed(state))
        return replace(inner, value=inner.value * self._stretch)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        push, pull = self.inner.rates(pushes)
        return self._stretch * push, self._condition * pull

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        return self._stretch * self.inner.equilibrium_lipschitz(pushes)

    @property
    def _largest(self) -> float:
        """`‖M‖₂`."""
        return torch.linalg.matrix_norm(self.matrix, 2).item() * (1 + 1e-12)

    @property
    def _stretch(self) -> float:
        """`‖M⁻¹‖₂`, never below it: the inverse is rounded as much as `M` is badly conditioned."""
        norm = torch.linalg.matrix_norm(self.inverse, 2).item()
        rounding = torch.finfo(torch.float64).eps * len(self.matrix) * self._largest * norm
        return norm * (1 + 8 * rounding)

    @property
    def _condition(self) -> float:
        """`‖M‖‖M⁻¹‖`."""
        return self._largest * self._stretch

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        return _AffineLinearization(self, self.inner.linearize(self.changed(state)))

    def _shift_of(self, z: Tensor) -> Tensor:
        return self.shift.to(z.dtype).view(-1, *[1] * (z.dim() - 2))


class _AffineLinearization(Linearization[Tensor]):
    """`M⁻¹JM`. With `w = M⁻ᵀu` its adjoint equation is `w = M⁻ᵀg + Jᵀw`."""

    def __init__(self, equation: AffineEquation, inner: Linearization[Tensor]) -> None:
        self._equation, self._inner = equation, inner
        self._matrix, self._inverse = equation.matrix, equation.inverse

    @property
    def image(self) -> Tensor:
        return self._equation.back(self._inner.image)

    @property
    def symmetric(self) -> SymmetricForm[Tensor] | None:
        form = self._inner.symmetric
        if form is None:
            return None
        pullback = form.pullback

        def entered(g: Tensor) -> Tensor:
            return apply_matrix(self._inverse.mT, g)

        return SymmetricForm(
            form.matvec,
            enter=lambda g: form.enter(entered(g)),
            leave=lambda v, g: apply_matrix(self._matrix.mT, form.leave(v, entered(g))),
            pullback=None if pullback is None else lambda v, g: pullback(v, entered(g)),
            metric=form.metric,
        )

    def jvp(self, tangent: Tensor) -> Tensor:
        return apply_matrix(self._inverse, self._inner.jvp(apply_matrix(self._matrix, tangent)))

    def vjp(self, cotangent: Tensor) -> Tensor:
        return apply_matrix(self._matrix.mT, self._inner.vjp(apply_matrix(self._inverse.mT, cotangent)))

    def pullback(self, cotangent: Tensor) -> Gradients:
        return self._inner.pullback(apply_matrix(self._inverse.mT, cotangent))


def apply_matrix(matrix: Tensor, state: Tensor) -> Tensor:
    """`M z` on the channels of `(batch, m)` or `(batch, m, H, W)`."""
    matrix = matrix.to(state.dtype)
    if state.dim() == 2:
        return F.linear(state, matrix)
    return F.conv2d(state, matrix[:, :, None, None])
