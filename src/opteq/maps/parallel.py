"""Parallel maps: independent equilibria of one input, solved as one equation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, Reformulation, SymmetricForm
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, check_branches
from opteq.maps.hiddenvariable import HiddenVariable, with_hidden
from opteq.results import Certificate, State, combined, largest, tensors_of


class Parallel(EquilibriumMap):
    """`z_i = T_i(z_i; x)`, independent branches on one input (POptEq, Li et al. 2022, Eq. 10).

    The equilibria of OptEq units minimise the sum of the branches' hidden objectives (Eq. 11); those of
    other maps are stationary for it if each is for its own. Branches may have different sizes: a branch at
    half the resolution has
    `U = Compose(AveragePool(channels, 2), Conv2d(...))`.

    State and readout: a tuple with one tensor per branch.

    Args:
        maps: the branches; each has a state of one tensor.

    Raises:
        ConfigError: if there is no branch, or one is no equilibrium map.
    """

    def __init__(self, maps: Sequence[EquilibriumMap]) -> None:
        super().__init__()
        check_branches(maps)
        # A ModuleList does not say what it holds.
        self.maps: list[EquilibriumMap] = nn.ModuleList(maps)  # type: ignore[assignment]

    @property
    def injections(self) -> tuple[nn.Module, ...]:
        return tuple(operator for branch in self.maps for operator in branch.injections)

    def bind(self, x: State, error: float = 0.0) -> ParallelEquation:
        return ParallelEquation(tuple(branch.bind(x, error) for branch in self.maps))


@dataclass(frozen=True, eq=False)
class ParallelEquation(HiddenVariable):
    """The product of equations: `z_i = T_i(z_i)` for every branch `i`."""

    branches: tuple[Equation, ...]

    @property
    def structure(self) -> str:
        structures = {branch.structure for branch in self.branches}
        if structures == {"proximal"}:
            return "proximal"
        return "none" if "none" in structures else "conservative"

    @property
    def batch_coupled(self) -> bool:
        return any(branch.batch_coupled for branch in self.branches)

    def initial(self) -> tuple[Tensor, ...]:
        return _joined(branch.initial() for branch in self.branches)

    def first_iterate(self) -> tuple[Tensor, ...]:
        return _joined(branch.first_iterate() for branch in self.branches)

    def __call__(self, state: State) -> tuple[Tensor, ...]:
        return _branchwise(self.branches, state)

    def reformulate(self, gradient: bool = False) -> Reformulation:
        """Every branch as it goes about its own equation, all in one iteration.

        Where only some take another variable all keep theirs: residuals are relative to the whole of a state.
        """
        forms = [branch.reformulate(gradient) for branch in self.branches]
        functions = [form.function for form in forms]
        recovers = [form.recover for form in forms if form.recover is not None]
        if recovers and len(recovers) < len(forms):
            return super().reformulate(gradient)
        return Reformulation(
            lambda u: _branchwise(functions, u),
            _joined(form.initial for form in forms),
            _joined(form.first for form in forms),
            (lambda u: _branchwise(recovers, u)) if recovers else None,
            max(form.gain for form in forms),
            max(form.size for form in forms),
            any(form.measured for form in forms),
        )

    @property
    def objective(self) -> Callable[[State], Tensor] | None:
        """The sum of the branches' objectives."""
        parts = [branch.objective for branch in self.branches]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None

        def total(state: State) -> Tensor:
            pairs = zip(known, tensors_of(state), strict=True)
            return torch.stack([part(z) for part, z in pairs]).sum(0)

        return total

    def contraction(self, state: State | None = None) -> Certificate:
        """The largest of the branches' bounds."""
        return largest(self._each(lambda branch, z: branch.contraction(z), state))

    def curvature(self, state: State | None = None) -> Certificate:
        """The largest of the branches', since their objectives add."""
        return largest(self._each(lambda branch, z: branch.curvature(z), state))

    def distance_bound(self, state: State) -> Certificate:
        """The root of the sum of the squares of the branches' distances."""
        pairs = zip(self.branches, tensors_of(state), strict=True)
        return _root_of_squares([branch.distance_bound(z) for branch, z in pairs])

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        rates = [branch.rates(pushes) for branch in self.branches]
        # All branches read the same input.
        return math.hypot(*(push for push, _ in rates)), max(pull for _, pull in rates)

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        return math.hypot(*(branch.equilibrium_lipschitz(pushes) for branch in self.branches))

    def hidden(self, state: State) -> tuple[Tensor, ...]:
        """That of every branch."""
        return _branchwise([with_hidden(branch).hidden for branch in self.branches], state)

    def hidden_distance_bound(self, state: State) -> Certificate:
        pairs = zip(self.branches, tensors_of(state), strict=True)
        return _root_of_squares([with_hidden(branch).hidden_distance_bound(z) for branch, z in pairs])

    def hidden_lipschitz(self, pushes: Iterator[float]) -> float:
        return math.hypot(*(with_hidden(branch).hidden_lipschitz(pushes) for branch in self.branches))

    def _each(
        self, ask: Callable[[Equation, State | None], Certificate], state: State | None
    ) -> list[Certificate]:
        places = [None] * len(self.branches) if state is None else tensors_of(state)
        return [ask(branch, z) for branch, z in zip(self.branches, places, strict=True)]

    def readout(self, state: State) -> State:
        read = _branchwise([branch.readout for branch in self.branches], state)
        unchanged = all(a is b for a, b in zip(read, tensors_of(state), strict=True))
        return state if unchanged else read

    def linearize(self, state: State) -> ParallelLinearization:
        pairs = zip(self.branches, tensors_of(state), strict=True)
        return ParallelLinearization([branch.linearize(z) for branch, z in pairs])


