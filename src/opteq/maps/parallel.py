"""Parallel maps: independent equilibria of one input, solved as one equation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients, Linearization, SymmetricForm, with_tensors_of
from opteq.errors import ConfigError
from opteq.maps.base import EquilibriumMap, check_branches
from opteq.results import Certificate, State, combined, tensors_of


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

    def bind(self, x: State) -> ParallelEquation:
        return ParallelEquation(tuple(branch.bind(x) for branch in self.maps))


@dataclass(frozen=True, eq=False)
class ParallelEquation(Equation):
    """The product of equations: `z_i = T_i(z_i)` for every branch `i`."""

    branches: tuple[Equation, ...]

    @property
    def has_energy(self) -> bool:
        return all(branch.has_energy for branch in self.branches)

    @property
    def conservative(self) -> bool:
        return all(branch.conservative for branch in self.branches)

    @property
    def proximal(self) -> bool:
        return all(branch.proximal for branch in self.branches)

    @property
    def batch_coupled(self) -> bool:
        return any(branch.batch_coupled for branch in self.branches)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for branch in self.branches for t in branch.tensors)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        return replace(self, branches=with_tensors_of(self.branches, tensors)[0])

    def initial(self) -> tuple[Tensor, ...]:
        return _joined(branch.initial() for branch in self.branches)

    def first_iterate(self) -> tuple[Tensor, ...]:
        return _joined(branch.first_iterate() for branch in self.branches)

    def __call__(self, state: State) -> tuple[Tensor, ...]:
        return _branchwise(self.branches, state)

    def energy(self, state: State) -> Tensor:
        """The sum of the branches' energies."""
        pairs = zip(self.branches, tensors_of(state), strict=True)
        return torch.stack([branch.energy(z) for branch, z in pairs]).sum(0)

    def contraction(self, state: State | None = None) -> Certificate:
        """The largest of the branches' bounds."""
        places = [None] * len(self.branches) if state is None else tensors_of(state)
        bounds = [branch.contraction(z) for branch, z in zip(self.branches, places, strict=True)]
        return combined(bounds, torch.stack([bound.value for bound in bounds]).amax(0))

    def readout(self, state: State) -> State:
        read = _branchwise([branch.readout for branch in self.branches], state)
        unchanged = all(a is b for a, b in zip(read, tensors_of(state), strict=True))
        return state if unchanged else read

    def linearize(self, state: State) -> ParallelLinearization:
        pairs = zip(self.branches, tensors_of(state), strict=True)
        return ParallelLinearization([branch.linearize(z) for branch, z in pairs])

    def value_and_linearization(self, state: State) -> tuple[tuple[Tensor, ...], Linearization]:
        pairs = zip(self.branches, tensors_of(state), strict=True)
        values, parts = zip(*(branch.value_and_linearization(z) for branch, z in pairs), strict=True)
        return _joined(values), ParallelLinearization(list(parts))

    def gradient_map(self) -> tuple[Callable[[State], State], float]:
        steps, factors = zip(*(branch.gradient_map() for branch in self.branches), strict=True)
        return lambda state: _branchwise(steps, state), max(factors)


class ParallelLinearization(Linearization):
    """`J = diag(J_1, …, J_L)`, with the linearizations of the branches as `parts`."""

    def __init__(self, parts: list[Linearization]) -> None:
        self.parts = parts
        structures = {part.structure for part in parts}
        if structures == {"psd"}:
            self.structure = "psd"
        elif "none" not in structures:
            self.structure = "symmetrizable"

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
