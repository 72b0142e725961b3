"""Equilibria of any layer `z ↦ f(z; x)`, without an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from opteq.equation import Equation, largest_eigenvalue
from opteq.errors import ShapeError
from opteq.maps.base import EquilibriumMap
from opteq.results import Certificate, State


class Block(nn.Module, ABC):
    """The layer `f`: a module `(state, *inputs) ↦ state` whose samples do not see each other.

    Batch norm and ordinary dropout have no place in it: all evaluations of a solve have to be of one
    function.
    """

    def acting(self) -> dict[str, Tensor]:
        """The parameters as they act during one solve, by their names, in the autograd graph."""
        return dict(self.named_parameters())

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """All that a solve keeps constant, made from the injection `x`."""
        return (x,)

    @abstractmethod
    def initial(self, x: Tensor) -> State:
        """The zero state.

        Raises:
            ShapeError: if `x` does not fit.
        """


class BlockMap(EquilibriumMap):
    """`z = f(z; U x)` for a `Block`, as deep equilibrium models have it (Bai et al. 2019).

    Neither existence nor uniqueness of an equilibrium is known, so that solves may fail to converge.

    Args:
        block: `f`.
        injection: `U`, any module; the features themselves unless given.
    """

    def __init__(self, block: Block, injection: nn.Module | None = None) -> None:
        super().__init__()
        self.block = block
        self.injection = nn.Identity() if injection is None else injection

    def bind(self, x: State, error: float = 0.0) -> BlockEquation:
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"Expected `x` of shape (batch, channels, H, W), got {got}.")
        given = self.injection(x)
        acting = self.block.acting()
        inputs = self.block.inputs(given)
        return BlockEquation(self.block, tuple(acting), tuple(acting.values()), inputs)


@dataclass(frozen=True, eq=False)
class BlockEquation(Equation):
    """`z = f(z)` for one batch.

    Attributes:
        block: computes `f`.
        names: of its parameters that act.
        parameters: their values.
        inputs: what else it is given.
    """

    block: Block
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]

    def __call__(self, state: State) -> State:
        values = dict(zip(self.names, self.parameters, strict=True))
        return functional_call(self.block, values, (state, *self.inputs))

    def initial(self) -> State:
        return self.block.initial(self.inputs[0])

    def contraction(self, state: State | None = None) -> Certificate:
        """An estimate of `‖J‖` at a state; no bound holds for all states."""
        if state is None:
            batch = len(self.inputs[0])
            return Certificate(
                torch.full((batch,), torch.inf), "bound", ("No bound is known for any layer.",)
            )
        linearization = self.linearize(state)
        found = largest_eigenvalue(lambda v: linearization.vjp(linearization.jvp(v)), state)
        return Certificate(found.value.clamp(min=0).sqrt(), found.kind, found.assumptions)