class ParallelLinearization(Linearization):
    """`J = diag(J_1, …, J_L)`, with the linearizations of the branches as `parts`."""

    def __init__(self, parts: list[Linearization]) -> None:
        self.parts = parts

    @property
    def image(self) -> tuple[Tensor, ...]:
        return _joined(part.image for part in self.parts)

    @property
    def symmetric(self) -> SymmetricForm | None:
        forms = [form for part in self.parts if (form := part.symmetric) is not None]
        if len(forms) < len(self.parts):
            return None
        pullbacks = [form.pullback for form in forms if form.pullback is not None]
        metrics = [form.metric for form in forms]
        return SymmetricForm(
            matvec=lambda v: _branchwise([form.matvec for form in forms], v),
            enter=lambda g: _branchwise([form.enter for form in forms], g),
            leave=lambda v, g: _branchwise([form.leave for form in forms], v, g),
            pullback=(lambda v, g: _concatenated(pullbacks, v, g)) if len(pullbacks) == len(forms) else None,
            lifted=all(form.lifted for form in forms),
            metric=(lambda v: _branchwise([m or _identity for m in metrics], v)) if any(metrics) else None,
        )

    def jvp(self, tangent: State) -> tuple[Tensor, ...]:
        return _branchwise([part.jvp for part in self.parts], tangent)

    def vjp(self, cotangent: State) -> tuple[Tensor, ...]:
        return _branchwise([part.vjp for part in self.parts], cotangent)

    def pullback(self, cotangent: State) -> Gradients:
        return _concatenated([part.pullback for part in self.parts], cotangent)

    def pullback_and_vjp(self, cotangent: State) -> tuple[Gradients, tuple[Tensor, ...]]:
        pairs = zip(self.parts, tensors_of(cotangent), strict=True)
        gradients, products = zip(*(part.pullback_and_vjp(u) for part, u in pairs), strict=True)
        return tuple(g for own in gradients for g in own), _joined(products)


def _root_of_squares(bounds: Sequence[Certificate]) -> Certificate:
    return combined(bounds, torch.stack([bound.value for bound in bounds]).norm(dim=0))


def _branchwise(functions: Sequence[Callable[..., State]], *states: State) -> tuple[Tensor, ...]:
    rows = zip(functions, *map(tensors_of, states), strict=True)
    return _joined(function(*row) for function, *row in rows)


def _concatenated(functions: Sequence[Callable[..., Gradients]], *states: State) -> Gradients:
    rows = zip(functions, *map(tensors_of, states), strict=True)
    return tuple(gradient for function, *row in rows for gradient in function(*row))


def _joined(states: Iterable[State]) -> tuple[Tensor, ...]:
    tensors = []
    for state in states:
        if not isinstance(state, Tensor):
            raise ConfigError(
                "A branch of Parallel has a state of one tensor; give those of a map with several singly."
            )
        tensors.append(state)
    return tuple(tensors)


def _identity(v: State) -> State:
    return v
