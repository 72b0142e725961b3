"""The interface of fixed-point solvers and the one loop that runs them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.native.rows import hold, norms, observe
from opteq.native.serving import reads
from opteq.results import SolveInfo, State, map_state, tensors_of
from opteq.solvers.progress import Progress
from opteq.solvers.space import Space
from opteq.tensors.precision import full_precision
from opteq.tensors.tracing import refuse_tracing, untraced


class Stepper(Protocol):
    """The rule for the next iterate of one solve; it owns all that changes meanwhile."""

    def __call__(self, x: Tensor, f: Tensor, g: Tensor, norms: Tensor) -> Tensor:
        """The next `x`, from `f = T(x)` and `g = f - x`, all `(batch, n)`.

        `norms` are those of the rows of `g` and of `f`, `(batch, 2)` in float64.

        The memory of `g` is reused for the next step unless the stepper has rooms of its own.
        """
        ...


class HasRooms(Protocol):
    """A stepper that keeps `f` and `g`, or what it makes of them there, says where to write the next ones."""

    @property
    def rooms(self) -> tuple[Tensor, Tensor]: ...


class Solver(ABC):
    """A method for `z = T(z)`: immutable options plus the rule for the next iterate.

    Attributes:
        tol: relative residual `‖T(z)-z‖ / ‖T(z)‖` at which a sample stops.
        max_steps: most evaluations of the map.
        needs_gradient_map: whether the method is sound only if `z - T(z)` is the gradient of a convex
            function with Lipschitz constant 1.
    """

    tol: float
    max_steps: int
    needs_gradient_map = False

    @abstractmethod
    def start(self, x: Tensor) -> Stepper:
        """A fresh stepper for iterates like `x`; it owns all that changes during a solve."""


def check_tolerance(tol: float, dtype: torch.dtype, owner: str = "solver") -> None:
    """Refuse a tolerance that rounding would keep out of reach.

    Args:
        tol: the tolerance.
        dtype: that of what is solved for.
        owner: which option of a layer has the tolerance, `"solver"` or `"gradient"`.

    Raises:
        ConfigError: if `tol` is below ten times the machine epsilon of `dtype`.
    """
    floor = 10 * torch.finfo(dtype).eps
    if not tol >= floor:
        # Twice the floor, so that the rounded number is one that will be accepted.
        possible, width = f"{2 * floor:.1g}", 64 if dtype in (torch.float32, torch.float64) else 32
        raise ConfigError(
            f"tol={tol:g} cannot be reached in {str(dtype).removeprefix('torch.')};"
            f" use at least {possible} or a wider dtype. {tolerance_knob(owner, possible)}; the dtype is that"
            f" of layer.to(torch.float{width}), or --trainer.precision={width}."
        )


def tolerance_knob(owner: str, tol: str) -> str:
    """How the tolerance of a layer's `"solver"` or `"gradient"` is set, in Python and on the command line."""
    method = {"solver": "Anderson", "gradient": "Implicit"}[owner]
    return (
        f"It is the `tol` of the {owner}, as in EquilibriumLayer(…, {owner}={method}(tol={tol})), or"
        f" --model.network.body.{owner}.tol={tol} on the command line"
    )


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Where an iteration ended.

    Attributes:
        value: the iterate whose residual is known.
        image: `T(value)`, which is at hand and as a rule nearer to the fixed point; `value` itself where that
            is not finite.
        info: how the iteration went.
    """

    value: State
    image: State
    info: SolveInfo


# The number of steps depends on the data.
@untraced
@torch.no_grad()
def find_fixed_point(
    function: Callable[[State], State],
    initial: State,
    solver: Solver,
    residual_scale: float = 1.0,
    joint: bool = False,
    first: State | None = None,
) -> FixedPoint:
    """Solve `z = T(z)` for every sample of a batch.

    A sample stops on its own: the iterate whose residual met the tolerance is its result, whatever the
    rest of the batch goes on doing. A sample whose iterates stop being finite keeps its last finite
    iterate and counts as not converged; one that runs out of steps keeps its last iterate.

    Args:
        function: the map `T`.
        initial: where to start.
        solver: the method with its options.
        residual_scale: factor on residuals, for a map that is a damped form of the one to be solved.
        joint: solve the batch as one system with one residual, for samples that enter each other's
            equation; no sample stops before the others.
        first: `T(initial)`, where it is known already. The method then starts with that step behind it,
            which counts neither as an evaluation nor among the residuals.

    Raises:
        ConfigError: if the tolerance is below what the dtype can resolve, or operations are traced.
    """
    refuse_tracing()
    space = Space(initial, joint)
    x = space.flatten(initial)
    check_tolerance(solver.tol, x.dtype)
    advance = solver.start(x)
    # Not by isinstance, which looks through all that a protocol names, at a cost of many steps.
    keeper = cast(HasRooms, advance) if hasattr(advance, "rooms") else None
    buffer = None if keeper else torch.empty_like(x)
    previous = x
    in_c = reads(x)
    progress = Progress(x, solver.tol, solver.max_steps, residual_scale, in_c)
    # Under autocast the map may run in low precision; the solver's own products may not.
    in_full = partial(full_precision, x.device)

    def observed(image: State, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`f` and `g`, and the norms of the rows of `g` and of `f`."""
        if keeper:
            f, g = keeper.rooms
            return f, g, observe(space.parts(image), x, f, g, in_c)
        f = space.flatten(image)
        g = torch.sub(f, x, out=buffer)
        return f, g, norms(g, f)

    if first is not None:
        seen = observed(first, x)
        with in_full():
            x = advance(x, *seen)

    while True:
        image = function(space.restore(x))
        f, g, sizes = observed(image, x)
        going, lost = progress.record(sizes)
        if lost:
            x = torch.where(torch.isfinite(x).all(1, keepdim=True), x, previous)
        if progress.steps == solver.max_steps or not going:
            break
        # Its memory is there for what comes next.
        del image
        with in_full():
            following = advance(x, f, g, sizes)
        if going < x.shape[0]:
            # Those that have stopped stay where they are, which spares them a place of their own.
            following = hold(x, following, progress.active, in_c)
        previous, x = x, following

    info = progress.info()
    if lost:
        image = space.restore(torch.where(torch.isfinite(f).all(1, keepdim=True), f, x))
    if joint:
        info = info.shared_by(len(tensors_of(initial)[0]))
    # Not `f`, which is part of the stepper's memory and would keep all of it.
    image = map_state(lambda t: t.to(x.dtype), image)
    return FixedPoint(space.restore(x), image, info)


def solve_fixed_point(
    function: Callable[[State], State], initial: State, solver: Solver, joint: bool = False
) -> tuple[State, SolveInfo]:
    """The value and the record of `find_fixed_point`, which see."""
    found = find_fixed_point(function, initial, solver, joint=joint)
    return found.value, found.info
