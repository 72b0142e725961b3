"""How exact the products of a computation have to be."""

from __future__ import annotations

from contextvars import ContextVar

import torch

_allowed: ContextVar[float] = ContextVar("relative error allowed to a product", default=0.0)


class tolerating:
    """Tell all that is computed meanwhile, in this thread, that an equation is solved to a relative `error`.

    Operators may take a faster method whose rounding errors stay well below it. Outside they are as exact as
    the dtype.
    """

    # By hand, since `contextlib.contextmanager` takes several microseconds, at every step of every solve.
    def __init__(self, error: float) -> None:
        self._error = error

    def __enter__(self) -> None:
        self._before = _allowed.set(self._error)

    def __exit__(self, *raised: object) -> None:
        _allowed.reset(self._before)


def tolerated() -> float:
    """The error that the computation at hand is carried out to, 0 where none was named."""
    # What calls compiled code with addresses is not for `torch.compile` to trace, which has ways of its own.
    return 0.0 if torch.compiler.is_compiling() else _allowed.get()
