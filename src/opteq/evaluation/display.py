"""Normalised image tensors, turned back into pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Mean and standard deviation, each one number or one per channel.
Normalization = tuple[float | Sequence[float], float | Sequence[float]]


def displayable(images: Tensor, normalization: Normalization) -> NDArray[np.float32]:
    """Undo the normalisation and put the channels last.

    Args:
        images: `(n, channels, height, width)`.
        normalization: the mean and standard deviation that were applied.

    Returns:
        `(n, height, width, 1 or 3)` in [0, 1]; of two channels, or of more than three, only the
        first or the first three are kept.
    """
    mean, deviation = channelwise(normalization)
    original = (images.float().cpu() * deviation + mean).clamp(0, 1)
    channels = 3 if original.shape[1] >= 3 else 1
    return original[:, :channels].permute(0, 2, 3, 1).numpy()


def channelwise(normalization: Normalization) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation as tensors of shape `(1 or channels, 1, 1)`."""
    mean, deviation = (
        torch.as_tensor(value, dtype=torch.float32).reshape(-1, 1, 1) for value in normalization
    )
    return mean, deviation
