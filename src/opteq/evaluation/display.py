"""Normalised image tensors and the pixels that they are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

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


class OfPixels(nn.Module):
    """A network as a function of pixels in [0, 1], `(batch, channels, height, width) ↦ logits`.

    Args:
        network: takes normalised images.
        normalization: their mean and standard deviation.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, normalization: Normalization) -> None:
        super().__init__()
        self.network = network
        mean, deviation = channelwise(normalization)
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network((pixels - self.mean) / self.deviation)
