"""Forces on patches and their derivatives in one pass over an image, in C where that can be."""

from __future__ import annotations

import torch
from torch import Tensor

from opteq.native.calling import call
from opteq.native.registering import operator
from opteq.native.serving import serves


def forces_in_place(image: Tensor, channels: int, size: int, *parts: Tensor, error: float) -> Tensor | None:
    """Forces on the patches of an image, or how they change with it, as an image like it and in its place.

    `-exp(-γ rᵀG r) G r` for every patch `r` of offsets; with `p = G r` and `e = exp(-γ rᵀG r)` of such
    patches given, the change of these forces `e (2γ (pᵀq) p - G q)` for every patch `q` of moves.

    None where this is not the way, and then nothing is changed: images must have channels last and be divided
    by their patches.

    Args:
        image: `(batch, C, H, W)`, in memory of its own.
        channels: channels of a patch.
        size: height and width of a patch.
        parts: `G`, `(d, d)`, symmetric, and `γ`, `(batch,)`; where given `p`, `(batch, n, d)`, and `e`,
            `(batch, n, 1)`.
        error: the relative error that is allowed.
    """
    if image.dim() != 4 or not image.is_contiguous(memory_format=torch.channels_last):
        return None
    batch, depth, height, width = image.shape
    if depth % channels or height % size or width % size:
        return None
    length = channels * size**2
    count = depth * height * width // length
    shapes = ((length, length), (batch,), (batch, count, length), (batch, count, 1))
    # What does not fit PyTorch is to refuse: here it would be read beyond its end.
    for t, shape in zip(parts, shapes, strict=False):
        if t.shape != shape or not t.is_contiguous():
            return None
    if not serves(image, *parts, error=error):
        return None
    _forces(image, channels, size, *parts)
    return image


@operator(
    "forces(Tensor(a!) image, int channels, int size, Tensor gram, Tensor gamma, Tensor? projected=None,"
    " Tensor? weight=None) -> ()"
)
def _forces(image: Tensor, channels: int, size: int, *parts: Tensor) -> None:
    batch, depth, height, width = image.shape
    places = (*parts, 0, 0)[:4]
    call("forces", "5P6Ni", image, *places, batch, height, width, depth, size, channels)
