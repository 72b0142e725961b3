"""What a solve returns: the value, how it was reached and, on request, its history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.notebook import html_table, pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One tensor of shape (batch, ...) or, for models of several branches, one such tensor per branch.
State = Tensor | tuple[Tensor, ...]
# The states of an equation, which are all alike.
S = TypeVar("S", bound=State)
# Numbers of a tensor that are shown.
_FEW = 8


class Described:
    """Prints a dataclass with the shapes of its tensors, and with their numbers where these are few.

    Of many samples the range of a number is printed.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        # As the decorator calls them, whatever a dataclass is in the eyes of a type checker.
        values = ((f.name, getattr(self, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_described(value)}' for name, value in values)})"


def _described(value: object) -> str:
    if isinstance(value, tuple) and any(isinstance(part, Tensor) for part in value):
        return f"({', '.join(map(_described, value))})"
    if not isinstance(value, Tensor) or value.numel() <= _FEW:
        return repr(value)
    text = f"tensor of shape {tuple(value.shape)}, {value.dtype}"
    if value.dim() > 1 or value.dtype == torch.bool:
        return text
    # A number for each sample.
    return f"{text}, from {value.min().item():.3g} to {value.max().item():.3g}"


@dataclass(frozen=True, slots=True, repr=False)
class SolveInfo(Described):
    """How an iteration went, sample by sample.

    Attributes:
        residuals: `(batch, steps)` relative residuals `‖T(z)-z‖ / ‖T(z)‖`; NaN after a sample stopped. Where
            a dense unit is solved in `u = W z`, for large batches, those of `u`, which bound them where
            `L_σ‖W‖² ≤ μ` is imposed; else the last one is that of `z`.
        steps: `(batch,)` number of map evaluations a sample needed.
        converged: `(batch,)` whether the tolerance was reached.
        evaluations: number of evaluations of the map on the whole batch.
        tol: the tolerance; None for a number of steps that was fixed beforehand.
    """

    residuals: Tensor
    steps: Tensor
    converged: Tensor
    evaluations: int
    tol: float | None = None

    @property
    def residual(self) -> Tensor:
        """`(batch,)` last residual of each sample; infinite where none was seen."""
        seen = ~torch.isnan(self.residuals)
        last = seen.cumsum(1).argmax(1)
        value = self.residuals.gather(1, last[:, None])[:, 0]
        return torch.where(seen.any(1), value, torch.full_like(value, torch.inf))

    def ending_with(self, residual: Tensor, tol: float) -> SolveInfo:
        """The same with other last residuals, `(batch,)`, which too have to reach `tol` to have converged."""
        last = (~torch.isnan(self.residuals)).cumsum(1).argmax(1, keepdim=True)
        residuals = self.residuals.scatter(1, last, residual[:, None].to(self.residuals))
        return replace(self, residuals=residuals, converged=self.converged & (residual <= tol))

    def shared_by(self, batch: int) -> SolveInfo:
        """The info of one system that `batch` samples form together, given to each of them."""
        return replace(
            self,
            residuals=self.residuals.expand(batch, -1),
            steps=self.steps.expand(batch),
            converged=self.converged.expand(batch),
        )

    def describe_failure(self, what: str, cure: str) -> str:
        """One sentence about the samples that did not converge and what to do."""
        failed = (~self.converged).nonzero()[:, 0].tolist()
        shown = ", ".join(map(str, failed[:8])) + (", …" if len(failed) > 8 else "")
        return (
            f"{what} did not reach its tolerance for {len(failed)} of {len(self.converged)} samples"
            f" (indices {shown}) after {self.evaluations} evaluations;"
            f" largest relative residual {self.residual.max().item():.2g}. {cure}"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Trace(Described):
    """Residual and hidden objective along a plain (Picard) iteration from the initial state.

    Attributes:
        residual: `(batch, steps + 1)` relative residual at each iterate.
        energy: `(batch, steps + 1)` hidden objective at each iterate, or None for maps without one.
        tol: the tolerance of the layer's solver; None for a layer without one.
    """

    residual: Tensor
    energy: Tensor | None
    tol: float | None = None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the residual of every sample and their median on decades, with the tolerance.

        Where there is a hidden objective, the axis to the right has how far it is above its lowest value.

        Args:
            ax: matplotlib's axes to draw on; new ones unless given.

        Raises:
            ConfigError: if matplotlib is missing.
        """
        return pictures().plot_iteration(ax, "plain iteration", self.residual, self.energy, self.tol)

    def _repr_html_(self) -> str:
        samples, iterates = self.residual.shape
        rows = {
            "samples": f"{samples}",
            "iterations": f"{iterates - 1}",
            "residual": f"{_first_to_last(self.residual)}{_tolerance(self.tol)}",
        }
        return html_table("Plain iteration", rows | _objective(self))


@dataclass(frozen=True, slots=True, repr=False)
class Solution(Described):
    """An equilibrium: the readout `value`, the `SolveInfo` and, on request, the `Trace`.

    `state` is what the solve iterated on; most maps read out all of it, and then it is `value` itself.
    """

    value: State
    info: SolveInfo
    state: State
    trace: Trace | None = None

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the trace, see `Trace.plot`, or without one the residuals of the solve, likewise.

        Args:
            ax: matplotlib's axes to draw on; new ones unless given.

        Raises:
            ConfigError: if matplotlib is missing.
        """
        if self.trace is not None:
            return self.trace.plot(ax)
        return pictures().plot_iteration(ax, "iterate of the solve", self.info.residuals, None, self.info.tol)

    def _repr_html_(self) -> str:
        info = self.info
        steps = info.steps.tolist() or [0]
        low, high = min(steps), max(steps)
        largest = residual_text(max(info.residual.tolist(), default=0.0))
        rows = {
            "shape": ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors_of(self.value)),
            "steps": f"{low}" if low == high else f"{low} to {high}",
            "converged": f"{int(info.converged.sum())} of {len(info.converged)} samples",
            "residual": f"{largest}, largest{_tolerance(info.tol)}",
        }
        return html_table("Equilibrium", rows if self.trace is None else rows | _objective(self.trace))


def _objective(trace: Trace) -> dict[str, str]:
    """The row of a hidden objective, where there is one."""
    return {} if trace.energy is None else {"objective": _first_to_last(trace.energy)}


def _first_to_last(values: Tensor) -> str:
    return f"{values[:, 0].mean():.4g} → {values[:, -1].mean():.4g}, mean"


def residual_text(residual: float) -> str:
    """A residual for a reader: 0 is what rounding has left of it."""
    return f"{residual:.1e}" if residual else "0 to the last bit"


def _tolerance(tol: float | None) -> str:
    return "" if tol is None else f"; tolerance {tol:.1e}"


@dataclass(frozen=True, slots=True, repr=False)
class Certificate(Described):
    """A number together with what it can be trusted for.

    Attributes:
        value: `(batch,)` or scalar tensor.
        kind: `"exact"`, `"bound"` (never below the true value) or `"estimate"` (may lie below it).
        assumptions: the conditions under which `kind` is true, one sentence each.
    """

    value: Tensor
    kind: str
    assumptions: tuple[str, ...] = ()


def combined(parts: Sequence[Certificate], value: Tensor) -> Certificate:
    """A bound `value` computed from `parts`: an estimate if one of them is, under all their assumptions."""
    kind = "estimate" if any(part.kind == "estimate" for part in parts) else "bound"
    return Certificate(value, kind, tuple(dict.fromkeys(text for part in parts for text in part.assumptions)))


def largest(parts: Sequence[Certificate]) -> Certificate:
    """The largest of several bounds, sample by sample."""
    return combined(parts, torch.stack([part.value for part in parts]).amax(0))


def tensors_of(state: State) -> tuple[Tensor, ...]:
    """The tensors of a state as a tuple, one per branch."""
    return (state,) if isinstance(state, Tensor) else state


def like(state: S, tensors: tuple[Tensor, ...]) -> S:
    """`tensors` in the form of `state`: bare for one tensor, a tuple for branches."""
    return tensors[0] if isinstance(state, Tensor) else tensors  # type: ignore[return-value]


def map_state(function: Callable[..., Tensor], state: S, *others: S) -> S:
    """Apply `function` branch by branch.

    Raises:
        ShapeError: if the states have different numbers of branches.
    """
    columns = [tensors_of(s) for s in (state, *others)]
    if len({len(c) for c in columns}) != 1:
        raise ShapeError(f"Expected states with {len(columns[0])} branches, got {[len(c) for c in columns]}.")
    return like(state, tuple(function(*row) for row in zip(*columns, strict=True)))


def sample_sums(x: Tensor) -> Tensor:
    """`(batch,)` sum over each sample, in whatever memory layout it has."""
    return x.sum(tuple(range(1, x.dim())))


def squared_norm(state: State) -> Tensor:
    """`(batch,)` squared Euclidean norm of a state, over all branches."""
    return torch.stack([sample_sums(t.square()) for t in tensors_of(state)]).sum(0)


def norm(state: State) -> Tensor:
    """`(batch,)` Euclidean norm of a state, over all branches."""
    return squared_norm(state).sqrt()


def distance(left: State, right: State) -> Tensor:
    """`(batch,)` Euclidean distance of two states, over all branches."""
    return norm(map_state(torch.sub, left, right))
