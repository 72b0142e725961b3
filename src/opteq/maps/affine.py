"""Invertible affine changes of the state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm
from opteq.errors import ConfigError, ShapeError
from opteq.maps.base import EquilibriumMap, bind_single, expect_map
from opteq.results import Certificate, State


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
            when bound, for a `map` whose state has several branches.
        ShapeError: when bound, if `matrix` does not fit the state.
    """

    def __init__(self, map: EquilibriumMap, matrix: Tensor, shift: Tensor | None = None) -> None:
        super().__init__()
        expect_map(map)
        if not isinstance(matrix, Tensor) or not matrix.is_floating_point():
            got = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ConfigError(f"Expected `matrix` to be a tensor of floating-point numbers, got {got}.")
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
        gram = matrix.mT @ matrix
        self.orthogonal = torch.allclose(gram, torch.eye(len(matrix)).to(gram), atol=1e-6)

    def bind(self, x: State) -> AffineEquation:
        inner, start = bind_single(self.map, x)
        if start.shape[1] != len(self.matrix):
            m = start.shape[1]
            raise ShapeError(f"Expected `matrix` of shape ({m}, {m}), got {tuple(self.matrix.shape)}.")
        # Whatever the dtype of the state: certificates look at a layer in float64.
        matrix = self.matrix.double()
        return AffineEquation(inner, matrix, torch.linalg.inv(matrix), self.shift.double(), self.orthogonal)

    def extra_repr(self) -> str:
        return f"orthogonal={self.orthogonal}"


@dataclass(frozen=True, eq=False)
class AffineEquation(Equation):
    """`z = M⁻¹(T(M z + s) - s)`, with `M` and `s` in float64."""

    inner: Equation
    matrix: Tensor
    inverse: Tensor
    shift: Tensor
    orthogonal: bool

    @property
    def has_energy(self) -> bool:
        return self.inner.has_energy

    @property
    def conservative(self) -> bool:
        return self.orthogonal and self.inner.conservative

    @property
    def proximal(self) -> bool:
        return self.orthogonal and self.inner.proximal

    @property
    def batch_coupled(self) -> bool:
        return self.inner.batch_coupled

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return replace(self, inner=self.inner.with_tensors(tensors))

    def initial(self) -> State:
        return self.inner.initial()

    def changed(self, state: State) -> Tensor:
        """`A z`."""
        z = apply_matrix(self.matrix, state)
        return z + self._shift_of(z)

    def __call__(self, state: State) -> Tensor:
        image = self.inner(self.changed(state))
        assert isinstance(image, Tensor)
        return apply_matrix(self.inverse, image - self._shift_of(image))

    def energy(self, state: State) -> Tensor:
        """The energy of `T` at `A z`; its gradient is `MᵀM (z - T(z))` where that of `T` is `z - T(z)`."""
        return self.inner.energy(self.changed(state))

    def contraction(self, state: State | None = None) -> Certificate:
        """`‖J‖ ‖M‖ ‖M⁻¹‖`."""
        inner = self.inner.contraction(None if state is None else self.changed(state))
        return replace(inner, value=inner.value * torch.linalg.cond(self.matrix))

    def linearize(self, state: State) -> Linearization:
        return _AffineLinearization(self, self.inner.linearize(self.changed(state)))

    def gradient_map(self) -> tuple[Callable[[State], State], float]:
        return (self, 1.0) if self.proximal else super().gradient_map()

    def _shift_of(self, z: Tensor) -> Tensor:
        return self.shift.to(z.dtype).view(-1, *[1] * (z.dim() - 2))


class _AffineLinearization(Linearization):
    """`M⁻¹JM`. With `w = M⁻ᵀu` its adjoint equation is `w = M⁻ᵀg + Jᵀw`."""

    def __init__(self, equation: AffineEquation, inner: Linearization) -> None:
        self._inner, self._matrix, self._inverse = inner, equation.matrix, equation.inverse
        if inner.structure != "none":
            self.structure = "psd" if equation.proximal else "symmetrizable"

    @property
    def symmetric(self) -> SymmetricForm | None:
        form, matrix, inverse = self._inner.symmetric, self._matrix, self._inverse
        if form is None:
            return None
        return SymmetricForm(
            form.matvec,
            enter=lambda g: form.enter(apply_matrix(inverse.mT, g)),
            leave=lambda v, g: apply_matrix(matrix.mT, form.leave(v, apply_matrix(inverse.mT, g))),
            metric=form.metric,
        )

    def jvp(self, tangent: State) -> Tensor:
        return apply_matrix(self._inverse, self._inner.jvp(apply_matrix(self._matrix, tangent)))

    def vjp(self, cotangent: State) -> Tensor:
        return apply_matrix(self._matrix.mT, self._inner.vjp(apply_matrix(self._inverse.mT, cotangent)))

    def pullback(self, cotangent: State) -> Gradients:
        return self._inner.pullback(apply_matrix(self._inverse.mT, cotangent))


def apply_matrix(matrix: Tensor, state: State) -> Tensor:
    """`M z` on the channels of `(batch, m)` or `(batch, m, H, W)`."""
    assert isinstance(state, Tensor)
    matrix = matrix.to(state.dtype)
    if state.dim() == 2:
        return F.linear(state, matrix)
    return F.conv2d(state, matrix[:, :, None, None])
