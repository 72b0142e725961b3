"""Memory layouts of images."""

from __future__ import annotations

import torch
from torch import Tensor


def has_channels_last(x: Tensor) -> bool:
    """Whether `x` is `(batch, C, H, W)` with the channels of a pixel and the pixels of an image side by side.

    Unlike PyTorch's memory format of that name this leaves open how far the images are apart, as those of
    one branch are in a matrix with a row for all branches of a sample.
    """
    if x.dim() != 4:
        return False
    channels, width = x.shape[1], x.shape[3]
    wanted = (1, width * channels, channels)
    # The stride of a dimension with one element means nothing.
    return all(n == 1 or s == w for n, s, w in zip(x.shape[1:], x.stride()[1:], wanted, strict=True))


def zero_state(injection: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`(batch, *shape)` zeros in the dtype and layout of `injection`."""
    images = len(shape) == 3 and injection.is_contiguous(memory_format=torch.channels_last)
    return torch.empty(
        (injection.shape[0], *shape),
        dtype=injection.dtype,
        device=injection.device,
        memory_format=torch.channels_last if images else torch.contiguous_format,
    ).zero_()
