"""The interface of fixed-point solvers and the one loop that runs them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from opteq.errors import ConfigError
from opteq.results import SolveInfo, State, tensors_of
from opteq.solvers.space import Space

Stepper = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`(x, f, g, ‖g‖) ↦ next x` with `f = T(x)`, `g = f - x` of shape `(batch, n)` and norms `(batch,)`.

The memory of `g` is reused for the next step: a stepper copies what it keeps of it.
"""


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


def check_tolerance(tol: float, dtype: torch.dtype) -> None:
    """Refuse a tolerance that rounding would keep out of reach.

    Raises:
        ConfigError: if `tol` is below ten times the machine epsilon of `dtype`.
    """
    floor = 10 * torch.finfo(dtype).eps
    if not tol >= floor:
        # Twice the floor, so that the rounded number is one that will be accepted.
        raise ConfigError(
            f"tol={tol:g} cannot be reached in {str(dtype).removeprefix('torch.')};"
            f" use at least {2 * floor:.1g} or a wider dtype."
        )


def row_norms(x: Tensor) -> Tensor:
    """`(batch,)` Euclidean norms of the rows, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.linalg.vector_norm(x, dim=1, dtype=wide)


@torch.no_grad()
def solve_fixed_point(
    function: Callable[[State], State],
    initial: State,
    solver: Solver,
    residual_scale: float = 1.0,
    joint: bool = False,
) -> tuple[State, SolveInfo]:
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

    Raises:
        ConfigError: if the tolerance is below what the dtype can resolve.
    """
    space = Space(initial, joint)
    x = space.flatten(initial)
    check_tolerance(solver.tol, x.dtype)
    advance = solver.start(x)
    previous, g = x, torch.empty_like(x)
    result: Tensor | None = None
    active = torch.ones(len(x), dtype=torch.bool, device=x.device)
    converged = torch.zeros_like(active)
    steps = torch.full((len(x),), solver.max_steps, device=x.device)
    history: list[Tensor] = []

    for step in range(1, solver.max_steps + 1):
        f = space.flatten(function(space.restore(x)))
        torch.sub(f, x, out=g)
        change, size = row_norms(g), row_norms(f)
        residual = residual_scale * change / size.clamp(min=torch.finfo(size.dtype).tiny)
        history.append(residual)
        # Finite is asked of the change: where T(z) = 0 and z is not, the residual is rightly infinite.
        met, finite = residual <= solver.tol, torch.isfinite(change)
        stops = active & (met | ~finite)
        last = step == solver.max_steps
        if last or bool(stops.any()):
            kept = (
                x if bool(finite.all()) else torch.where(torch.isfinite(x).all(1, keepdim=True), x, previous)
            )
            # The samples that go on overwrite their rows when they stop.
            result = kept if result is None else torch.where(active[:, None], kept, result)
            steps = torch.where(stops, step, steps)
            converged |= stops & met
            active = active & ~stops
            if last or not bool(active.any()):
                break
        # Under autocast the map may run in low precision; the solver's own products may not.
        with torch.autocast(x.device.type, enabled=False):
            previous, x = x, advance(x, f, g, change)

    assert result is not None  # max_steps is at least 1
    residuals = torch.stack(history, dim=1)
    seen = torch.arange(1, len(history) + 1, device=x.device) <= steps[:, None]
    residuals = torch.where(seen, residuals, torch.nan)
    info = SolveInfo(residuals, steps, converged, len(history))
    return space.restore(result), info.shared_by(len(tensors_of(initial)[0])) if joint else info
