"""Implicit differentiation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm
from opteq.errors import ConfigError
from opteq.gradients.base import AdjointMethod, Report
from opteq.native.rows import row_norms
from opteq.options import require, require_bounded_solve, strict_options
from opteq.results import SolveInfo, State, map_state, tensors_of
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import check_tolerance, solve_fixed_point
from opteq.solvers.linear import conjugate_gradients, gmres
from opteq.solvers.space import Space

_METHODS = ("auto", "cg", "anderson", "gmres")


@strict_options
@dataclass(frozen=True)
class Implicit(AdjointMethod):
    """The implicit function theorem: solve `u = g + Jᵀu`, then one vector-Jacobian product.

    Exact up to `tol`, with memory independent of the number of forward iterations. `method="auto"`
    takes conjugate gradients where the map has a symmetric form (one optimization-induced layer always
    does: Xie et al. 2022, `J = WᵀDW`), and Anderson acceleration on `u ↦ g + Jᵀu` elsewhere.

    Args:
        tol: relative residual of the adjoint equation at which a sample stops.
        max_steps: most products with the Jacobian.
        method: `"auto"`, `"cg"`, `"anderson"` or `"gmres"`.

    Raises:
        ConfigError: for `method="cg"` on a map without a symmetric form.
    """

    tol: float = 1e-4
    max_steps: int = 60
    method: str = "auto"

    def __post_init__(self) -> None:
        require_bounded_solve(self)
        require(self.method in _METHODS, self, "method", f"one of {', '.join(_METHODS)}")

    @property
    def error(self) -> float:
        return self.tol

    def pullback(self, equation: Equation, state: State, cotangent: State, report: Report) -> Gradients:
        linearization = equation.linearize(state)
        form = linearization.symmetric if self.method in ("auto", "cg") else None
        if self.method == "cg" and form is None:
            raise ConfigError(
                "This map has no symmetric form, which method='cg' needs; use 'auto' or 'gmres'."
            )
        if form is not None:
            v, info = self._solve_symmetric(form, state, cotangent)
            report(info)
            if form.pullback is not None:
                return form.pullback(v, cotangent)
            return linearization.pullback(form.leave(v, cotangent))
        adjoint, info = self._solve(linearization, state, cotangent, equation.batch_coupled)
        report(info.shared_by(len(tensors_of(state)[0])) if equation.batch_coupled else info)
        return linearization.pullback(adjoint)

    def _solve_symmetric(self, form: SymmetricForm, state: State, g: State) -> tuple[State, SolveInfo]:
        # The state's layout, whichever layout the cotangent arrives in, is the one the map is fast in.
        given = Space(state)
        g = given.arranged(g)
        right = form.enter(g)
        space = Space(right)

        def measure(v: Tensor) -> Tensor:
            assert form.metric is not None
            return space.flatten(form.metric(space.restore(v)))

        def residual_operator(v: Tensor, measured: Tensor | None = None) -> Tensor:
            argument = space.restore(v if measured is None else measured)
            image = form.matvec(argument)
            return space.subtract(v, image, overwrite=image is not argument)

        b = space.flatten(right)
        metric = None if form.metric is None else measure
        size = torch.stack([row_norms(part) for part in given.parts(g)]).norm(dim=0) if form.lifted else None
        options = (self.tol, self.max_steps, metric, form.follow, size)
        v, residual, info = conjugate_gradients(residual_operator, b, *options)
        # `b + S v`, a plain iteration more, is nearer to the solution than `v`, and here costs no product.
        return space.restore(v.add_(residual)), info

    def _solve(
        self, linearization: Linearization, state: State, g: State, joint: bool
    ) -> tuple[State, SolveInfo]:
        space = Space(state, joint)
        if self.method == "gmres":

            def adjoint_operator(u: Tensor) -> Tensor:
                return u - space.flatten(linearization.vjp(space.restore(u)))

            u, info = gmres(adjoint_operator, space.flatten(g), self.tol, self.max_steps)
            return space.restore(u), info
        check_tolerance(self.tol, tensors_of(g)[0].dtype, "gradient")
        solver = Anderson(self.tol, self.max_steps)
        start = space.restore(space.flatten(g))
        return solve_fixed_point(
            lambda u: map_state(Tensor.add, g, linearization.vjp(u)), start, solver, joint=joint
        )
