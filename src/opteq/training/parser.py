"""A parser of nested classes whose time does not grow with the power of their depth."""

from __future__ import annotations

from contextvars import ContextVar
from copy import deepcopy
from typing import Any

from jsonargparse import Namespace
from jsonargparse._common import lenient_check  # pyright: ignore[reportPrivateImportUsage]
from lightning.pytorch.cli import LightningArgumentParser

# What has been parsed in the present call of `parse_args`, by parser and input.
_parsed: ContextVar[dict[tuple, Namespace] | None] = ContextVar("parsed", default=None)


class OnceParser(LightningArgumentParser):
    """Lightning's parser, which parses the same object once.

    The options of a class are parsed as earlier values, as new ones, as defaults and for validation, and
    each time those of the classes inside them too: up to 4ᵈ times for one at depth d. A coupled map of units
    of operators of norms has d = 6, and took seconds. Nothing is kept beyond a call of `parse_args`, since a
    value may be the name of a file.
    """

    def parse_args(self, *args: Any, **kwargs: Any) -> Namespace:
        if _parsed.get() is not None:  # options of options, such as --model.network.body, get here too
            return super().parse_args(*args, **kwargs)
        token = _parsed.set({})
        try:
            return super().parse_args(*args, **kwargs)
        finally:
            _parsed.reset(token)

    def parse_object(self, obj: Any, namespace: Namespace | None = None, **kwargs: Any) -> Namespace:  # pyright: ignore[reportIncompatibleMethodOverride]
        known = _parsed.get()
        if known is None:
            return super().parse_object(obj, namespace, **kwargs)
        # Where it is lenient, the parser lets required options be missing.
        key = (id(self), repr(obj), repr(namespace), repr(kwargs), lenient_check.get())
        if key not in known:
            known[key] = super().parse_object(obj, namespace, **kwargs)
        return deepcopy(known[key])
