"""Objects built from what a configuration says: class paths and their arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import is_dataclass
from inspect import isclass, signature
from pydoc import ErrorDuringImport, locate
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import nn

from opteq.errors import ConfigError
from opteq.options import check_counts

_OPTIMIZER = re.compile(r"torch\.optim\.\w+")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def known(name: str, count: int | None) -> int:
    """`count`, or a `ConfigError` unless it is a whole number of at least 1.

    None stands for a number that was left open and should have followed from the parts before.
    """
    if count is None:
        raise ConfigError(
            f"Expected `{name}` to be a whole number of at least 1, got None, for none follows from the parts"
            " before, as with branches of unequal channels."
        )
    check_counts(**{name: count})
    return count


def complete(network: Any, in_channels: int, classes: int) -> None:
    """Fill in the numbers of a network that were left out and follow from others, see `ImageClassifier`.

    Args:
        network: its configuration, a mapping with `class_path` and `init_args`; changed in place. Its classes
            are imported.
        in_channels: channels of the images.
        classes: number of classes.
    """
    _fill(network, in_channels=in_channels, classes=classes)
    parts = network.get("init_args") or {}
    stem, body, head = (parts.get(name) for name in ("stem", "body", "head"))
    channels = in_channels
    for stage in _stages(stem):
        channels = _fill(stage, in_channels=channels, channels=None)
    _fill(body, channels=channels)
    _fill(head, channels=_read_from(body, channels), classes=classes)


def _read_from(body: Any, channels: int | None) -> int | None:
    """The channels of what a body gives: those of its state unless its hidden variable is read."""
    arguments = (body or {}).get("init_args") or {}
    if arguments.get("readout") != "hidden":
        return channels
    cls = locate(body["class_path"])
    of_hidden = getattr(cls, "hidden_channels", None)
    # A body of somebody else may mean something else by these options.
    if not callable(cls) or of_hidden is None:
        return channels
    return of_hidden(arguments.get("hidden", signature(cls).parameters["hidden"].default))


def _stages(stem: Any) -> list[Any]:
    """The stem, or if it is a `Stack` the modules in it, which read one another's channels."""
    if stem is None or "class_path" not in stem:
        return [stem]
    return (stem.get("init_args") or {}).get("modules") or [stem]


def fill_channels(data: Any, network: Any) -> None:
    """Fill in the channels of the images that a data set is to give, where its network names them.

    Args:
        data: configuration of the data set, a mapping with `class_path` and `init_args`; changed in place.
        network: configuration of the network.
    """
    stem = (network.get("init_args") or {}).get("stem")
    parts = [part for part in (network, stem) if part is not None and "class_path" in part]
    named = [(part.get("init_args") or {}).get("in_channels") for part in parts]
    _fill(data, in_channels=next((number for number in named if number is not None), None))


def _fill(spec: Any, **numbers: int | None) -> int | None:
    """Give the class of `spec` the `numbers` that it takes and has not got; returns its `channels`."""
    if spec is None or "class_path" not in spec:
        return None
    cls = locate(spec["class_path"])
    accepted = signature(cls).parameters if callable(cls) else {}
    arguments = spec.get("init_args") or {}
    for name, number in numbers.items():
        if name in accepted and number is not None and arguments.get(name) is None:
            arguments[name] = number
            spec["init_args"] = arguments
    default = accepted["channels"].default if "channels" in accepted else None
    return arguments.get("channels", default)


def build(spec: Any, trust: bool = False) -> Any:
    """Build what a `class_path` with its `init_args` describes, here and in nested arguments.

    By the annotations of a class an import path stands for a function or a class where it takes those and no
    text, and a mapping of options for a dataclass.

    Args:
        spec: plain values, in which mappings with a `class_path` stand for objects.
        trust: build objects of any class that can be imported, not only of opteq's and of the modules of
            `torch.nn`.

    Raises:
        ConfigError: A class or a function is not trusted, there is none of that name, or it does not take the
            arguments.
    """
    if not trust:
        for class_path in _class_paths(spec):
            _check_root(class_path)
    return _built(spec, trust)


