"""The feed-forward network that deep OptEq is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.models.classifier import check_images


class FeedForwardClassifier(nn.Module):
    """`z_k = relu(W_k z_{k-1} + U_k x + b_k)`, `z_0 = 0`, with 3×3 convolutions (Xie et al. 2022, Eq. 1).

    Every layer sees the features `x` again, as every unit of a deep OptEq does. Stem and head are those
    of `DeepOptEqClassifier`; the default channels give 200,218 parameters, as many as its 200,238.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of the features `x`.
        hidden: channels of the layers, first to last.
        downsampling: factor by which average pooling shrinks the features.

    Raises:
        ConfigError: for no layers or numbers out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        channels: int = 30,
        hidden: Sequence[int] = (24, 48, 56, 72, 80),
        downsampling: int = 1,
    ) -> None:
        super().__init__()
        if not hidden or min(in_channels, classes, channels, downsampling, *hidden) < 1:
            raise ConfigError("Expected at least one layer, and positive channels, classes and downsampling.")
        self.in_channels = in_channels
        self.stem = nn.Sequential(nn.Conv2d(in_channels, channels, 3, padding=1), nn.AvgPool2d(downsampling))
        self.inputs = nn.ModuleList(nn.Conv2d(channels, n, 3, padding=1) for n in hidden)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(hidden))
        self.head = nn.Linear(hidden[-1], classes)

    def features(self, x: Tensor) -> Tensor:
        """`(batch, channels, h, w)` output of the last layer.

        Raises:
            ShapeError: if `x` is no batch of images with `in_channels` channels.
        """
        check_images(x, self)
        x = self.stem(x)
        z = F.relu(self.inputs[0](x))
        for layer, given in zip(self.layers, list(self.inputs)[1:], strict=True):
            z = F.relu(layer(z) + given(x))
        return z

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes)` logits; raises as `features` does."""
        return self.head(self.features(x).mean((2, 3)))
