"""Option objects: dataclasses whose constructor names the valid options when given an unknown one."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, TypeVar

from opteq.errors import ConfigError

C = TypeVar("C", bound=type)


def strict_options(cls: C) -> C:
    """Class decorator for a dataclass: unknown keywords raise a `ConfigError` that lists the options."""
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        valid = [f.name for f in fields(cls) if f.init]
        unknown = [name for name in kwargs if name not in valid]
        if unknown:
            raise ConfigError(
                f"{cls.__name__} has no option {unknown[0]!r}; it has {', '.join(valid) or 'none'}."
            )
        original(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def require(condition: bool, owner: object, name: str, expected: str) -> None:
    """Raise a `ConfigError` about the option `name` of `owner` unless `condition` holds."""
    if not condition:
        value = getattr(owner, name)
        raise ConfigError(f"Expected `{name}` of {type(owner).__name__} to be {expected}, got {value!r}.")