def check_trusted(config: Mapping[str, Any]) -> None:
    """Refuse options of a run that name a class which `build` does not trust, before anything is imported.

    Raises:
        ConfigError: There is one; the message says how to trust it.
    """
    # The parser takes names alone for classes and functions too; the options of data have texts of their own.
    data = config.get("data")
    named = [config.get("model"), config.get("trainer"), data if isinstance(data, str) else None]
    texts = [part for part in _parts(named) if isinstance(part, str)]
    for path in (*_class_paths(config), *filter(_IMPORT_PATH.fullmatch, texts)):
        _check_root(path)


def _built(spec: Any, trust: bool) -> Any:
    if isinstance(spec, list):
        return [_built(item, trust) for item in spec]
    if not isinstance(spec, Mapping) or "class_path" not in spec:
        return spec
    class_path, arguments = spec["class_path"], spec.get("init_args") or {}
    if not isinstance(class_path, str) or not isinstance(arguments, Mapping):
        raise ConfigError(f"Expected a class_path with a mapping of init_args, got {dict(spec)}.")
    cls = _find(class_path, trust)
    kinds = _kinds(cls)
    arguments = {name: _argument(value, kinds.get(name, ()), trust) for name, value in arguments.items()}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise ConfigError(f"Could not build {class_path}: {error}.") from error


def _argument(value: Any, kinds: Collection[Any], trust: bool) -> Any:
    """An argument of one of some kinds.

    Where these are functions or classes, a text is the name of one. Where one is a dataclass, a mapping
    without a `class_path` has its options, as the parser of the command writes them.
    """
    named = str not in kinds and not {Callable, type}.isdisjoint(get_origin(k) or k for k in kinds)
    if named and isinstance(value, str):
        return _find_named(value, trust)
    options = next((kind for kind in kinds if isclass(kind) and is_dataclass(kind)), None)
    if options is not None and isinstance(value, Mapping) and "class_path" not in value:
        return options(**{name: _built(part, trust) for name, part in value.items()})
    return _built(value, trust)


def _kinds(cls: Any) -> dict[str, tuple[Any, ...]]:
    """What each argument of a class may be, by its annotation."""
    try:
        hints = get_type_hints(cls.__init__)
    except (NameError, TypeError):  # annotations for type checkers alone
        return {}
    return {
        name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        for name, hint in hints.items()
    }


def _find_named(path: str, trust: bool) -> Any:
    if not trust:
        _check_root(path)
    return _find(path, trust)


def _find(class_path: str, trust: bool) -> Any:
    try:
        cls = locate(class_path)
    except ErrorDuringImport as error:
        raise ConfigError(f"{class_path} cannot be imported: {error}.") from error
    if cls is None:
        whose = "This version of opteq has no" if class_path.startswith("opteq.") else "There is no"
        raise ConfigError(f"{whose} {class_path}.")
    # A module of opteq also holds what it imports from elsewhere.
    own = isclass(cls) and cls.__module__.startswith("opteq.")
    layer = isclass(cls) and issubclass(cls, nn.Module) and cls.__module__.startswith("torch.nn.modules.")
    if not (own or layer or (trust and callable(cls))):
        raise ConfigError(f"{class_path} is not a class of opteq or a module of torch.nn.")
    return cls


def _check_root(class_path: str) -> None:
    if not (class_path.startswith(("opteq.", "torch.nn.")) or _OPTIMIZER.fullmatch(class_path)):
        raise ConfigError(
            f"It uses {class_path}, and only classes of opteq and torch.nn are built unless you trust where"
            " it comes from; if you do, use opteq.load(RUN, trust=True), or --trust true on the command line."
        )


def _class_paths(spec: Any) -> list[str]:
    named = [
        part["class_path"] for part in _parts(spec) if isinstance(part, Mapping) and "class_path" in part
    ]
    return [path for path in named if isinstance(path, str)]


def _parts(spec: Any) -> Iterator[Any]:
    """A configuration and all that lies in it."""
    yield spec
    values = spec.values() if isinstance(spec, Mapping) else spec if isinstance(spec, list) else ()
    for value in values:
        yield from _parts(value)
