"""One image on its way to its equilibrium, and what the network would say on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.evaluation.trace import first_call
from opteq.layer import EquilibriumLayer
from opteq.results import SolveInfo, State, distance, map_state, norm
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import solve_fixed_point
from opteq.theory.exact import in_float64

# Plain iterations that are followed at most, and how many of them are kept to be looked at.
MOST_STEPS = 300
KEPT_STEPS = 40
_KEPT = {0, *np.geomspace(1, MOST_STEPS, KEPT_STEPS).round().astype(int).tolist()}
# Followed to a residual this much below the tolerance, to show that the solve ended on the way down.
_BEYOND = 0.1
# Finds the lowest value of the hidden objective, also where the plain iteration is too slow for it.
_TIGHT = Anderson(tol=1e-9, max_steps=1000)
# What an unrolled layer, which has no tolerance, is followed to.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Iteration:
    """The plain iteration `z ← T(z)` of one image in the first equilibrium layer, and the layer's own answer.

    Attributes:
        layer: the layer.
        x: its input.
        residual: relative residual at `z⁰, z¹, …`.
        objective: hidden objective there; None for maps that have none.
        lowest: hidden objective at the equilibrium, from a tight solve, or the least that was met on the way.
        steps: the `k` whose states are kept: all of the first ones, then ever fewer, and the last.
        states: readouts of the states `z^k` for these.
        equilibrium: the readout of the layer's own solve.
        info: how that solve went.
        tolerance: its tolerance; None where a fixed number of steps takes the place of a solve.
    """

    layer: EquilibriumLayer
    x: State
    residual: list[float]
    objective: list[float] | None
    lowest: float | None
    steps: list[int]
    states: list[State]
    equilibrium: State
    info: SolveInfo
    tolerance: float | None


@torch.no_grad()
def iterate(network: nn.Module, image: Tensor) -> Iteration:
    """Follow one image, `(1, channels, height, width)`, for at most 300 iterations.

    It ends a decade below the tolerance, or where numbers stop being finite.

    Raises:
        ConfigError: if the network calls no equilibrium layer.
    """
    call = first_call(network, image)
    if call is None:
        raise ConfigError("This network has no equilibrium layer: there is no iteration to show.")
    layer, x = call
    solution = layer.solve(x)
    tolerance = layer.solver.tol if layer.solver else None
    # In float64: near the equilibrium the objective changes by less than float32 resolves.
    equation = in_float64(layer).bind(map_state(Tensor.double, x)).detach()
    residual: list[float] = []
    objective: list[float] = []
    kept: list[tuple[int, State]] = []
    z = equation.initial()
    for k in range(MOST_STEPS + 1):
        following = equation(z)
        size = float(norm(following))
        residual.append(float(distance(z, following)) / max(size, torch.finfo(torch.float64).tiny))
        if equation.objective is not None:
            objective.append(float(equation.objective(z)))
        last = (
            k == MOST_STEPS
            or not math.isfinite(size)
            or residual[-1] <= _BEYOND * (_TOLERANCE if tolerance is None else tolerance)
        )
        if last or k in _KEPT:
            kept.append((k, map_state(Tensor.float, equation.readout(z))))
        if last:
            break
        z = following
    lowest = None
    if equation.objective is not None:
        end, _ = solve_fixed_point(equation, z, _TIGHT)
        values = [*objective, float(equation.objective(end))]
        lowest = min(filter(math.isfinite, values), default=None)
    steps, states = zip(*kept, strict=True)
    return Iteration(
        layer,
        x,
        residual,
        objective or None,
        lowest,
        list(steps),
        list(states),
        solution.value,
        solution.info,
        tolerance,
    )


@contextmanager
def answering(layer: EquilibriumLayer, state: State) -> Iterator[None]:
    """With a layer that answers with `state` whatever it reads."""
    layer.forward = lambda x: state
    try:
        yield
    finally:
        del layer.forward


@torch.no_grad()
def logits_along(network: nn.Module, image: Tensor, iteration: Iteration) -> list[Tensor]:
    """The logits that the network would give for each kept state, and last for the equilibrium."""
    found = []
    for state in (*iteration.states, iteration.equilibrium):
        with answering(iteration.layer, map_state(lambda t: t.to(image.dtype), state)):
            found.append(network(image))
    return found
