"""What is told to those who record operations: tracers and compilers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from opteq.errors import ConfigError

_REVERSE_ALONE = (
    "The solve of an equilibrium is differentiated in reverse mode, by torch.autograd, and not by torch.func;"
    " a layer with gradient=Unrolled(steps) has derivatives of forward mode and of higher order too."
)

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which `torch.compile` leaves to Python, with all that it calls.

    As `torch.compiler.disable` does, which however loads the compiler, a second's work, into every process.
    """
    disabled: Any = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        # Whoever compiles anything has loaded it already. Made once, since another one is compiled anew.
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(function)
        return (disabled or function)(*args, **kwargs)

    return call


def tracing() -> bool:
    """Whether operations are recorded to be done again, by `torch.jit.trace` or `torch.export`."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()


def recorded() -> bool:
    """Whether operations are recorded, for gradients or a trace, so that nothing is to be overwritten."""
    return torch.is_grad_enabled() or tracing()


class unrecorded:
    """Keeps what is computed meanwhile out of a trace, for which it is constant."""

    def __enter__(self) -> None:
        self._state = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]

    def __exit__(self, *raised: object) -> None:
        torch._C._set_tracing_state(self._state)  # type: ignore[attr-defined]


def refuse_tracing() -> None:
    """Refuse to have a solve recorded, or transformed.

    Raises:
        ConfigError: if operations are traced, or transformed by `torch.func`.
    """
    if tracing():
        raise ConfigError(
            "The solve of an equilibrium cannot be traced, since the number of its steps depends on the"
            " input; trace a layer with gradient=Unrolled(steps), which takes the same steps for all."
        )
    if torch._C._are_functorch_transforms_active():
        raise ConfigError(_REVERSE_ALONE)


def refuse_tangents(tensors: Callable[[], tuple[Tensor, ...]]) -> None:
    """Refuse to lose the tangents of what a solve depends on, `tensors()`.

    Raises:
        ConfigError: if there are any, for forward-mode differentiation.
    """
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors()):
        raise ConfigError(_REVERSE_ALONE)


def refuse_batches(gradients: tuple[Tensor, ...]) -> None:
    """Refuse to solve for many cotangents of one equilibrium at a time.

    Raises:
        NotImplementedError: if gradients are batched, as `is_grads_batched` and `vectorize` have it.
    """
    if any(map(is_legacy_batchedtensor, gradients)):
        raise NotImplementedError(
            "The adjoint of an equilibrium is solved for one cotangent at a time; differentiate without"
            " vectorize=True and is_grads_batched=True, or use gradient=Unrolled(steps)."
        )
