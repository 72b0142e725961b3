"""Coupled branches with kernels of an inner product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from opteq.activations import Activation
from opteq.equation import (
    AutogradLinearization,
    Equation,
    Gradients,
    Linearization,
    SymmetricForm,
    largest_eigenvalue,
    symmetrized,
)
from opteq.errors import ConfigError
from opteq.maps.coupled import CoupledMap
from opteq.maps.kernel import KernelMap
from opteq.maps.similarityequation import SimilarityEquation
from opteq.objectives.coupling import Coupling
from opteq.objectives.inner_product import InnerProductLinearization, InnerProductSimilarity
from opteq.results import Certificate, State, combined, distance, tensors_of
from opteq.tensors.slopes import Slopes


class KernelMOptEq(CoupledMap[KernelMap]):
    """`y_i = σ(k'(t_i) c_i + W_iᵀh_i(z))`, `z_i = W_i y_i`: `MOptEq` with kernels (Li et al. 2023, Table 5).

    `t_i = ⟨c_i, y_i⟩/n_i` and `c_i = U_i g_i + b_i`. `W_i` is what the transpose is in a unit. In the `G` of
    `MOptEq`, `n_i k(t_i)` replaces `⟨c_i, y_i⟩`, and `q = max_i L_σ(‖W_i‖²(1 + λ(C-1)) +
    sup|k''|‖c_i‖²/n_i)`.

    Options and perturbations: see `CoupledMap`. Independent kernel maps are a `Parallel`.

    State: `y`, since the kernels see it. Readout: `z`, a tuple with one `(batch, C, ...)` tensor per branch.
    """

    kind = KernelMap
    independent = False
    curvature = " + |k''|‖c‖²/n"

    def coupled(self, units: list[Equation], first: tuple[Tensor, ...], error: float) -> Equation:
        similarities, activations = [], []
        for unit in units:
            assert isinstance(unit, SimilarityEquation)
            assert isinstance(unit.similarity, InnerProductSimilarity)
            similarities.append(unit.similarity)
            activations.append(unit.activation)
        assert self.coupling is not None
        coupling = self.coupling.at(_lift(similarities, first), error)
        return KernelBranchesEquation(tuple(similarities), tuple(activations), coupling, self.sequential)

    @staticmethod
    def channels(unit: KernelMap) -> int:
        return unit.W.out_channels

    def ceiling(self, unit: KernelMap, max_norm: float | None) -> float | None:
        return unit.ceiling(max_norm)

    def strength(self, unit: KernelMap, norm: float, max_norm: float | None) -> float:
        return unit.activation.lipschitz * (norm**2 * self.gain + unit.curvature_bound(max_norm))

    def hidden(self, unit: KernelMap, equation: Equation) -> Tensor:
        y = equation.first_iterate()
        assert isinstance(y, Tensor)
        return y


@dataclass(frozen=True, eq=False)
class KernelBranchesEquation(Equation):
    """`y_i = σ(k'(t_i) c_i + W_iᵀh_i(z))`, `z_i = W_i y_i`, `t_i = ⟨c_i, y_i⟩/n_i`, for one batch.

    The coupling `½(λD_τ - H)` of the `z` takes the place of the `-½‖W_i y_i‖²` of independent branches:
    equilibria are stationary for

        G(y) = Σ_i 1ᵀf(y_i) + ½‖y_i‖² - n_i k(t_i) + ½(λD_τ(z) - H(z)),

    and the only minimiser where `uniqueness` is below 1.

    State: `y`, since the kernels see it. Readout: `z`, which has the same channels in every branch.

    Attributes:
        similarities: `n_i k(t_i) + ½‖W_i y_i‖²` of every branch.
        activations: `σ` of every branch.
        coupling: what gives `h`.
        sequential: whether an evaluation goes through the branches one after the other. Linearization
            and contraction are those of the simultaneous map all the same, see `MultiBranchEquation`.
    """

    similarities: tuple[InnerProductSimilarity, ...]
    activations: tuple[Activation, ...]
    coupling: Coupling
    sequential: bool = False

    def initial(self) -> tuple[Tensor, ...]:
        return tuple(similarity.initial() for similarity in self.similarities)

    def first_iterate(self) -> tuple[Tensor, ...]:
        # h(0) = 0.
        if self.sequential:
            return self(self.initial())
        return self._activated(tuple(similarity.initial_gradient() for similarity in self.similarities))

    def readout(self, state: State) -> tuple[Tensor, ...]:
        return _lift(self.similarities, state)

    def __call__(self, state: State) -> tuple[Tensor, ...]:
        if not self.sequential:
            return self._activated(self._arguments(state))
        y, z = tensors_of(state), list(self.readout(state))
        images = []
        for i, (similarity, activation) in enumerate(zip(self.similarities, self.activations, strict=True)):
            message = self.coupling.gradient_of(i, tuple(z))
            images.append(activation(similarity.respond(y[i], message)))
            z[i] = similarity.lift(images[i])
        return tuple(images)

    @property
    def objective(self) -> Callable[[State], Tensor]:
        """`G` at the feasible point `T(y)`: `y` itself may lie where the penalty is infinite."""
        return self._at_image

    def _at_image(self, state: State) -> Tensor:
        feasible = replace(self, sequential=False)(state)
        total = 0.5 * self.coupling.value(self.readout(feasible))
        for similarity, activation, y in zip(self.similarities, self.activations, feasible, strict=True):
            terms = activation.penalty(y) + 0.5 * y.square()
            total = total + terms.flatten(1).sum(1) - similarity.kernel_value(y)
        return total

    def contraction(self, state: State | None = None) -> Certificate:
        """`L_σ max_i (|k''(t_i)|‖c_i‖²/n_i + ‖W_i‖²‖∂h‖)`: everywhere, or at a state.

        Infinite everywhere with `D_τ`, as the bound on `‖∂h‖` is; see `uniqueness`.
        """
        pull = self.coupling.jacobian_bound(None if state is None else self.readout(state))
        return self._bound(pull, state)

    def uniqueness(self) -> Certificate:
        """`(batch,)` `q = L_σ max_i (sup|k''|‖c_i‖²/n_i + ‖W_i‖²(1 + λ(C-1)))`.

        `1ᵀf + ½‖·‖²` has modulus `1/L_σ`, so below 1 `G` is strongly convex: there is one minimiser. It is
        the equilibrium, with `D_τ`; with the hard sign there need not be one.
        """
        return self._bound(self.coupling.gain, None)

    @property
    def lipschitz(self) -> float:
        """`L_σ`, the largest of the branches."""
        return max(activation.lipschitz for activation in self.activations)

    def curvature(self, state: State | None = None) -> Certificate:
        """`L_σ` times the largest eigenvalue of the `H` of `J = D H`, everywhere at most `q`."""
        self.coupling.expect_smooth()
        if state is None:
            return self.uniqueness()
        here = largest_eigenvalue(self.linearize(state).hessian, state)
        return replace(here, value=self.lipschitz * here.value)

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        raise ConfigError(
            "No Lipschitz bound is known for coupled kernel maps: the width of D_τ is that of the first W y,"
            " which may vanish where the later ones do not; couple OptEqUnits instead."
        )

    def linearize(self, state: State) -> KernelBranchesLinearization:
        return KernelBranchesLinearization(self, state)

    def linearize_evaluation(self, state: State) -> Linearization:
        return AutogradLinearization(self, state) if self.sequential else self.linearize(state)

    def distance_bound(self, state: State) -> Certificate:
        """`(batch,)` bound on `‖z - z*‖` of the readout `z = W y`, infinite unless `q < 1`.

        Let `a(y) = k'(t) c + Wᵀh(W y)`, so that the simultaneous map is `T(y) = σ(a(y))`, and `p = T(y)`.
        Then `a(y)` is a subgradient of `1ᵀf + ½‖·‖²` at `p`, and `a(p)` the gradient of what `G` subtracts
        from that: `a(y) - a(p)` is a subgradient of `G` at `p`. The modulus of `G` is at least `(1 - q)/L_σ`
        (see `uniqueness`), hence `‖p - y*‖ ≤ L_σ‖a(y) - a(p)‖/(1 - q)` for its minimiser `y*`, and

            ‖z - z*‖ ≤ ‖W y - W p‖ + max_i ‖W_i‖ · L_σ‖a(y) - a(p)‖/(1 - q).

        Polynomials of degree 3 and more have unbounded curvature, `q = ∞`, and no bound.
        """
        norms = [similarity.norm_bound() for similarity in self.similarities]
        q = self.uniqueness().value
        arguments = self._arguments(state)
        p = self._activated(arguments)
        moved = self.lipschitz * distance(arguments, self._arguments(p)) / (1 - q)
        largest = torch.stack([norm.value for norm in norms]).amax()
        value = distance(self.readout(state), self.readout(p)) + largest * moved
        return combined(norms, torch.where(q < 1, value, torch.inf))

    def _arguments(self, state: State) -> tuple[Tensor, ...]:
        """`k'(t_i) c_i + W_iᵀh_i(z)`, of which the simultaneous map takes `σ`."""
        messages = self.coupling.gradient(self.readout(state))
        rows = zip(self.similarities, tensors_of(state), messages, strict=True)
        return tuple(similarity.respond(y, message) for similarity, y, message in rows)

    def _activated(self, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(activation(a) for activation, a in zip(self.activations, arguments, strict=True))

    def _bound(self, pull: Tensor | float, state: State | None) -> Certificate:
        """`L_σ max_i (|k''|‖c_i‖²/n_i + pull ‖W_i‖²)`, `L_σ` the largest of the branches.

        It bounds `H = diag(k''c_ic_iᵀ/n_i) + Wᵀ∂hW`, as `|vᵀWᵀ∂hWv| ≤ ‖∂h‖ Σ_i ‖W_i‖²‖v_i‖²`.
        """
        places = [None] * len(self.similarities) if state is None else tensors_of(state)
        norms = [similarity.norm_bound() for similarity in self.similarities]
        rows = zip(self.similarities, norms, places, strict=True)
        parts = [s.curvature_bound(y) + pull * norm.value.square() for s, norm, y in rows]
        return combined(norms, self.lipschitz * torch.stack(parts).amax(0))


class KernelBranchesLinearization(Linearization):
    """`J = D H`, `D = diag σ' ⪰ 0`, `H = diag(k''(t_i) c_ic_iᵀ/n_i) + Wᵀ∂hW` symmetric."""

    def __init__(self, equation: KernelBranchesEquation, state: State) -> None:
        self._equation, self._similarities = equation, equation.similarities
        self._coupling = equation.coupling.linearize(equation.readout(state))
        rows = zip(self._similarities, tensors_of(state), self._coupling.gradient(), strict=True)
        self._parts = [InnerProductLinearization(*row) for row in rows]
        pairs = zip(equation.activations, self._parts, strict=True)
        self._slopes = [activation.slopes(part.gradient()) for activation, part in pairs]

    @property
    def image(self) -> tuple[Tensor, ...]:
        return self._equation._activated(tuple(part.gradient() for part in self._parts))

    @property
    def symmetric(self) -> SymmetricForm | None:
        roots = [slopes.sqrt() for slopes in self._slopes]
        return symmetrized(lambda v: _times(roots, v), self.hessian, self._pullback)

    def jvp(self, tangent: State) -> State:
        return _times(self._slopes, self.hessian(tangent))

    def vjp(self, cotangent: State) -> State:
        return self.hessian(_times(self._slopes, cotangent))

    def pullback(self, cotangent: State) -> Gradients:
        return self._pullback(_times(self._slopes, cotangent))

    def hessian(self, v: State) -> tuple[Tensor, ...]:
        """`H v`."""
        moves = self._coupling.product(_lift(self._similarities, v))
        rows = zip(self._parts, tensors_of(v), moves, strict=True)
        return tuple(part.respond(own, move) for part, own, move in rows)

    def _pullback(self, slope_times_cotangent: State) -> Gradients:
        lifted = _lift(self._similarities, slope_times_cotangent)
        moves = self._coupling.product(lifted)
        rows = zip(self._parts, tensors_of(slope_times_cotangent), moves, strict=True)
        gradients = tuple(g for part, u, move in rows for g in part.pullback_with(u, move))
        return gradients + self._coupling.pullback(lifted)


def _times(slopes: Sequence[Slopes], state: State) -> tuple[Tensor, ...]:
    """`D_i y_i`."""
    return tuple(d.times(y) for d, y in zip(slopes, tensors_of(state), strict=True))


def _lift(similarities: Sequence[InnerProductSimilarity], state: State) -> tuple[Tensor, ...]:
    """`z_i = W_i y_i`."""
    return tuple(s.lift(y) for s, y in zip(similarities, tensors_of(state), strict=True))
