"""Forces on patches and their derivatives in one pass over an image, in C where that can be."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from opteq.native import load_native, plain
from opteq.objectives.patches import Patches, WholeSample
from opteq.rounding import tolerated

_SOURCE = Path(__file__).with_name("forces.c")


def force_in_place(
    offset: Tensor, patches: Patches | WholeSample, gram: Tensor | None, gamma: Tensor
) -> Tensor | None:
    """`-exp(-γ rᵀG r) G r` for every patch `r` of `offset`, an image like it and in its place.

    None where this is not the way, and then nothing is changed: it serves inside `tolerating` alone, where
    there is no graph, for float32 images with channels last on a CPU, cut into patches with a `gram`.

    Args:
        offset: `(batch, C, H, W)`, in memory of its own.
        patches: how it is cut.
        gram: `G`, `(d, d)`, symmetric.
        gamma: `γ`, `(batch,)`.
    """
    return _in_place(offset, patches, gram, gamma)


def response_in_place(
    lifted: Tensor,
    patches: Patches | WholeSample,
    gram: Tensor | None,
    gamma: Tensor,
    projected: Tensor,
    weight: Tensor,
) -> Tensor | None:
    """`e (2γ (pᵀq) p - G q)` for every patch `q` of `lifted`, likewise: the change of the forces by `q`.

    Args:
        lifted: `(batch, C, H, W)`, in memory of its own.
        patches: how it is cut.
        gram: `G`, `(d, d)`, symmetric.
        gamma: `γ`, `(batch,)`.
        projected: `p = G r`, `(batch, n, d)`.
        weight: `e = exp(-γ rᵀG r)`, `(batch, n, 1)`.
    """
    return _in_place(lifted, patches, gram, gamma, projected, weight)


class _Cutting(ctypes.Structure):
    """Images and how they are cut into patches, as C has it."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t) for name in ("batch", "height", "width", "channels", "size", "piece")
    ]


def _in_place(
    image: Tensor,
    patches: Patches | WholeSample,
    gram: Tensor | None,
    gamma: Tensor,
    *state: Tensor,
) -> Tensor | None:
    if gram is None or isinstance(patches, WholeSample) or tolerated() == 0 or torch.is_grad_enabled():
        return None
    if torch.is_autocast_enabled("cpu") or image.dim() != 4 or not plain(image, gram, gamma, *state):
        return None
    batch, channels, height, width = image.shape
    if channels % patches.channels or height % patches.size or width % patches.size:
        return None
    size, count = patches.dimension, channels * height * width // patches.dimension
    shapes = [(size, size), (batch,), (batch, count, size), (batch, count, 1)]
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    for t, shape in zip((gram, gamma, *state), shapes, strict=False):
        if t.shape != shape or not t.is_contiguous():
            return None
    if not image.is_contiguous(memory_format=torch.channels_last):
        return None
    if (library := load_native(_SOURCE, _declare)) is None:
        return None
    cutting = _Cutting(batch, height, width, channels, patches.size, patches.channels)
    pointers = [t.data_ptr() for t in (gram, gamma, *state)] + [None] * (2 - len(state))
    failed = library.opteq_forces(image.data_ptr(), cutting, *pointers, torch.get_num_threads())
    return None if failed else image


def _declare(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    library.opteq_forces.argtypes = [pointer, ctypes.POINTER(_Cutting), *[pointer] * 4, ctypes.c_int]
