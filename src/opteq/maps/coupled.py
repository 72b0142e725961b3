"""What maps of coupled branches share: sweeps, perturbations, and whether equilibria are unique."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from opteq.equation import Equation
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, check_branches, expect_operator
from opteq.maps.kernel import KernelMap
from opteq.maps.optequnit import OptEqUnit
from opteq.maps.watch import Watch
from opteq.objectives.coupling import HeritageDiversity, check_channels
from opteq.operators.base import LinearOperator
from opteq.options import check, check_choice, check_flag, check_kind, is_number
from opteq.results import State, tensors_of

_SWEEPS = ("jacobi", "gauss-seidel")

_DEFAULT = HeritageDiversity()

Unit = TypeVar("Unit", bound=OptEqUnit | KernelMap)


class CoupledMap(EquilibriumMap, Generic[Unit]):
    """Branches on one input that are coupled by heritage and diversity.

    Perturbation enhanced training (Li et al. 2022, §2.3): branch `i` reads `g_i = x - δ_{i-1}` with the
    perturbation `δ_i = ε sign(U_iᵀy_i)` that raises the objective of the branch before most, `δ_0 = 0`.
    Algorithm 2 renews `δ` in every evaluation, whose jumps leave the map without a fixed point. Here it is
    taken before the solve, from the `y_i` of one evaluation without coupling, and constant from then
    on, also in the backward pass; nearly all of its signs are those at the equilibrium.

    Args:
        units: the branches. Their `z_i` have the same channels `C`.
        coupling: heritage and diversity; None for independent branches, which may be perturbed all the same.
        sweep: `"jacobi"`, all branches at once, or `"gauss-seidel"`, one after the other, each
            from the newest states (Algorithm 2). The equilibria and their implicit gradients are the same.
        perturbation: `ε ≥ 0`, in the units of `x`; needs opteq operators `U`.
        perturb_at_inference: perturb in eval mode as well, not only in training.

    Raises:
        ConfigError: for options out of range, branches of another kind, one branch or unequal channels, or a
            perturbation through a `U` that is no opteq operator.
    """

    kind: ClassVar[type[OptEqUnit | KernelMap]]
    """What the branches are."""
    independent: ClassVar[bool] = True
    """Whether there may be no coupling."""
    curvature: ClassVar[str] = ""
    """What a kernel adds to the printed `q`."""

    def __init__(
        self,
        units: Sequence[Unit],
        coupling: HeritageDiversity | None = _DEFAULT,
        sweep: str = "jacobi",
        perturbation: float = 0.0,
        perturb_at_inference: bool = False,
    ) -> None:
        super().__init__()
        check_branches(units)
        if not all(isinstance(unit, self.kind) for unit in units):
            names = ", ".join(type(unit).__name__ for unit in units)
            raise ConfigError(
                f"Expected the branches of {type(self).__name__} to be {self.kind.__name__}s, got {names};"
                " MOptEq takes units, KernelMOptEq kernel maps."
            )
        check_choice("sweep", sweep, _SWEEPS)
        size = is_number(perturbation) and perturbation >= 0
        check(size, "perturbation", perturbation, "a number of at least 0")
        if coupling is None and not self.independent:
            raise ConfigError(
                "Kernel maps without a coupling are independent; use Parallel instead of KernelMOptEq."
            )
        if coupling is not None:
            check_kind(HeritageDiversity, "coupling", coupling, "HeritageDiversity(...) or None")
            check_channels([self.channels(unit) for unit in units])
        check_flag("perturb_at_inference", perturb_at_inference)
        if perturbation:
            for unit in units:
                expect_operator(unit.injection.operator, "U")
        # A ModuleList does not say what it holds.
        self.units: list[Unit] = nn.ModuleList(units)  # type: ignore[assignment]
        self.coupling, self.sweep = coupling, sweep
        self.perturbation, self.perturb_at_inference = float(perturbation), perturb_at_inference
        # Whether no one need look at a `q` that is not imposed to be below 1.
        self.uniqueness_checked = False
        self._watch = Watch()
        if coupling is not None and coupling.hard:
            warnings.warn(
                "With tau=0 the map jumps and in general has no fixed point: solves stall, near a residual of"
                " 1e-3 at weight=0.01 and 32 channels. Give the coupling a positive `tau` to converge.",
                RuntimeWarning,
                stacklevel=2,
            )

    @staticmethod
    @abstractmethod
    def channels(unit: Unit) -> int:
        """`C` of the `z` of a branch."""

    @abstractmethod
    def ceiling(self, unit: Unit, max_norm: float | None) -> float | None:
        """What a branch asks of its `W` under a `max_norm`."""

    @abstractmethod
    def strength(self, unit: Unit, norm: float, max_norm: float | None) -> float:
        """`q` of a branch with `‖W‖ = norm`, and the kernel as a `max_norm` reduces it."""

    @property
    def sequential(self) -> bool:
        """Whether an evaluation goes through the branches one after the other."""
        return self.sweep == "gauss-seidel"

    @property
    def gain(self) -> float:
        """`1 + λ(C-1)`; 0 without a coupling."""
        return 0.0 if self.coupling is None else self.coupling.gain(self.channels(self.units[0]))

    @property
    def kept_unique(self) -> bool:
        """Whether the ceilings of the units impose `q < 1`, whatever their weights come to be."""
        kept = [unit.W.kept_norm(self.ceiling(unit, unit.max_norm)) for unit in self.units]
        return self._strength(kept) < 1

    @property
    def perturbing(self) -> bool:
        """Whether `x` is perturbed in the present mode."""
        return self.perturbation > 0 and (self.training or self.perturb_at_inference)

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        if self.perturbing:
            raise ConfigError(
                "Perturbations follow signs, which jump: no Lipschitz bound holds; call eval() first, and"
                " leave out `perturb_at_inference`."
            )
        return tuple(operator for unit in self.units for operator in unit.injections)

    def bind(self, x: State, error: float = 0.0) -> Equation:
        return self.coupled(*self._bind_units(x, error), error)

    @abstractmethod
    def coupled(self, units: list[Equation], first: tuple[Tensor, ...], error: float) -> Equation:
        """The equation of bound branches.

        Args:
            units: the equations of the branches.
            first: the first iterate of each.
            error: that is allowed to products, see `bind`.
        """

    def _bind_units(self, x: State, error: float) -> tuple[list[Equation], tuple[Tensor, ...]]:
        """The equations of the branches, the input perturbed in between, and the first iterate of each."""
        bound: list[Equation] = []
        seen = x
        for unit in self.units:
            bound.append(unit.bind(seen, error))
            if self.perturbing and len(bound) < len(self.units):
                assert isinstance(x, Tensor)
                seen = x - self._perturbation(unit, bound[-1], x)
        first = tuple(t for equation in bound for t in tensors_of(equation.first_iterate()))
        # Asked anew each time: units and coupling may have been assigned since.
        looked_at = not (self.uniqueness_checked or self.kept_unique)
        if looked_at and self._watch.notices(self.training, lambda: self._q(first) >= 1):
            self.check_uniqueness(first)
        return bound, first

    def check_uniqueness(self, state: State) -> float:
        """`q` on states shaped like `state`, the ceilings applied; warns if it is not below 1.

        `bind` calls this where the ceilings alone do not keep it there and it no longer is. It looks at it in
        eval mode and every twentieth time in training. Set `uniqueness_checked` to spare that.
        """
        q = self._q(state)
        if q >= 1:
            assert self.coupling is not None
            cure = "`normalise`, a `max_norm` and a kernel of bounded curvature."
            if math.isfinite(q):
                # Where all of them have a `max_norm` of ζ and reach it, q grows with ζ².
                ones = [self.strength(unit, self.ceiling(unit, 1.0) or 1.0, 1.0) for unit in self.units]
                largest = 1 / math.sqrt(max(ones))
                cure = f"a `max_norm` below {largest:.3g}, or the coupling a smaller `weight`."
            warnings.warn(
                f"L_σ(‖W‖²(1 + λ(C-1)){self.curvature}) = {q:.3g} is not below 1, with"
                f" λ = {self.coupling.weight:g} and C = {self.channels(self.units[0])}: equilibria need not"
                f" be unique, nor solves converge. Give the units {cure}",
                RuntimeWarning,
                stacklevel=4,
            )
        return q

    def _q(self, state: State) -> float:
        pairs = zip(self.units, tensors_of(state), strict=True)
        norms = [unit.W.norm(tuple(z.shape[1:]), self.ceiling(unit, unit.max_norm)) for unit, z in pairs]
        return self._strength([norm.item() for norm in norms])

    @abstractmethod
    def hidden(self, unit: Unit, equation: Equation) -> Tensor:
        """`y` of one branch after an evaluation without coupling."""

    @torch.no_grad()
    def _perturbation(self, unit: Unit, equation: Equation, x: Tensor) -> Tensor:
        operator = unit.injection.operator
        assert isinstance(operator, LinearOperator)
        y = self.hidden(unit, equation)
        return self.perturbation * operator.bind(tuple(x.shape[1:])).adjoint(y).sign()

    def _strength(self, norms: Sequence[float]) -> float:
        """`q` for these norms of the `W_i`."""
        pairs = zip(self.units, norms, strict=True)
        return max(self.strength(unit, norm, unit.max_norm) for unit, norm in pairs)

    def extra_repr(self) -> str:
        return f"coupling={self.coupling}, sweep={self.sweep}, perturbation={self.perturbation}"
