"""Calls of compiled functions, the one place where tensors become addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opteq.native.building import library


def call(name: str, *arguments: Any) -> Any:
    """Call the function `opteq_<name>` of the C sources.

    Args:
        name: its name.
        arguments: as in C, with a tensor for its address, None for none, and without the last one, the number
            of threads.

    Raises:
        MemoryError: if there was no memory for what it needs meanwhile.
    """
    numbers = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    return getattr(library().functions, f"opteq_{name}")(*numbers, torch.get_num_threads())


def table(matrices: Sequence[Tensor]) -> ctypes.Array:
    """Where each matrix lies, how far its rows are apart and how many there are in one, as C has it."""
    numbers = [number for m in matrices for number in (m.data_ptr(), m.stride(0), m.shape[1])]
    return (ctypes.c_size_t * len(numbers))(*numbers)
