"""Functions that tracing compilers are to call, not to follow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which `torch.compile` leaves to Python, with all that it calls.

    As `torch.compiler.disable` does, which however loads the compiler, a second's work, into every process.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # Whoever compiles anything has loaded it already.
        if "torch._dynamo" in sys.modules:
            disabled: Any = torch.compiler.disable(function)
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
