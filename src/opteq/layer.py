"""`EquilibriumLayer`: a map, a solver and a gradient method as one `torch.nn.Module`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from opteq.equation import Equation
from opteq.errors import ConfigError, ConvergenceError, NonFiniteError, ShapeError
from opteq.gradients.base import AdjointMethod, DirectMethod, GradientMethod, attach
from opteq.gradients.implicit import Implicit
from opteq.maps.base import EquilibriumMap, expect_map
from opteq.options import check_choice, check_flag, check_kind
from opteq.results import Solution, SolveInfo, State, Trace, map_state
from opteq.solvelog import SolveLog
from opteq.solvers.anderson import Anderson
from opteq.solvers.base import FixedPoint, Solver, find_fixed_point, tolerance_knob
from opteq.solvers.space import relative_change
from opteq.tensors.tracing import refuse_samples, refuse_tangents, refuse_tracing, tracing, untraced

_CURES = {
    "forward": "Raise `max_steps`, loosen `tol`, or lower the norm of the operators.",
    "adjoint": "Raise `max_steps` or loosen `tol` of Implicit(), or switch to gradient=Unrolled(steps).",
}
_NAMES = {"forward": "The equilibrium solve", "adjoint": "The adjoint solve of the backward pass"}
_GRADIENT = "a gradient method such as Implicit()"
_SOLVER = "a solver such as Anderson()"


class EquilibriumLayer(nn.Module):
    """The equilibrium `z* = T(z*; x)` of a map, with gradients to the input and to all parameters.

    Gradients work in train and in eval mode alike. There are no tensor hooks and no state is kept
    between calls, so a layer may be shared, called several times before a backward pass, copied and
    pickled. What a backward pass needs is saved with autograd: it goes after that pass, though the loss
    is kept, and `torch.utils.checkpoint` and saved-tensor hooks work.

    Args:
        map: the equilibrium map, which holds the parameters.
        solver: how to find the equilibrium; `Anderson()` unless given.
        gradient: how to differentiate it; `Implicit()` unless given.
        on_unconverged: what to do when a sample, in the forward or in the adjoint solve, misses the
            tolerance: `"count"` (see `solve_log`), `"warn"` or `"raise"`.

    Raises:
        ConfigError: for an unknown `on_unconverged`, objects of the wrong kind, or a solver beside
            `Unrolled`, which replaces the solve.
    """

    def __init__(
        self,
        map: EquilibriumMap,
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
        on_unconverged: str = "warn",
    ) -> None:
        super().__init__()
        gradient = Implicit() if gradient is None else gradient
        expect_map(map)
        check_kind(GradientMethod, "gradient", gradient, _GRADIENT)
        if isinstance(gradient, DirectMethod):
            if solver is not None:
                raise ConfigError(f"{type(gradient).__name__} replaces the solve; leave out `solver`.")
        else:
            solver = Anderson() if solver is None else solver
            check_kind(Solver, "solver", solver, _SOLVER)
        check_choice("on_unconverged", on_unconverged, ("count", "warn", "raise"))
        self.map, self.solver, self.gradient = map, solver, gradient
        self.on_unconverged = on_unconverged
        # Parts of the gradient method that are modules follow the layer's mode, device and state.
        self.gradient_modules = nn.ModuleList(gradient.modules)
        self._logs: list[SolveLog] = []

    @untraced
    def forward(self, x: State) -> State:
        """The equilibrium's readout, a tensor (a tuple of tensors for maps of several branches).

        Raises:
            NonFiniteError: if `x` has NaN or infinite values; the message names the samples.
            ShapeError: if `x` does not fit the map.
            ConvergenceError: with `on_unconverged="raise"`, if a sample missed the tolerance.
        """
        equation, state, _ = self._equilibrium(x)
        return equation.readout(state)

    @untraced
    def solve(self, x: State, trace: bool = False) -> Solution:
        """The equilibrium with the record of how it was reached; raises as `forward` does.

        Args:
            x: the input.
            trace: also record residual and hidden objective along a plain iteration from the start.
        """
        check_flag("trace", trace)
        equation, state, info = self._equilibrium(x)
        steps = self.solver.max_steps if self.solver else info.evaluations
        record = trace_iteration(equation, steps, info.tol) if trace else None
        return Solution(equation.readout(state), info, state, record)

    def bind(self, x: State, error: float = 0.0) -> Equation:
        """The equation that is solved for `x`; with no `error` allowed for certificates and objectives."""
        _check_input(x, next(self.map.parameters(), None))
        if tracing():
            # The trace is for inputs of this size, as norms are, and is to refuse others.
            x = map_state(lambda t: t.reshape(t.shape[0], *map(int, t.shape[1:])), x)
        return self.map.bind(x, error)

    @property
    def error(self) -> float:
        """The relative rounding error that products in `forward` may have.

        They need be no more exact than what is solved with them, forwards and backwards.
        """
        if isinstance(self.gradient, AdjointMethod) and self.solver is not None:
            return min(self.solver.tol, self.gradient.error)
        return self.gradient.error if isinstance(self.gradient, DirectMethod) else 0.0

    def _equilibrium(self, x: State) -> tuple[Equation, State, SolveInfo]:
        if isinstance(self.gradient, DirectMethod):
            equation = self.bind(x, self.error)
            state, info = self.gradient.run(equation)
            self._report("forward", info)
        else:
            refuse_tracing()
            # Both may have been assigned since the layer was made.
            gradient = check_kind(AdjointMethod, "gradient", self.gradient, _GRADIENT)
            solver = check_kind(Solver, "solver", self.solver, _SOLVER)
            equation = self.bind(x, self.error)
            refuse_tangents(lambda: equation.tensors)
            detached = equation.detach()
            _check_autocast(solver, detached.tensors[0].device)
            found = _found(solver, detached)
            info = found.info
            self._report("forward", info)
            state = attach(gradient, equation, detached, found, partial(self._report, "adjoint"))
        return equation, state, info

    def _report(self, kind: str, info: SolveInfo) -> None:
        for log in self._logs:
            getattr(log, kind).add(info)
        if self.on_unconverged == "count" or tracing() or bool(info.converged.all()):
            return
        message = info.describe_failure(_NAMES[kind], _CURES[kind])
        if self.on_unconverged == "raise":
            raise ConvergenceError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def __getstate__(self) -> dict:
        # A copy does not go on writing into the logs of the original.
        return {**super().__getstate__(), "_logs": []}  # type: ignore[misc]

    def extra_repr(self) -> str:
        return f"solver={self.solver}, gradient={self.gradient}"


@torch.no_grad()
def trace_iteration(equation: Equation, steps: int, tol: float | None = None) -> Trace:
    """Residual and hidden objective of `steps` plain iterations from the initial state.

    `tol` is the tolerance to note down.
    """
    equation = equation.detach()
    z = equation.initial()
    residuals, energies = [], []
    for _ in range(steps + 1):
        following = equation(z)
        residuals.append(relative_change(z, following))
        if equation.objective is not None:
            energies.append(equation.objective(z))
        z = following
    return Trace(torch.stack(residuals, 1), torch.stack(energies, 1) if energies else None, tol)


@contextmanager
def solve_log(module: nn.Module, log: SolveLog | None = None) -> Iterator[SolveLog]:
    """Count the forward and adjoint solves of every `EquilibriumLayer` inside `module` while active.

    Args:
        module: what holds the layers.
        log: where to count; a fresh log unless given. The `add` of its counters sees every solve.

    Raises:
        ConfigError: if `module` is no torch module.
    """
    check_kind(nn.Module, "module", module, "a torch module that holds the layers")
    log = SolveLog() if log is None else log
    layers = [m for m in module.modules() if isinstance(m, EquilibriumLayer)]
    for layer in layers:
        layer._logs.append(log)
    try:
        yield log
    finally:
        for layer in layers:
            layer._logs = [other for other in layer._logs if other is not log]


def _found(solver: Solver, equation: Equation) -> FixedPoint:
    """The fixed point of an equation that is cut off from the graph."""
    with torch.no_grad():
        form = equation.reformulate(solver.needs_gradient_map)
    found = find_fixed_point(
        form.function, form.initial, solver, form.scale, equation.batch_coupled, form.first
    )
    if form.recover is None:
        return found
    with torch.no_grad():
        z = form.recover(found.image)
        if not form.measured:
            return FixedPoint(z, z, found.info)
        before = form.recover(found.value)
    return FixedPoint(before, z, found.info.ending_with(relative_change(before, z), solver.tol))


def _check_input(x: State, parameter: Tensor | None) -> None:
    dtype = None if parameter is None else parameter.dtype
    for tensor in x if isinstance(x, tuple) else (x,):
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            got = "()" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ShapeError(f"Expected `x` to be a tensor of shape (batch, ...), got {got}.")
        if 0 in tensor.shape[1:]:
            got = tuple(tensor.shape)
            raise ShapeError(f"Expected samples of `x` that are not empty, got `x` of shape {got}.")
        if not tensor.is_floating_point():
            cure = "" if tensor.is_complex() else "; use x.float()"
            raise ShapeError(f"Expected `x` of floating-point numbers, got {tensor.dtype}{cure}.")
        refuse_samples(tensor)
        if tensor.is_meta:
            raise ShapeError(
                "Expected `x` with numbers, on which the steps of a solve depend, got a tensor on the meta"
                " device, which has none; give `x` on another one, with the layer moved there by to_empty."
            )
        if parameter is not None and parameter.is_meta:
            raise ShapeError(
                "Expected parameters with numbers, got those of a layer on the meta device: give it some by"
                " to_empty and load_state_dict, or, where accelerate has offloaded them, ask it for"
                ' preload_module_classes=["EquilibriumLayer"].'
            )
        if parameter is not None and parameter.device != tensor.device:
            raise ShapeError(
                f"Expected `x` on {parameter.device}, where the layer's parameters are, got {tensor.device};"
                f" convert `x` with x.to({str(parameter.device)!r})."
            )
        if dtype not in (None, tensor.dtype) and not torch.is_autocast_enabled(tensor.device.type):
            raise ShapeError(
                f"Expected `x` of the {dtype} that the layer's parameters have, got {tensor.dtype};"
                f" convert `x` with x.to({dtype}) or the layer with layer.to({tensor.dtype})."
            )
        if tracing():
            continue
        # A sum is finite only if its terms are, and costs a fraction of looking at each of them.
        if math.isfinite(tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)).item()):
            continue
        finite = torch.isfinite(tensor[:, None]).flatten(1).all(1)
        if not bool(finite.all()):
            bad = (~finite).nonzero()[:, 0].tolist()
            shown = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
            raise NonFiniteError(
                f"Expected finite inputs, got NaN or infinite values in samples {shown}; clean or drop them."
            )


def _check_autocast(solver: Solver, device: torch.device) -> None:
    if not torch.is_autocast_enabled(device.type):
        return
    dtype = torch.get_autocast_dtype(device.type)
    floor = torch.finfo(dtype).eps
    if solver.tol < floor:
        raise ConfigError(
            f"tol={solver.tol:g} cannot be reached under {str(dtype).removeprefix('torch.')} autocast;"
            f" use at least {floor:.1g}, or call the layer on x.float()"
            f' within torch.autocast("{device}", enabled=False). {tolerance_knob("solver", f"{floor:.1g}")}.'
        )
