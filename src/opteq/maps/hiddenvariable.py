"""Equations whose map goes through a hidden variable."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat, tee
from typing import Self

from torch import Tensor

from opteq.equation import Equation, Linearization, Reformulation
from opteq.errors import ConfigError
from opteq.results import Certificate, S, State


class HiddenVariable(Equation[S]):
    """An equation whose map ends in `z = (1/μ) Wᵀ y` with a hidden variable `y = h(z)`, or has such branches.

    It gives `hidden`, and either `hidden_rates` or the two bounds that follow from them.
    """

    @abstractmethod
    def hidden(self, state: S) -> State:
        """`h(z)`."""

    def hidden_rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        """Lipschitz constants of `h` in what the injections read and in `z`, as `rates` has those of `T`.

        Raises:
            ConfigError: where none are known.
        """
        raise ConfigError(f"No Lipschitz bound is known for the hidden variable of {type(self).__name__}.")

    def hidden_distance_bound(self, state: S) -> Certificate:
        """`(batch,)` bound on `‖h(z) - y*‖`: the Lipschitz constant of `h` times the distance of `z`."""
        of_state, steepness = self.distance_bound(state), self.hidden_rates(repeat(0.0))[1]
        return replace(of_state, value=steepness * of_state.value)

    def hidden_lipschitz(self, pushes: Iterator[float]) -> float:
        """A Lipschitz constant of `x ↦ y*(x)`: that of `h` in `x`, and what it follows of `z*(x)`."""
        once, again = tee(pushes)
        push, pull = self.hidden_rates(once)
        return push + pull * self.equilibrium_lipschitz(again)


@dataclass(frozen=True, eq=False)
class HiddenReadoutEquation(Equation):
    """The equation of a map, read out as its hidden variable."""

    inner: HiddenVariable

    def detach(self) -> Self:
        # Branches keep the first iterate that they know.
        return replace(self, inner=self.inner.detach())

    @property
    def structure(self) -> str:
        return self.inner.structure

    @property
    def batch_coupled(self) -> bool:
        return self.inner.batch_coupled

    def initial(self) -> State:
        return self.inner.initial()

    def first_iterate(self) -> State:
        return self.inner.first_iterate()

    def __call__(self, state: State) -> State:
        return self.inner(state)

    def readout(self, state: State) -> State:
        return self.inner.hidden(state)

    def reformulate(self, gradient: bool = False) -> Reformulation:
        return self.inner.reformulate(gradient)

    def linearize(self, state: State) -> Linearization:
        return self.inner.linearize(state)

    def linearize_evaluation(self, state: State) -> Linearization:
        return self.inner.linearize_evaluation(state)

    @property
    def objective(self) -> Callable[[State], Tensor] | None:
        return self.inner.objective

    def contraction(self, state: State | None = None) -> Certificate:
        return self.inner.contraction(state)

    def curvature(self, state: State | None = None) -> Certificate:
        return self.inner.curvature(state)

    def distance_bound(self, state: State) -> Certificate:
        return self.inner.hidden_distance_bound(state)

    def rates(self, pushes: Iterator[float]) -> tuple[float, float]:
        return self.inner.rates(pushes)

    def equilibrium_lipschitz(self, pushes: Iterator[float]) -> float:
        return self.inner.hidden_lipschitz(pushes)


def with_hidden(equation: Equation) -> HiddenVariable:
    """The equation itself.

    Raises:
        ConfigError: if it has no hidden variable.
    """
    if not isinstance(equation, HiddenVariable):
        raise ConfigError(
            f"A {type(equation).__name__} has no hidden variable that could be read; OptEq units have one,"
            " and maps made of them."
        )
    return equation
