"""Who is measured. Every contender runs one training step of the same function on the same numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families import Call, Family, Map, Tensors
from benchmarks.problem import Problem
from opteq import native
from opteq.layer import EquilibriumLayer, solve_log
from opteq.maps.base import EquilibriumMap
from opteq.results import State, like, map_state, tensors_of
from opteq.solvelog import SolveLog

OURS, WATCHED, PYTORCH = "opteq", "opteq, norm watched", "opteq, PyTorch alone"
IFT, PHANTOM = "torchdeq implicit", "torchdeq phantom"
UNROLLED, LIMIT = "unrolled", "bare operators"

# More than any solve here needs, so that the tolerance alone decides when to stop.
MAX_STEPS = 200


class Contender(ABC):
    """One training step in two halves, `forward` from the leaves to the equilibrium and `backward`.

    Attributes:
        name: how it is called in the table.
        layout: memory layout of images and kernels.
    """

    name: str

    def __init__(self, problem: Problem, layout: str) -> None:
        self.problem, self.layout = problem, layout
        self.leaves = problem.leaves(layout)

    @abstractmethod
    def forward(self) -> Any: ...

    @abstractmethod
    def backward(self, value: Any) -> None: ...

    @abstractmethod
    def evaluations(self) -> tuple[int, int]:
        """Evaluations of `T` in the forward solve and Jacobian products in the backward solve."""

    def reset(self) -> None:
        """Forget the gradients of the last step."""
        for leaf in self.leaves.values():
            leaf.grad = None


class Differentiable(Contender, ABC):
    """A contender that makes a value and gradients, the latter through autograd."""

    def backward(self, value: State) -> None:
        # In the layout that the value has, as what follows a layer hands its gradient back.
        cotangent = map_state(lambda v, w: torch.empty_like(v).copy_(w), value, self.problem.cotangent)
        torch.autograd.backward(tensors_of(value), tensors_of(cotangent))

    def gradients(self) -> Tensors:
        """Gradients of the last step."""
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}


class Ours(Differentiable):
    """`EquilibriumLayer` as it comes, at the cell's tolerance.

    With the name `WATCHED` the library also estimates the norm of `W` at every step, as it does unless told
    otherwise; the ceiling is a shade above the cell's norm, so that the function stays the same. With
    `PYTORCH` it goes without its compiled code, as where there is no C compiler.
    """

    def __init__(self, problem: Problem, layout: str, name: str = OURS) -> None:
        super().__init__(problem, layout)
        cell = problem.cell
        self.name = name
        ceiling = 1.001 * cell.sizes.norm if name == WATCHED else None
        self.layer = equilibrium_layer(cell.family.map(self.leaves, ceiling), cell.tol, MAX_STEPS)

    def forward(self) -> State:
        with self._compiled_code():
            return self.layer(self.leaves["x"])

    def backward(self, value: State) -> None:
        with self._compiled_code():
            super().backward(value)

    @contextmanager
    def _compiled_code(self) -> Iterator[None]:
        before, native.enabled = native.enabled, self.name != PYTORCH
        try:
            yield
        finally:
            native.enabled = before

    def evaluations(self) -> tuple[int, int]:
        log = self.log()
        if log.forward.unconverged or log.adjoint.unconverged:
            raise RuntimeError(f"opteq missed its tolerance within {MAX_STEPS} evaluations: {log}.")
        return log.forward.evaluations, log.adjoint.evaluations

    def log(self) -> SolveLog:
        """The counters of one step."""
        with solve_log(self.layer) as log:
            self.backward(self.forward())
        return log


def equilibrium_layer(equilibrium_map: EquilibriumMap, tol: float, max_steps: int) -> EquilibriumLayer:
    """The layer with the solver and the gradient that the library chooses by itself."""
    default = EquilibriumLayer(equilibrium_map)
    solver, gradient = (
        replace(method, tol=tol, max_steps=max_steps)  # type: ignore[type-var]
        for method in (default.solver, default.gradient)
    )
    return EquilibriumLayer(equilibrium_map, solver, gradient, on_unconverged="count")


class Plain(Differentiable, ABC):
    """A contender that iterates `T` as plain PyTorch functions."""

    _counter: Counter | None = None

    def equation(self) -> tuple[Map, State]:
        """`T` and the state to start from."""
        family = self.problem.cell.family
        return counted(family.equation(self.leaves), self._counter), family.zero(self.leaves)

    def evaluations(self) -> tuple[int, int]:
        self._counter = counter = Counter()
        value = self.forward()
        forward = counter.evaluations
        self.backward(value)
        self._counter = None
        return forward, counter.products


class TorchDEQ(Plain):
    """torchdeq's Anderson solver, and a gradient of torchdeq's.

    Args:
        problem: the cell's tensors.
        layout: memory layout.
        name: how it is called in the table.
        attached: evaluations of `T` that attach the gradient, after the solve.
        options: torchdeq's options of the gradient.
    """

    def __init__(self, problem: Problem, layout: str, name: str, attached: int, **options: Any) -> None:
        super().__init__(problem, layout)
        self.name, self._attached = name, attached
        self._deq = torchdeq_anderson((problem.cell.tol, MAX_STEPS), (problem.cell.tol, MAX_STEPS), **options)

    def forward(self) -> State:
        return run_torchdeq(self._deq, *self.equation())

    def evaluations(self) -> tuple[int, int]:
        forward, backward = super().evaluations()
        return forward - self._attached, backward


def torchdeq_anderson(forward: tuple[float, int], backward: tuple[float, int], **options: Any) -> nn.Module:
    """torchdeq's Anderson solver, with relative tolerance and most evaluations forward and backward."""
    # Not for those who measure opteq alone, and need not have it.
    from torchdeq import get_deq

    return get_deq(
        f_solver="anderson",
        f_tol=forward[0],
        f_max_iter=forward[1],
        f_stop_mode="rel",
        b_solver="anderson",
        b_tol=backward[0],
        b_max_iter=backward[1],
        b_stop_mode="rel",
        **options,
    )


