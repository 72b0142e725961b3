"""Immutable objects that hold tensors: what equations, similarities and couplings are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any, Self

from torch import Tensor

from opteq.errors import ConfigError

CONSTANT = {"constant": True}
"""Metadata of a field of tensors that nothing is differentiated by: `field(metadata=CONSTANT)`."""


class HoldsTensors:
    """A frozen dataclass whose tensors are those of its fields, in their order.

    A field may be a tensor, another object with `tensors`, or a tuple of such. All else is passed over, as
    are fields with the metadata `CONSTANT`.
    """

    __slots__ = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that the object depends on differentiably."""
        return tuple(t for name in _names(type(self)) for t in _held(getattr(self, name)))

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        """The same object with other values of `tensors`."""
        rest = iter(tensors)
        values = {name: _filled(getattr(self, name), rest) for name in _names(type(self))}
        return replace(self, **values)  # type: ignore[type-var]

    def detach(self) -> Self:
        """The same object cut off from the autograd graph."""
        return self.with_tensors(tuple(t.detach() for t in self.tensors))


@cache
def _names(kind: type[HoldsTensors]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind) if f.init and not f.metadata.get("constant"))  # type: ignore[arg-type]


def _held(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, tuple):
        return tuple(t for part in value for t in _held(part))
    if isinstance(value, list | dict) and _held(tuple(value.values() if isinstance(value, dict) else value)):
        raise ConfigError(
            f"Expected tensors in fields, or in tuples there, got a {type(value).__name__} of them."
        )
    return getattr(value, "tensors", ())


def _filled(value: Any, rest: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(rest)
    held = _held(value)
    if not held:
        return value
    if not isinstance(value, tuple):
        return value.with_tensors(tuple(next(rest) for _ in held))
    parts = [_filled(part, rest) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
