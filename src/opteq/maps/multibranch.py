"""Multi-branch OptEq: units that are coupled through the gradient of one objective."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, check_branches, expect_operator
from opteq.maps.kernel import KernelMap
from opteq.maps.kernelbranches import couple
from opteq.maps.optequnit import OptEqEquation, OptEqLinearization, OptEqUnit
from opteq.maps.parallel import ParallelEquation
from opteq.maps.similarity import SimilarityEquation
from opteq.objectives.coupling import Coupling, CouplingLinearization, HeritageDiversity, check_channels
from opteq.operators.base import LinearOperator
from opteq.options import check_flag, is_number
from opteq.results import Certificate, State, distance, map_state, tensors_of

_SWEEPS = ("jacobi", "gauss-seidel")
_DEFAULT = HeritageDiversity()
_Unit = OptEqUnit | KernelMap


class MOptEq(EquilibriumMap):
    """`z_i = W_iᵀσ(W_i h_i(z) + U_i g_i + b_i)`, `h = -½∇(λD_τ - H)` (Li et al. 2022, Proposition 1).

    Equilibria are stationary for the objective of the branches and their coupling (Li et al. 2022,
    Eq. 5), with `z_i = W_iᵀy_i`,

        G(y) = Σ_i 1ᵀf(y_i) + ½‖y_i‖² - ⟨c_i, y_i⟩ + ½(λD_τ(z) - H(z)).

    With `q = max_i L_σ‖W_i‖²(1 + λ(C-1)) < 1` it is strongly convex: there is one equilibrium, and
    conjugate gradients solve the adjoint equation. The `λ ≤ 1/C` of the paper is not enough for that.
    The first `bind` warns if `q` is not below 1.

    Perturbation enhanced training (§2.3): branch `i` reads `g_i = x - δ_{i-1}` with the perturbation
    `δ_i = ε sign(U_iᵀy_i)` that raises the objective of the branch before most, `δ_0 = 0`. Algorithm 2
    renews `δ` in every evaluation, whose jumps leave the map without a fixed point. Here it is taken
    before the solve, from the `y_i = σ(c_i)` of one evaluation without coupling, and constant from then
    on, also in the backward pass; nearly all of its signs are those at the equilibrium.

    Branches of different sizes: see `Parallel`; each `U_i` has the whole of `x` as its input.

    Branches may be kernel maps as well (Li et al. 2023, Table 5): `y_i = σ(k'(t_i) c_i + W_iᵀh_i(z))` with
    `t_i = ⟨c_i, y_i⟩/n_i` and `z_i = W_i y_i`, so that `W_i` is what the transpose is in a unit. In `G`,
    `n_i k(t_i)` replaces `⟨c_i, y_i⟩`, and `q = max_i L_σ(‖W_i‖²(1 + λ(C-1)) + sup|k''|‖c_i‖²/n_i)`.

    State and readout: `z`, a tuple with one `(batch, C, ...)` tensor per branch; with kernel maps the state
    is `y`.

    Args:
        units: the branches, all OptEq units or all kernel maps. Their `z_i` have the same channels `C`:
            those that `W` takes in a unit, and those that it produces in a kernel map.
        coupling: heritage and diversity; None for independent OptEq units.
        sweep: `"jacobi"`, all branches at once, or `"gauss-seidel"`, one after the other, each
            from the newest states (Algorithm 2). The equilibria and their implicit gradients are the same.
        perturbation: `ε ≥ 0`, in the units of `x`; needs opteq operators `U`.
        perturb_at_inference: perturb in eval mode as well, not only in training.

    Raises:
        ConfigError: for options out of range, branches of two kinds, kernel maps without a coupling, one
            branch or unequal channels with one, or a perturbation through a `U` that is no opteq operator.
    """

    def __init__(
        self,
        units: Sequence[OptEqUnit] | Sequence[KernelMap],
        coupling: HeritageDiversity | None = _DEFAULT,
        sweep: str = "jacobi",
        perturbation: float = 0.0,
        perturb_at_inference: bool = False,
    ) -> None:
        super().__init__()
        check_branches(units)
        if not any(all(isinstance(unit, kind) for unit in units) for kind in (OptEqUnit, KernelMap)):
            names = ", ".join(type(unit).__name__ for unit in units)
            raise ConfigError(f"Expected branches that are all OptEqUnit or all KernelMap, got {names}.")
        if sweep not in _SWEEPS:
            raise ConfigError(f"Expected `sweep` to be one of {', '.join(_SWEEPS)}, got {sweep!r}.")
        if not (is_number(perturbation) and perturbation >= 0):
            raise ConfigError(f"Expected `perturbation` to be a number of at least 0, got {perturbation!r}.")
        if coupling is not None:
            if not isinstance(coupling, HeritageDiversity):
                raise ConfigError(
                    f"Expected `coupling` to be HeritageDiversity(...) or None, got {coupling!r}."
                )
            check_channels([_channels(unit) for unit in units])
        elif isinstance(units[0], KernelMap):
            raise ConfigError(
                "Kernel maps without a coupling are independent; use Parallel instead of MOptEq."
            )
        if perturbation:
            for unit in units:
                expect_operator(unit.injection.operator, "U")
        # A ModuleList does not say what it holds.
        self.units: list[_Unit] = nn.ModuleList(units)  # type: ignore[assignment]
        self.coupling, self.sweep = coupling, sweep
        check_flag("perturb_at_inference", perturb_at_inference)
        self.perturbation, self.perturb_at_inference = float(perturbation), perturb_at_inference
        # Whether q < 1 is imposed by the ceilings of the units, or was looked at once.
        self.uniqueness_checked = self._strength([unit.max_norm or math.inf for unit in units]) < 1
        if coupling is not None and coupling.hard:
            warnings.warn(
                "With tau=0 the map jumps and in general has no fixed point: solves stall, near a residual of"
                " 1e-3 at weight=0.01 and 32 channels. Give the coupling a positive `tau` to converge.",
                RuntimeWarning,
                stacklevel=2,
            )

    def bind(self, x: State) -> Equation:
        branches = ParallelEquation(self._bind_units(x))
        if self.coupling is None:
            return branches
        first, sequential = branches.first_iterate(), self.sweep == "gauss-seidel"
        if not self.uniqueness_checked:
            self.check_uniqueness(first)
        if isinstance(self.units[0], KernelMap):
            return couple(branches, first, self.coupling, sequential)
        start = None if sequential else first
        return MultiBranchEquation(branches, self.coupling.at(first), sequential, start)

    def check_uniqueness(self, state: State) -> float:
        """`q` on states shaped like `state`, the ceilings applied; warns if it is not below 1.

        `bind` calls this once where the ceilings alone do not keep it there. Set `uniqueness_checked`
        to spare it.
        """
        self.uniqueness_checked = True
        norms = [
            unit.W.norm(tuple(z.shape[1:])).item()
            for unit, z in zip(self.units, tensors_of(state), strict=True)
        ]
        q = self._strength([unit.max_norm or math.inf for unit in self.units], norms)
        if q >= 1:
            assert self.coupling is not None
            kernel = " + |k''|‖c‖²/n" if isinstance(self.units[0], KernelMap) else ""
            cure = "`normalise`, a `max_norm` and a kernel of bounded curvature."
            if math.isfinite(q):
                cure = f"a `max_norm` below {self._largest_norm():.3g}, or the coupling a smaller `weight`."
            warnings.warn(
                f"L_σ(‖W‖²(1 + λ(C-1)){kernel}) = {q:.3g} is not below 1, with λ = {self.coupling.weight:g}"
                f" and C = {_channels(self.units[0])}: equilibria need not be unique, nor solves converge."
                f" Give the units {cure}",
                RuntimeWarning,
                stacklevel=3,
            )
        return q

    def _strength(self, ceilings: Sequence[float], norms: Sequence[float] | None = None) -> float:
        """The largest `q` that these ceilings allow, or the one for these norms of the `W_i` below them."""
        if self.coupling is None:
            return 0.0
        gain = self.coupling.gain(_channels(self.units[0]))
        parts = zip(self.units, ceilings, norms or [math.inf] * len(self.units), strict=True)
        return max(_strength_of(*part, gain) for part in parts)

    def _largest_norm(self) -> float:
        """The ceiling of all units at which `q` is 1."""
        return 1 / math.sqrt(self._strength([1.0] * len(self.units)))

    @property
    def perturbing(self) -> bool:
        """Whether `x` is perturbed in the present mode."""
        return self.perturbation > 0 and (self.training or self.perturb_at_inference)

    def _bind_units(self, x: State) -> tuple[OptEqEquation | SimilarityEquation, ...]:
        if not self.perturbing:
            return tuple(unit.bind(x) for unit in self.units)
        bound: list[OptEqEquation | SimilarityEquation] = []
        seen = x
        for unit in self.units:
            bound.append(unit.bind(seen))
            if len(bound) < len(self.units):
                assert isinstance(x, Tensor)
                seen = x - self._perturbation(unit, bound[-1])
        return tuple(bound)

    @torch.no_grad()
    def _perturbation(self, unit: _Unit, equation: OptEqEquation | SimilarityEquation) -> Tensor:
        operator = unit.injection.operator
        assert isinstance(operator, LinearOperator)
        if isinstance(equation, OptEqEquation):
            y = unit.activation(equation.injection)
        else:
            y = equation.first_iterate()
        return self.perturbation * operator.adjoint(y).sign()

    def extra_repr(self) -> str:
        return f"coupling={self.coupling}, sweep={self.sweep}, perturbation={self.perturbation}"


@dataclass(frozen=True, eq=False)
class MultiBranchEquation(Equation):
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
    start: tuple[Tensor, ...] | None = None

    @property
    def units(self) -> tuple[OptEqEquation, ...]:
        """The equations of the units."""
        return self.branches.branches  # type: ignore[return-value]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.branches.tensors, *self.coupling.tensors)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        count = len(self.branches.tensors)
        return replace(
            self,
            branches=self.branches.with_tensors(tensors[:count]),
            coupling=self.coupling.with_tensors(tensors[count:]),
            start=None,
        )

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

    def energy(self, state: State) -> Tensor:
        """`(batch,)` `G` at the feasible point `y_i = σ(W_i h_i(z) + c_i)`, each branch's part over `μ_i`.

        With `h = h(z)` and `p = T(z)`, Fenchel's equality turns `1ᵀf(y) + ½‖y‖² - ⟨c, y⟩` into
        `Q(h) - ½‖h‖² + ⟨h, p⟩` of the units' energies `Q`.
        """
        h = self.coupling.gradient(state)
        p = self.branches(h)
        total = self.branches.energy(h) + 0.5 * self.coupling.value(p)
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
        h = self.coupling.gradient(state)
        p = self.branches(h)
        moved = distance(h, self.coupling.gradient(p))
        value = distance(state, p) + units.value * moved / (1 - q)
        return replace(units, value=torch.where(q < 1, value, math.inf))

    def linearize(self, state: State) -> Linearization:
        return _MultiBranchLinearization(self, state)


class _MultiBranchLinearization(Linearization):
    """`J = S ∂h` with `S = diag(J_1, …, J_L)` of the units positive semidefinite and `∂h` symmetric."""

    structure = "symmetrizable"

    def __init__(self, equation: MultiBranchEquation, state: State) -> None:
        self._coupling = equation.coupling.linearize(state)
        self._units = equation.branches.linearize(self._coupling.gradient())

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


def _channels(unit: _Unit) -> int:
    """`C` of `z`."""
    return unit.W.in_channels if isinstance(unit, OptEqUnit) else unit.W.out_channels


def _strength_of(unit: _Unit, ceiling: float, norm: float, gain: float) -> float:
    """`q` of one branch with `‖W‖ = norm`, after a `max_norm` of `ceiling` has reduced it and the kernel."""
    slope = unit.activation.lipschitz
    if isinstance(unit, OptEqUnit):
        return slope * min(norm, ceiling) ** 2 * gain / unit.mu
    curvature = unit.curvature_bound(ceiling)
    return slope * (min(norm, math.sqrt(1 - unit.share) * ceiling) ** 2 * gain + curvature)
