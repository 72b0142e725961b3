"""Multi-branch OptEq: units that are coupled through the gradient of one objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from opteq.equation import (
    AutogradLinearization,
    Equation,
    Gradients,
    Linearization,
    SymmetricForm,
    largest_eigenvalue,
    room,
)
from opteq.maps.coupled import CoupledMap
from opteq.maps.hiddenvariable import HiddenVariable
from opteq.maps.optequnit import OptEqEquation, OptEqLinearization, OptEqUnit
from opteq.maps.parallel import ParallelEquation
from opteq.objectives.coupling import Coupling, CouplingLinearization
from opteq.results import Certificate, State, distance, map_state, tensors_of
from opteq.tensors.held import CONSTANT


class MOptEq(CoupledMap[OptEqUnit]):
    """`z_i = W_iᵀσ(W_i h_i(z) + U_i g_i + b_i)`, `h = -½∇(λD_τ - H)` (Li et al. 2022, Proposition 1).

    Equilibria are stationary for the objective of the branches and their coupling (Li et al. 2022,
    Eq. 5), with `z_i = W_iᵀy_i`,

        G(y) = Σ_i 1ᵀf(y_i) + ½‖y_i‖² - ⟨c_i, y_i⟩ + ½(λD_τ(z) - H(z)).

    With `q = max_i L_σ‖W_i‖²(1 + λ(C-1)) < 1` it is strongly convex: there is one equilibrium, and
    conjugate gradients solve the adjoint equation. The `λ ≤ 1/C` of the paper is not enough for that.
    The first `bind` warns if `q` is not below 1.

    Branches of different sizes: see `Parallel`; each `U_i` has the whole of `x` as its input. Options and
    perturbations: see `CoupledMap`. Independent units are a `Parallel`.

    State and readout: `z`, a tuple with one `(batch, C, ...)` tensor per branch.
    """

    kind = OptEqUnit

    def coupled(self, units: list[Equation], first: tuple[Tensor, ...], error: float) -> Equation:
        branches = ParallelEquation(tuple(units))
        if self.coupling is None:
            return branches
        start = None if self.sequential else first
        return MultiBranchEquation(branches, self.coupling.at(first, error), self.sequential, start)

    @staticmethod
    def channels(unit: OptEqUnit) -> int:
        return unit.W.in_channels

    def ceiling(self, unit: OptEqUnit, max_norm: float | None) -> float | None:
        return max_norm

    def strength(self, unit: OptEqUnit, norm: float, max_norm: float | None) -> float:
        return unit.activation.lipschitz * norm**2 * self.gain / unit.mu

    def hidden(self, unit: OptEqUnit, equation: Equation) -> Tensor:
        assert isinstance(equation, OptEqEquation)
        return unit.activation(equation.injection)


@dataclass(frozen=True, eq=False)
class MultiBranchEquation(HiddenVariable):
    """`z_i = T_i(h_i(z))` for the units `T_i` of one batch.

    Attributes:
        branches: the units.
        coupling: what gives `h`.
        sequential: whether an evaluation goes through the branches one after the other. Linearization
            and contraction are those of the simultaneous map all the same: its equilibria are the same
            functions of the input, hence so are their implicit gradients.
        start: the first iterate where it is known, as `bind` computes it for the coupling.
    """

    branches: ParallelEquation
    coupling: Coupling
    sequential: bool = False
    start: tuple[Tensor, ...] | None = field(default=None, metadata=CONSTANT)

    @property
    def units(self) -> tuple[OptEqEquation, ...]:
        """The equations of the units."""
        return self.branches.branches  # type: ignore[return-value]

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return replace(super().with_tensors(tensors), start=None)

    def detach(self) -> Self:
        start = None if self.start is None else tuple(t.detach() for t in self.start)
        return replace(super().detach(), start=start)

    def initial(self) -> tuple[Tensor, ...]:
        return self.branches.initial()

    def first_iterate(self) -> tuple[Tensor, ...]:
        # h(0) = 0.
        if self.start is not None:
            return self.start
        return self(self.initial()) if self.sequential else self.branches.first_iterate()

    def __call__(self, state: State) -> tuple[Tensor, ...]:
        if not self.sequential:
            return self.branches(self.coupling.gradient(state))
        newest = list(tensors_of(state))
        for i, branch in enumerate(self.branches.branches):
            image = branch(self.coupling.gradient_of(i, tuple(newest)))
            assert isinstance(image, Tensor)
            newest[i] = image
        return tuple(newest)

    @property
    def objective(self) -> Callable[[State], Tensor]:
        """`G` at the feasible point `y_i = σ(W_i h_i(z) + c_i)`, each branch's part over `μ_i`.

        With `h = h(z)` and `p = T(z)`, Fenchel's equality turns `1ᵀf(y) + ½‖y‖² - ⟨c, y⟩` into
        `Q(h) - ½‖h‖² + ⟨h, p⟩` of the units' objectives `Q`.
        """
        return self._at_image

    def _at_image(self, state: State) -> Tensor:
        h = self.coupling.gradient(state)
        p = self.branches(h)
        assert self.branches.objective is not None
        total = self.branches.objective(h) + 0.5 * self.coupling.value(p)
        for a, b in zip(h, p, strict=True):
            total = total + (a * (b - 0.5 * a)).flatten(1).sum(1)
        return total

    def contraction(self, state: State | None = None) -> Certificate:
        """The units' bound times that of `∂h`; infinite everywhere with `D_τ`, see `uniqueness`."""
        units = self.branches.contraction()
        bound = units.value * self.coupling.jacobian_bound(state)
        # Not 0 · ∞ of units whose W vanishes.
        return replace(units, value=torch.where(units.value > 0, bound, 0.0))

    def uniqueness(self) -> Certificate:
        """`(batch,)` `q = max_i L_σ‖W_i‖²/μ_i · (1 + λ(C-1))`.

        Below 1, `G` is strongly convex with modulus at least `1 - q`: there is one minimiser. It is the
        equilibrium, with `D_τ`; with the hard sign there need not be one.
        """
        units = self.branches.contraction()
        return replace(units, value=units.value * self.coupling.gain)

    def distance_bound(self, state: State) -> Certificate:
        """`(batch,)` bound on `‖z - z*‖`, infinite unless `q < 1`.

        Let `r = max_i L_σ‖W_i‖²/μ_i` and `p = T(z)`. In the variables `y_i/√(μ_iL_σ)` the modulus of `G` is
        `1 - q`, and at the `y` behind `p` it has a subgradient no longer than `√r‖h(z) - h(p)‖`. Hence
        `‖z - z*‖ ≤ ‖z - p‖ + r‖h(z) - h(p)‖/(1 - q)`.
        """
        units, q = self.branches.contraction(), self.uniqueness().value
        p, moved = self._moved(state)
        value = distance(state, p) + units.value * moved / (1 - q)
        return replace(units, value=torch.where(q < 1, value, math.inf))

    def hidden(self, state: State) -> tuple[Tensor, ...]:
        """`y_i = σ(W_i h_i(z) + c_i)`."""
        return self.branches.hidden(self.coupling.gradient(state))

    def hidden_distance_bound(self, state: State) -> Certificate:
        """`(batch,)` `s√r‖h(z) - h(p)‖/(1 - q)`, `s² = max_i μ_iL_σ`, by way of `distance_bound`."""
        units, q = self.branches.contraction(), self.uniqueness().value
        moved = self._moved(state)[1]
        value = self._largest_scale * units.value.sqrt() * moved / (1 - q)
        return replace(units, value=torch.where(q < 1, value, math.inf))

    def hidden_lipschitz(self, pushes: Iterator[float]) -> float:
        """`s p (1 + 2rλ(C-1)/(1 - q)) / (1 - q)`, `s² = max_i μ_iL_σ`: there `dy = diag(μ_i^½D_i^½) v`."""
        return self._largest_scale * self._lifted_lipschitz(pushes)

    @property
    def _largest_scale(self) -> float:
        return math.sqrt(max(unit.mu * unit.activation.lipschitz for unit in self.units))

    def _moved(self, state: State) -> tuple[tuple[Tensor, ...], Tensor]:
        """`p = T(z)` and `‖h(z) - h(p)‖`."""
        h = self.coupling.gradient(state)
        p = self.branches(h)
        return p, distance(h, self.coupling.gradient(p))

    def curvature(self, state: State | None = None) -> Certificate:
        """The largest eigenvalue of `B ∂h Bᵀ`, `B = diag(√(L_σ/μ_i) W_i)`, everywhere at most `q`.

        In the variables `y_i/√(μ_iL_σ)` the convex rest of `G` has a modulus of at least 1.
        """
        self.coupling.expect_smooth()
        if state is None:
            return self.uniqueness()
        coupling = self.coupling.linearize(state)
        scales = [math.sqrt(unit.activation.lipschitz / unit.mu) for unit in self.units]

        def product(hidden: State) -> State:
            parts = zip(self.units, scales, tensors_of(hidden), strict=True)
            pooled = tuple(scale * unit.W.adjoint(v) for unit, scale, v in parts)
            moved = zip(self.units, scales, coupling.product(pooled), strict=True)
            return tuple(scale * unit.W(h) for unit, scale, h in moved)

        return largest_eigenvalue(product, tuple(unit.injection for unit in self.units))

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        """`√r p (1 + 2rλ(C-1)/(1 - q)) / (1 - q)`, `p² = Σ_i L_σ‖U_i‖²/μ_i`, `r = max_i L_σ‖W_i‖²/μ_i`.

        With `B = diag(μ_i^{-½}D_i^½W_i)`, `‖B‖² ≤ r`, and the width `t` of `D_τ` held, `dz = Bᵀv` with
        `(I - B ∂h Bᵀ)v = diag(μ_i^{-½}D_i^½) dc`. There `B ∂h Bᵀ ⪯ gBBᵀ ⪯ qI`, whence `√r p / (1 - q)`:
        attained by equal branches with heritage alone, all units active. But `t = τ·mean ‖z⁰_i‖²`,
        `z⁰ = T(0)`, moves with `x`, and `h` with it, at most by `λ(C-1)‖z‖·|dt|/t`, because of `|N_kl| ≤ t`
        where it does. With `|dt|/t ≤ 2‖dz⁰‖/‖z⁰‖`, `‖dz⁰‖ ≤ √r p‖dx‖` and `‖z‖ ≤ ‖z⁰‖/(1 - q)`, which is
        `distance_bound` at 0, both `t` and `τ` cancel. What is left enters as `dc` does, behind a `B`.
        """
        pull = self.branches.contraction().value.max().item()
        return math.sqrt(pull) * self._lifted_lipschitz(pushes)

    def _lifted_lipschitz(self, pushes: Iterator[float]) -> float:
        """A bound on `‖v‖/‖dx‖` for the `v` of `equilibrium_lipschitz`."""
        self.coupling.expect_smooth()
        push = math.hypot(
            *(math.sqrt(u.activation.lipschitz / u.mu) * p for u, p in zip(self.units, pushes, strict=True))
        )
        pull = self.branches.contraction().value.max().item()
        left = room(self.uniqueness().value.max().item())
        # What the width adds: nothing without a D_τ.
        drift = pull * (self.coupling.gain - self.coupling.options.heritage) if self.coupling.tensors else 0.0
        return push * (1 + 2 * drift / left) / left

    def linearize(self, state: State) -> Linearization:
        return _MultiBranchLinearization(self, state)

    def linearize_evaluation(self, state: State) -> Linearization:
        return AutogradLinearization(self, state) if self.sequential else self.linearize(state)


