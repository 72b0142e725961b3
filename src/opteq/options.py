"""Option objects: dataclasses whose constructor says what is wrong with the options it is given."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

from opteq.errors import ConfigError

C = TypeVar("C", bound=type)
Kind = TypeVar("Kind")

# What values of the plain types may be: a whole number is a number, numpy's numbers are too.
_PLAIN = {bool: bool, int: Integral, float: Real, str: str, type(None): type(None)}
_NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    type(None): "None",
}
# Costs more than the rest of a constructor, and solvers are made in every backward pass.
_type_hints = functools.cache(get_type_hints)


def strict_options(cls: C) -> C:
    """Class decorator for a dataclass whose constructor refuses what does not fit, with a `ConfigError`.

    That is unknown keywords, to which it answers with a list of the options, and values that are not of
    the plain type (number, truth value, string or None) that an option has.
    """
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        valid = [f.name for f in fields(cls) if f.init]
        unknown = [name for name in kwargs if name not in valid]
        if unknown:
            raise ConfigError(
                f"{cls.__name__} has no option {unknown[0]!r}; it has {', '.join(valid) or 'none'}."
            )
        hints = _type_hints(cls)
        for name, value in (*zip(valid, args, strict=False), *kwargs.items()):
            _check_type(cls, name, value, hints[name])
        original(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def _check_type(cls: type, name: str, value: object, hint: Any) -> None:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if not all(kind in _PLAIN for kind in kinds):
        return
    # A truth value is an integer to Python, but not to a reader.
    fits = [isinstance(value, _PLAIN[kind]) and (kind is bool or type(value) is not bool) for kind in kinds]
    if not any(fits):
        expected = " or ".join(_NAMES[kind] for kind in kinds)
        raise ConfigError(f"Expected `{name}` of {cls.__name__} to be {expected}, got {value!r}.")


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite real number, and no truth value."""
    return isinstance(value, Real) and type(value) is not bool and math.isfinite(value)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, and no truth value."""
    return isinstance(value, Integral) and type(value) is not bool


def check(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise a `ConfigError` about the argument `name` unless `condition` holds."""
    if not condition:
        # A module is many lines, which say less than its class.
        got = type(value).__name__ if "\n" in repr(value) else repr(value)
        raise ConfigError(f"Expected `{name}` to be {expected}, got {got}.")


def check_kind(kind: type[Kind], name: str, value: object, expected: str) -> Kind:
    """`value`, or a `ConfigError` unless the argument `name` is an object of that kind."""
    check(isinstance(value, kind), name, value, expected)
    return value  # type: ignore[return-value]


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise a `ConfigError` unless the argument `name` is one of the `choices`."""
    check(value in choices, name, value, f"one of {', '.join(choices)}")


def check_counts(**counts: object) -> None:
    """Raise a `ConfigError` unless these arguments are whole numbers from 1 to what a tensor may have."""
    for name, value in counts.items():
        check(is_whole(value) and value >= 1, name, value, "a whole number of at least 1")
        check(value < 2**31, name, value, "less than 2³¹")


def check_positive(name: str, value: object) -> None:
    """Raise a `ConfigError` unless the argument `name` is a positive number."""
    check(is_number(value) and value > 0, name, value, "positive and finite")


def check_flag(name: str, value: object) -> None:
    """Raise a `ConfigError` unless the argument `name` is True or False."""
    check(type(value) is bool, name, value, "True or False")


def require(condition: bool, owner: object, name: str, expected: str) -> None:
    """Raise a `ConfigError` about the option `name` of `owner` unless `condition` holds."""
    if not condition:
        value = getattr(owner, name)
        raise ConfigError(f"Expected `{name}` of {type(owner).__name__} to be {expected}, got {value!r}.")


def require_bounded_solve(owner: Any) -> None:
    """Raise a `ConfigError` unless `tol` and `max_steps` of `owner` say when a solve is to stop."""
    require(is_number(owner.tol) and owner.tol > 0, owner, "tol", "positive and finite")
    require(owner.max_steps >= 1, owner, "max_steps", "at least 1")