def run_torchdeq(deq: nn.Module, T: Map, z: State) -> State:
    """Solve `z = T(z)` in the layout of `z`.

    A channels-last state is handed over as `(batch, H, W, C)`, so that torchdeq's flattening needs no
    copies, as it would for `(batch, C, H, W)`.
    """
    if all(t.is_contiguous() for t in tensors_of(z)):
        return _last_state(deq, T, z)

    def from_pixels(state: State) -> State:
        return map_state(_pixels_first, T(map_state(_channels_first, state)))

    return map_state(_channels_first, _last_state(deq, from_pixels, map_state(_pixels_first, z)))


def _last_state(deq: nn.Module, T: Map, z: State) -> State:
    if isinstance(z, Tensor):
        return deq(T, z)[0][-1]
    # torchdeq takes a map of several tensors as a function of several arguments.
    return tuple(deq(lambda *branches: T(branches), z)[0][-1])


class Unrolled(Plain):
    """Plain iterations, and backpropagation through all of them."""

    name = UNROLLED

    def __init__(self, problem: Problem, layout: str, steps: int) -> None:
        super().__init__(problem, layout)
        self._steps = steps

    def forward(self) -> State:
        T, z = self.equation()
        for _ in range(self._steps):
            z = T(z)
        return z


class Limit(Contender):
    """The bare operators, without anything between them, for as many evaluations as ours makes.

    Forward: `U x` and the operators of `T(0)`, then `W` and `Wᵀ` (and the Gram matrix of kernel maps) per
    evaluation. Backward: the same per Jacobian product, then the gradients. Nothing depends on what came
    before, so values neither grow nor vanish.
    """

    name = LIMIT

    def __init__(self, problem: Problem, layout: str, forward: int, backward: int) -> None:
        super().__init__(problem, layout)
        family = problem.cell.family
        self._counts = forward, backward
        with torch.no_grad():
            self._start = family.bare_injection(self.leaves) + family.bare_first(self.leaves)
            self._evaluation, self._product = self._calls(family)
            self._gradients = family.bare_gradients(self.leaves)

    def _calls(self, family: Family) -> tuple[list[Call], list[Call]]:
        """Those of one evaluation, and of one product with the Jacobian."""
        return family.bare_evaluation(self.leaves), family.bare_product(self.leaves)

    def forward(self) -> None:
        _run(self._start, 1)
        _run(self._evaluation, self._counts[0])

    def backward(self, value: None) -> None:
        _run(self._product, self._counts[1])
        _run(self._gradients, 1)

    def evaluations(self) -> tuple[int, int]:
        return self._counts


@torch.no_grad()
def _run(calls: list[Call], times: int) -> None:
    for _ in range(times):
        for call in calls:
            call()


class Counter:
    """How often a map was evaluated and how often its Jacobian was multiplied with."""

    def __init__(self) -> None:
        self.evaluations = self.products = 0


def counted(T: Map, counter: Counter | None) -> Map:
    """`T`, counted if there is a counter."""
    if counter is None:
        return T

    def ticking(z: State) -> State:
        first, *others = tensors_of(z)
        return T(like(z, (_Tick.apply(first, counter), *others)))

    return ticking


class _Tick(torch.autograd.Function):
    """The identity; counts how often it is evaluated and how often it is differentiated."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, counter: Counter) -> Tensor:
        counter.evaluations += 1
        ctx.counter = counter
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        ctx.counter.products += 1
        return grad_outputs[0], None


def _pixels_first(image: Tensor) -> Tensor:
    """`(batch, C, H, W) ↦ (batch, H, W, C)`."""
    return image.permute(0, 2, 3, 1)


def _channels_first(image: Tensor) -> Tensor:
    """`(batch, H, W, C) ↦ (batch, C, H, W)`."""
    return image.permute(0, 3, 1, 2)
