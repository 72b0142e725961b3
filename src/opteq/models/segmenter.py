"""Segmentation with a deep OptEq: logits for every pixel."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torchvision.models.segmentation.fcn import FCNHead

from opteq.errors import ConfigError
from opteq.gradients.base import GradientMethod
from opteq.maps.deep import DeepOptEq
from opteq.maps.optequnit import OptEqUnit
from opteq.models.classifier import ImageClassifier, equilibrium_layer
from opteq.models.stem import doubling_stem
from opteq.operators.conv import Conv2d
from opteq.solvers.base import Solver


class DeepOptEqSegmenter(ImageClassifier):
    """A stem, a deep OptEq of 3×3 convolutions, a convolutional head (Xie et al. 2022 (OptEq), §7.5).

    The stem, a strided convolution with batch norm per down-sampling, takes the images to the size and the
    channels of the state. The head is that of torchvision's FCN: a 3×3 convolution to a quarter of the
    channels with batch norm, dropout, a 1×1 convolution to the classes. Its logits are enlarged bilinearly to
    the size of the images. The paper gives the hidden channels, 256, 512 and 512, and leaves the rest open;
    with 512 state channels and 19 classes there are 13,870,099 parameters.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        channels: channels of the state.
        hidden: hidden channels of the units, first to last.
        downsamplings: how many times the stem halves height and width.
        alpha: `α` in (0, 1], for all units or one each.
        learn_alpha: learn one `α` per unit.
        max_norm: ceiling on the `‖W‖₂` of every unit, or None.
        start: iterate from `"zero"` or from the `"input"`, the features.
        solver: solver of the layer; None with a gradient that replaces the solve.
        gradient: gradient method of the layer.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 19,
        channels: int = 512,
        hidden: Sequence[int] = (256, 512, 512),
        downsamplings: int = 3,
        alpha: float | Sequence[float] = 0.8,
        learn_alpha: bool = False,
        max_norm: float | None = 0.97,
        start: str = "input",
        solver: Solver | None = None,
        gradient: GradientMethod | None = None,
    ) -> None:
        if min(in_channels, classes) < 1 or channels < 4 or downsamplings < 0:
            raise ConfigError(
                "Expected positive channels and classes, at least 4 `channels` of the state, and no negative"
                " `downsamplings`."
            )
        units = [OptEqUnit(Conv2d(channels, n), Conv2d(channels, n), max_norm=max_norm) for n in hidden]
        layer = equilibrium_layer(DeepOptEq(units, alpha, learn_alpha, start), solver, gradient)
        super().__init__(in_channels, classes, doubling_stem(in_channels, channels, downsamplings), layer)
        self.head = FCNHead(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes, H, W)` logits of `(batch, in_channels, H, W)`; raises as `features` does."""
        z = self.features(x)
        assert isinstance(z, Tensor)
        return enlarged(self.head(z), x)


def enlarged(logits: Tensor, images: Tensor) -> Tensor:
    """Logits at the height and width of the images, by bilinear interpolation."""
    return F.interpolate(logits, images.shape[-2:], mode="bilinear", align_corners=False)
