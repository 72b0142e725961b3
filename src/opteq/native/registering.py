"""Compiled functions as operators of PyTorch, `torch.ops.opteq`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled

P = ParamSpec("P")
R = TypeVar("R")

_NAMESPACE = torch.library.Library("opteq", "DEF")


def operator(schema: str, fake: Callable | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function of tensors an operator, which profilers see under its name.

    Calls go by way of PyTorch's dispatcher only where a profiler looks on: it takes several microseconds, as
    long as some of the functions themselves. Nothing else that listens to the dispatcher is there where
    compiled code serves.

    Args:
        schema: name, arguments and results.
        fake: what results look like for tensors without memory, unless there are none, or numbers alone.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        name = schema.partition("(")[0]
        _NAMESPACE.define(schema)
        _NAMESPACE.impl(name, function, "CPU")
        seen = (lambda *_: None) if schema.endswith("-> ()") else fake
        if seen is not None:
            torch.library.register_fake(f"opteq::{name}", seen, lib=_NAMESPACE)
        registered = getattr(torch.ops.opteq, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return (registered if _profiler_enabled() else function)(*args, **kwargs)

        return call

    return register