class _MultiBranchLinearization(Linearization):
    """`J = S ∂h` with `S = diag(J_1, …, J_L)` of the units positive semidefinite and `∂h` symmetric."""

    def __init__(self, equation: MultiBranchEquation, state: State) -> None:
        self._coupling = equation.coupling.linearize(state)
        self._units = equation.branches.linearize(self._coupling.gradient())

    @property
    def image(self) -> State:
        return self._units.image

    @property
    def symmetric(self) -> SymmetricForm | None:
        units: list[OptEqLinearization] = self._units.parts  # type: ignore[assignment]
        return _HiddenAdjoint(units, self._coupling).form()

    def jvp(self, tangent: State) -> State:
        return self._units.jvp(self._coupling.product(tangent))

    def vjp(self, cotangent: State) -> State:
        return self._coupling.product(self._units.vjp(cotangent))

    def pullback(self, cotangent: State) -> Gradients:
        gradients, received = self._units.pullback_and_vjp(cotangent)
        return gradients + self._coupling.pullback(received)


class _HiddenAdjoint:
    """The adjoint equation of coupled branches in their hidden variables, for one solve.

    With `S = FᵀF` branch by branch, `u = g + ∂h S u` reads `q = F g + F ∂h Fᵀ q` for `q = F u`, and
    `u = g + ∂h Fᵀ q`. Conjugate gradients take the steps that they take for `u` in the metric `S`, on
    smaller vectors. `∂h Fᵀ q` and the gradients of `⟨S u, h⟩` are sums of what was made of their steps.
    """

    def __init__(self, units: Sequence[OptEqLinearization], coupling: CouplingLinearization) -> None:
        self._units, self._coupling = units, coupling
        # ∂h Fᵀ p of the last product and the gradients of ⟨Fᵀ p, h⟩; the same for q.
        self._step: tuple[Tensor, ...] = ()
        self._sum: tuple[Tensor, ...] | None = None

    def form(self) -> SymmetricForm:
        return SymmetricForm(self.matvec, self.lift, self.leave, self.pullback, self.follow, lifted=True)

    def lift(self, u: State) -> tuple[Tensor, ...]:
        return tuple(unit.lift(t) for unit, t in zip(self._units, tensors_of(u), strict=True))

    def lower(self, q: State) -> tuple[Tensor, ...]:
        return tuple(unit.lower(t) for unit, t in zip(self._units, tensors_of(q), strict=True))

    def matvec(self, q: State) -> tuple[Tensor, ...]:
        self._step = self._along(q)
        return self.lift(self._step[: len(self._units)])

    def follow(self, lengths: Tensor) -> None:
        parts = [(lengths.to(t.dtype).view(-1, *[1] * (t.dim() - 1)), t) for t in self._step]
        if self._sum is None:
            self._sum = tuple(t.mul_(length) for length, t in parts)
        else:
            self._sum = tuple(s.addcmul_(*part) for s, part in zip(self._sum, parts, strict=True))

    def leave(self, q: State, g: State) -> State:
        return map_state(torch.add, g, self._coupling.product(self.lower(q)))

    def pullback(self, q: State, g: State) -> Gradients:
        # The sum is used up.
        along, self._sum = self._sum or self._along(q), None
        moved, gradients = along[: len(self._units)], along[len(self._units) :]
        u = tensors_of(map_state(Tensor.add_, moved, g))
        rows = zip(self._units, u, tensors_of(q), strict=True)
        return tuple(t for unit, *known in rows for t in unit.pullback_lifted(*known)) + gradients

    def _along(self, q: State) -> tuple[Tensor, ...]:
        moved, gradients = self._coupling.product_and_pullback(self.lower(q))
        return (*moved, *(t for t in gradients if t is not None))
