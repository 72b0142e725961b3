"""Maps whose hidden objective has a regulariser added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from opteq.equation import AutogradLinearization, Equation, Gradients, Linearization
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, bind_single, expect_map
from opteq.maps.chain import ChainEquation
from opteq.maps.hiddenvariable import HiddenReadoutEquation
from opteq.maps.skip import SkipEquation
from opteq.objectives.batch_regularisers import BatchRegulariser
from opteq.objectives.regularisers import Regulariser
from opteq.options import check_choice, check_kind, check_positive
from opteq.results import Certificate, State, squared_norm
from opteq.tensors.held import CONSTANT

_FORMS = ("gradient", "prox")


class Regularised(EquilibriumMap):
    """`z = T(T_R(z))`, a regulariser `R` in the hidden objective (Xie et al. 2022, Theorem 4 and §5.1).

    For one unit, `T = prox_φ`, and convex `R`:

    - gradient form, `T_R = I - γ∇R` with `γ < 2/L_R`: the equilibrium minimises `φ + γR`;
    - prox form, `T_R = prox_{γR}`: it minimises `φ + M¹_{γR}`, the Moreau envelope of `γR`
      (Huber's function for `‖·‖₁`), not `φ + γR` as printed.

    For a deep map the regularised step comes before the first unit. Batch-coupled regularisers compare
    the samples of the batch in training, and each sample with the last training batch in eval mode.

    Args:
        map: the map `T`.
        regulariser: `R`.
        gamma: `γ > 0`. For batch-coupled regularisers no limit is known beforehand: start small, at 1e-3 for
            `Decorrelation` and batches of 64, and watch the convergence.
        form: `"gradient"`, or `"prox"` for regularisers that have one.

    Raises:
        ConfigError: for an unknown form, a prox that does not exist, or `γ ≥ 2/L_R`; when bound, for a `map`
            whose state has several branches, or that is a `HiddenReadout`.
    """

    def __init__(
        self, map: EquilibriumMap, regulariser: Regulariser, gamma: float, form: str = "gradient"
    ) -> None:
        super().__init__()
        expect_map(map)
        check_kind(Regulariser, "regulariser", regulariser, "one such as SquaredNorm()")
        check_positive("gamma", gamma)
        check_choice("form", form, _FORMS)
        if form == "prox":
            regulariser.prox(torch.zeros(1, 1), gamma)  # refuses where there is none
        elif regulariser.convex:
            _check_step(regulariser, gamma)
        self.map, self.regulariser = map, regulariser
        self.gamma, self.form = float(gamma), form

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return self.map.injections

    def bind(self, x: State, error: float = 0.0) -> ChainEquation:
        inner, start = bind_single(self.map, x, error)
        read = inner
        while isinstance(read, SkipEquation):
            read = read.inner
        if isinstance(read, HiddenReadoutEquation):
            raise ConfigError(
                "The hidden variable is that of the regularised equilibrium: give Regularised the map in"
                " HiddenReadout, and put HiddenReadout round the whole."
            )
        step = StepEquation(self.regulariser, self.gamma, self.form, start)
        return ChainEquation((step, inner), inner.start if isinstance(inner, ChainEquation) else None)

    def extra_repr(self) -> str:
        return f"{self.regulariser}, gamma={self.gamma}, form={self.form}"


def _check_step(regulariser: Regulariser, gamma: float) -> None:
    """Refuse a gradient step on a convex `R` that does not come closer to its minimum."""
    constant = regulariser.lipschitz
    if constant is None:
        raise ConfigError(f"The gradient of {regulariser} has no Lipschitz constant; use form='prox'.")
    if gamma * constant >= 2:
        raise ConfigError(
            f"Expected `gamma` below 2/L = {2 / constant:g} for {regulariser}, got {gamma};"
            " lower it or use form='prox'."
        )


@dataclass(frozen=True, eq=False)
class StepEquation(Equation[Tensor]):
    """`T_R`, a gradient or proximal step on `γR`, as a map of its own."""

    regulariser: Regulariser
    gamma: float
    form: str
    zero: Tensor = field(metadata=CONSTANT)

    @property
    def structure(self) -> str:
        return "none" if self.regulariser.batch_coupled else "conservative"

    @property
    def batch_coupled(self) -> bool:
        # In eval mode the samples are compared with a reference, not with each other.
        regulariser = self.regulariser
        return isinstance(regulariser, BatchRegulariser) and regulariser.training

    def initial(self) -> Tensor:
        return self.zero

    def __call__(self, state: Tensor) -> Tensor:
        if self.form == "prox":
            return self.regulariser.prox(state, self.gamma)
        return state - self.gamma * self.regulariser.gradient(state)

    @property
    def objective(self) -> Callable[[Tensor], Tensor] | None:
        """`γR(z)`, or `M¹_{γR}(z) = γR(p) + ½‖z - p‖²` at `p = prox_{γR}(z)`; gradient `z - T_R(z)`."""
        return None if self.regulariser.batch_coupled else self._added

    def _added(self, state: Tensor) -> Tensor:
        if self.form == "gradient":
            return self.gamma * self.regulariser.value(state)
        p = self(state)
        return self.gamma * self.regulariser.value(p) + 0.5 * squared_norm(state - p)

    def contraction(self, state: Tensor | None = None) -> Certificate:
        """The Lipschitz constant of the step, from the bounds on the curvature of `R`."""
        curvature, kind, assumptions = self.regulariser.curvature, "bound", ()
        if curvature is None:
            curvature, kind = (0.0, 0.0), "estimate"
            assumptions = (f"The curvature of {self.regulariser} is not bounded and was left out.",)
        low, high = curvature
        if self.form == "prox":
            value = 1 / (1 + self.gamma * low)
        else:
            value = max(abs(1 - self.gamma * low), abs(1 - self.gamma * high))
        # In float64, for which the rounding of float32 could turn a bound into less.
        values = self.zero.new_full((len(self.zero),), value, dtype=torch.float64)
        return Certificate(values, kind, assumptions)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        bound = self.contraction()
        if bound.kind == "estimate":
            raise ConfigError(f"No Lipschitz bound is known: {bound.assumptions[0]}")
        return 0.0, bound.value.max().item()

    def linearize(self, state: Tensor) -> Linearization[Tensor]:
        return _StepLinearization(self, state)


class _StepLinearization(AutogradLinearization[Tensor]):
    """`I - γ∇²R`, or the derivative of the prox: symmetric."""

    def jvp(self, tangent: Tensor) -> Tensor:
        return self.vjp(tangent)

    def pullback(self, cotangent: Tensor) -> Gradients:
        return ()
