"""What classes of others change of the classes that they are derived from."""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import takewhile

# Names by which nothing is computed, and special ones by which something is.
_SILENT = {"extra_repr", "reset_parameters", "title", "_abc_impl"}
_SPECIAL = {"__call__", "__getattr__", "__getattribute__", "__getitem__", "__iter__", "__len__"}


def definer(cls: type, name: str) -> type:
    """The class that defines an attribute of `cls`."""
    return next(base for base in cls.__mro__ if name in vars(base))


def known_class(part: object) -> type:
    """The nearest class of an object that is one of opteq or `torch.nn`."""
    return next((base for base in type(part).__mro__ if _is_known(base)), object)


def overridden(part: object, base: type, free: tuple[str, ...] = ()) -> str | None:
    """A name that an object, or a class of others before `base`, gives another meaning than `base` does.

    What `base` says of itself need not hold for the object then. None where there is no such name.

    Args:
        part: the object.
        base: one of its classes.
        free: names that may be overridden all the same.
    """
    # A method may be replaced on the object alone.
    attached = getattr(part, "__dict__", {}).keys() & _methods(type(part)) & _meanings(base)
    return next((name for name in attached if name not in free), None) or _changed(type(part), base, free)


# Operators ask at every use.
@lru_cache(512)
def _changed(cls: type, base: type, free: tuple[str, ...]) -> str | None:
    between = takewhile(lambda other: other is not base, cls.__mro__)
    names = [
        n for other in between if not _is_known(other) and not _is_parametrized(other) for n in vars(other)
    ]
    return next((name for name in names if name in _meanings(base) and name not in free), None)


@lru_cache(512)
def _methods(cls: type) -> frozenset[str]:
    return frozenset(n for n in dir(cls) if inspect.isfunction(inspect.getattr_static(cls, n)))


@lru_cache(512)
def _meanings(cls: type) -> frozenset[str]:
    """The names by which a class computes something."""
    return frozenset(n for n in dir(cls) if n in _SPECIAL or not n.startswith("__")) - _SILENT


def _is_known(cls: type) -> bool:
    return cls.__module__.startswith(("opteq.", "torch.nn.")) and not _is_parametrized(cls)


def _is_parametrized(cls: type) -> bool:
    """Whether it is what `torch.nn.utils.parametrize` puts before the class of a module."""
    return cls.__module__ == "torch.nn.utils.parametrize"
