"""The classification head of multiscale deep equilibrium models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck

from opteq.errors import ConfigError
from opteq.models.parts import known


class MDEQHead(nn.Module):
    """Reads branches from the finest to the coarsest (Bai et al. 2020, as their code has it).

    A bottleneck block widens every branch to four times its number of `bottlenecks`; a strided 3×3
    convolution with batch norm and ReLU brings what was gathered to the size of the next branch, which is
    added. Then a 1×1 convolution to `features` with batch norm and ReLU, average pooling and a linear layer.

    Args:
        classes: number of classes.
        widths: channels of the branches.
        bottlenecks: hidden channels of the bottleneck block of each.
        features: channels that the linear layer reads.

    Raises:
        ConfigError: if `widths` and `bottlenecks` differ in length, or for numbers out of range.
    """

    def __init__(
        self,
        classes: int | None = None,
        widths: Sequence[int] = (32, 64, 128, 256),
        bottlenecks: Sequence[int] = (14, 28, 56, 112),
        features: int = 1680,
    ) -> None:
        super().__init__()
        if len(widths) != len(bottlenecks) or not widths:
            raise ConfigError(
                "Expected one number of `widths` and one of `bottlenecks` per branch, got"
                f" {list(widths)} and {list(bottlenecks)}."
            )
        wide = [Bottleneck.expansion * known("bottlenecks", n) for n in bottlenecks]
        self.wideners = nn.ModuleList(
            _widener(known("widths", width), n) for width, n in zip(widths, bottlenecks, strict=True)
        )
        self.reducers = nn.ModuleList(_convolution(a, b, 3, 2) for a, b in pairwise(wide))
        self.classifier = nn.Sequential(
            _convolution(wide[-1], known("features", features), 1, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(features, known("classes", classes)),
        )

    def forward(self, z: tuple[Tensor, ...]) -> Tensor:
        first, *others = (widen(z_i) for widen, z_i in zip(self.wideners, z, strict=True))
        for reduce, other in zip(self.reducers, others, strict=True):
            first = other + reduce(first)
        return self.classifier(first)


def _widener(width: int, hidden: int) -> Bottleneck:
    wide = Bottleneck.expansion * hidden
    shortcut = None
    if width != wide:
        shortcut = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide))
    return Bottleneck(width, hidden, downsample=shortcut, norm_layer=partial(nn.BatchNorm2d, affine=False))


def _convolution(inputs: int, outputs: int, kernel_size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())
