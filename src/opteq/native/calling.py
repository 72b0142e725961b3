"""Calls of compiled functions, the one place where tensors become addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any

import torch

from opteq.native.building import library

_NUMBERS = frozenset((int, float, bool))


def call(name: str, fields: str, *values: Any) -> int:
    """Call the function `opteq_<name>` of the C sources with the struct that it takes.

    Args:
        name: its name.
        fields: the kinds of its fields, as in `struct.Struct`: P a pointer, N a size, q and i integers, d and
            f floating-point numbers. One struct takes half the time of as many arguments.
        values: of the fields, a tensor for its address, without the last one, the number of threads.

    Returns:
        What it returns.

    Raises:
        MemoryError: if there was no memory for what it needs meanwhile.
    """
    pack, function = _callable(name, fields)
    numbers = [value if type(value) in _NUMBERS else value.data_ptr() for value in values]
    result = function(pack(*numbers, torch.get_num_threads()))
    if result < 0:
        raise MemoryError("There is no memory for what compiled code keeps meanwhile; use smaller batches.")
    return result


@cache
def _callable(name: str, fields: str) -> tuple[Callable[..., bytes], Callable[[bytes], int]]:
    function = getattr(library().functions, f"opteq_{name}")
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return Struct(fields).pack, function
