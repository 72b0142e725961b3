"""The interface of gradient methods and the node that puts them into the autograd graph."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from opteq.equation import Equation, Gradients
from opteq.results import SolveInfo, State, like, map_state, tensors_of
from opteq.solvers.base import FixedPoint
from opteq.tensors.once import once
from opteq.tensors.precision import full_precision
from opteq.tensors.tracing import refuse_batches, refuse_tangents

Report = Callable[[SolveInfo], None]
"""Receives how the solve of an adjoint equation went."""


class GradientMethod:
    """How to differentiate an equilibrium with respect to the tensors of its equation."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules that the method uses; the layer registers them."""
        return ()


class AdjointMethod(GradientMethod, ABC):
    """A gradient computed at the equilibrium alone, whatever way it was found."""

    @property
    def error(self) -> float:
        """The relative rounding error that it allows to products, where less than a solve does."""
        return math.inf

    @abstractmethod
    def pullback(self, equation: Equation, state: State, cotangent: State, report: Report) -> Gradients:
        """Gradients of `⟨cotangent, z*⟩` with respect to `equation.tensors`.

        `equation` and `state` are cut off from the graph; `report` is called once per adjoint solve.
        """


class DirectMethod(GradientMethod, ABC):
    """A gradient that comes from differentiating the very computation of the state.

    Attributes:
        error: the relative rounding error that it allows to products; 0 for that of the dtype.
    """

    error: float = 0.0

    @abstractmethod
    def run(self, equation: Equation) -> tuple[State, SolveInfo]:
        """The state, attached to the graph of `equation.tensors`, and how the iteration went."""


def attach(
    method: AdjointMethod, equation: Equation, detached: Equation, found: FixedPoint, report: Report
) -> State:
    """The value found, with the gradient of `method` towards `equation.tensors`.

    The gradient is taken at the image of that value, which is nearer to the equilibrium.

    Differentiating twice raises `NotImplementedError`: the adjoint is solved for one cotangent and
    its own derivative is not tracked.
    """
    # A map may return one of its tensors or its very argument, and the value is the user's to change.
    value = _apart(found.value, (*detached.tensors, *tensors_of(found.image)))
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in equation.tensors)):
        return value
    found = replace(found, value=value)
    outputs = _Equilibrium.apply(method, detached, found, report, *equation.tensors)
    return like(value, outputs)


def _apart(state: State, others: tuple[Tensor, ...]) -> State:
    """`state`, copied where it shares the memory of `others`."""
    taken = {t.untyped_storage().data_ptr() for t in others}
    return map_state(lambda t: t.clone() if t.untyped_storage().data_ptr() in taken else t, state)


class _Equilibrium(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        method: AdjointMethod,
        equation: Equation,
        found: FixedPoint,
        report: Report,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        # Tensors of their own on the same memory: of views autograd would let no one change the values.
        outputs = tuple(
            t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
            for t in tensors_of(found.value)
        )
        ctx.method, ctx.report = method, report
        # What autograd saves, no one changes unseen, checkpoints recompute, hooks move, and a backward pass
        # lets go of. So the node itself holds only zeros, which take no memory.
        ctx.equation = equation.with_tensors(tuple(t.new_zeros(()).expand(t.shape) for t in tensors))
        ctx.branched = isinstance(found.image, tuple)
        ctx.save_for_backward(*tensors, *tensors_of(found.image))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batches(grad_outputs)
        refuse_tangents(lambda: grad_outputs)
        saved, count = ctx.saved_tensors, len(ctx.equation.tensors)
        tensors, state = saved[:count], saved[count:] if ctx.branched else saved[count]
        wants_graph = torch.is_grad_enabled()
        equation = ctx.equation.with_tensors(tuple(t.detach() for t in tensors))
        cotangent = like(state, tuple(g.detach() for g in grad_outputs))
        # The adjoint is solved in full precision, also where the forward pass ran under autocast.
        with torch.no_grad(), full_precision(grad_outputs[0].device):
            gradients = ctx.method.pullback(equation, state, cotangent, ctx.report)
        if wants_graph:
            # The gradients depend on the tensors and on the cotangent.
            sources = (*tensors, *grad_outputs)
            gradients = tuple(None if g is None else once(g, sources) for g in gradients)
        return (None, None, None, None, *gradients)
