"""Splitting feature maps into patches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from opteq.errors import ShapeError
from opteq.options import require, strict_options


@strict_options
@dataclass(frozen=True)
class Patches:
    """Patches of `channels` channels by `size × size` pixels (Li et al. 2023, Algorithm 1).

    `split` rearranges `(batch, C, H, W)` into `(batch, n, d)` with `n = C/channels · H/size · W/size`
    and `d = channels · size²`; `merge` is its inverse and its adjoint.

    Args:
        channels: channels in a patch, `c_s`.
        size: height and width of a patch, `p`.

    Raises:
        ConfigError: if a number is not positive.
    """

    channels: int = 8
    size: int = 2

    def __post_init__(self) -> None:
        require(self.channels >= 1, self, "channels", "at least 1")
        require(self.size >= 1, self, "size", "at least 1")

    @property
    def dimension(self) -> int:
        """Length `d` of a patch."""
        return self.channels * self.size**2

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise a `ShapeError` unless `(batch, C, H, W)` divides into patches."""
        if len(shape) != 4 or shape[1] % self.channels or shape[2] % self.size or shape[3] % self.size:
            raise ShapeError(
                f"Expected features (batch, C, H, W) with C divisible by {self.channels} and H, W by"
                f" {self.size} for {self}, got {tuple(shape)}; change the patches, the hidden channels"
                " or the image size."
            )

    def split(self, x: Tensor) -> Tensor:
        """`(batch, C, H, W) ↦ (batch, n, d)`."""
        c, p = self.channels, self.size
        rows = x.permute(0, 2, 3, 1).unflatten(3, (-1, c)).unflatten(2, (-1, p)).unflatten(1, (-1, p))
        # (batch, H/p, p, W/p, p, C/c, c) → (batch, H/p, W/p, C/c, p², c), pixel by pixel, which copies
        # longer pieces than a permutation of the whole.
        pixels = [rows[:, :, i, :, j] for i in range(p) for j in range(p)]
        count = x.shape[1:].numel() // self.dimension
        return torch.stack(pixels, dim=4).reshape(x.shape[0], count, self.dimension)

    def merge(self, patches: Tensor, like: Tensor) -> Tensor:
        """`(batch, n, d) ↦ (batch, C, H, W)`, channels-last; sizes as those of `like`."""
        c, p = self.channels, self.size
        _, channels, height, width = like.shape
        blocks = patches.reshape(-1, height // p, width // p, channels // c, p, p, c)
        image = blocks.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, height, width, channels)
        return image.permute(0, 3, 1, 2)


@dataclass(frozen=True)
class WholeSample:
    """The trivial split: one patch that is the whole sample."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Every shape will do."""

    def split(self, x: Tensor) -> Tensor:
        """`(batch, ...) ↦ (batch, 1, n)`."""
        return x.reshape(x.shape[0], 1, x.shape[1:].numel())

    def merge(self, patches: Tensor, like: Tensor) -> Tensor:
        """`(batch, 1, n) ↦ (batch, ...)`, shaped and laid out like `like`."""
        merged = patches.reshape(like.shape)
        if like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last):
            return merged.contiguous(memory_format=torch.channels_last)
        return merged
