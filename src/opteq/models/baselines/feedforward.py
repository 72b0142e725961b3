"""The feed-forward network that deep OptEq is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.models.parts import known


class FeedForward(nn.Module):
    """`z_k = relu(W_k z_{k-1} + U_k x + b_k)`, `z_0 = 0`, of 3×3 convolutions (Xie et al. 2022, Eq. 1).

    Every layer sees the features `x` again, as every unit of a deep OptEq does.

    Args:
        channels: channels of the features.
        hidden: channels of the layers, first to last; the head reads the last.

    Raises:
        ConfigError: for no layers or numbers out of range.
    """

    def __init__(self, channels: int | None = None, hidden: Sequence[int] = (24, 48, 56, 72, 80)) -> None:
        super().__init__()
        channels = known("channels", channels)
        if not hidden or min(hidden) < 1:
            raise ConfigError(f"Expected at least one layer of positive channels, got {list(hidden)}.")
        self.inputs = nn.ModuleList(nn.Conv2d(channels, n, 3, padding=1) for n in hidden)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairwise(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, channels, h, w) ↦ (batch, hidden[-1], h, w)`."""
        first, *others = self.inputs
        z = F.relu(first(x))
        for layer, given in zip(self.layers, others, strict=True):
            z = F.relu(layer(z) + given(x))
        return z
