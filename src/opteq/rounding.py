"""How exact the products of a computation have to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_allowed: ContextVar[float] = ContextVar("relative error allowed to a product", default=0.0)


@contextmanager
def tolerating(error: float) -> Iterator[None]:
    """Tell all that is computed meanwhile, in this thread, that an equation is solved to a relative `error`.

    Operators may take a faster method whose rounding errors stay well below it. Outside they are as exact as
    the dtype.
    """
    before = _allowed.set(error)
    try:
        yield
    finally:
        _allowed.reset(before)


def tolerated() -> float:
    """The error that the computation at hand is carried out to, 0 where none was named."""
    return _allowed.get()
