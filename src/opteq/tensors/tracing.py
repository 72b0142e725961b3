"""What is told to those who record operations: tracers and compilers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad

from opteq.errors import ConfigError

_REVERSE_ALONE = (
    "opteq differentiates the solve of an equilibrium, and the norm of a `W` under Ceiling(), in reverse"
    " mode, by torch.autograd, and not by torch.func; a layer with gradient=Unrolled(steps) has derivatives"
    " of forward mode and of higher order too, and with another `norm` or max_norm=None those of torch.func."
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
            "opteq's solve of an equilibrium cannot be traced, since the number of its steps depends on the"
            " input; trace a layer with gradient=Unrolled(steps), which takes the same steps for all."
        )
    refuse_transforms()


def forward_mode() -> bool:
    """Whether forward-mode differentiation is at work."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._are_functorch_transforms_active()


def refuse_transforms() -> None:
    """Refuse to be transformed.

    Raises:
        ConfigError: within a transform of `torch.func`.
    """
    if transforming():
        raise ConfigError(_REVERSE_ALONE)


def refuse_samples(x: Tensor) -> None:
    """Refuse an input that stands for many, or has many tangents.

    Raises:
        ConfigError: for a sample that `torch.vmap` hands over, or forward mode with `vectorize=True`.
    """
    if is_batchedtensor(x):
        raise ConfigError(
            "opteq's layers take a batch as it is, and look at its numbers, which torch.vmap does not allow;"
            " call them on the whole batch instead."
        )
    tangent = forward_ad.unpack_dual(x).tangent if forward_mode() else None
    if tangent is not None and is_legacy_batchedtensor(tangent):
        raise ConfigError(
            "opteq's layers take one tangent at a time; leave out vectorize=True or strategy='forward-mode':"
            " backwards, a layer with gradient=Unrolled(steps) takes many at once."
        )


def refuse_tangents(tensors: Callable[[], tuple[Tensor, ...]]) -> None:
    """Refuse to lose the tangents of what a solve depends on, `tensors()`.

    Raises:
        ConfigError: if there are any, for forward-mode differentiation.
    """
    if forward_mode() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors()):
        raise ConfigError(_REVERSE_ALONE)


def refuse_batches(gradients: tuple[Tensor, ...]) -> None:
    """Refuse to solve for many cotangents of one equilibrium at a time.

    Raises:
        NotImplementedError: if gradients are batched, as `is_grads_batched` and `vectorize` have it.
    """
    if any(is_legacy_batchedtensor(g) or is_batchedtensor(g) for g in gradients):
        raise NotImplementedError(
            "opteq solves the adjoint of an equilibrium for one cotangent at a time; differentiate without"
            " vectorize=True, is_grads_batched=True and torch.vmap, or use gradient=Unrolled(steps)."
        )
