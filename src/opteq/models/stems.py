"""Stems: what turns images into the features that equilibria are computed from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torchvision.models
from torch import nn

from opteq.errors import ConfigError
from opteq.models.parts import known
from opteq.options import check_choice

_STAGES = 4


class ConvStem(nn.Sequential):
    """3×3 convolutions, each with batch norm and ReLU.

    The early ones are strided: a stride later would cost four times the work.

    Args:
        in_channels: channels of the images.
        channels: channels of the features, those after the last convolution.
        downsamplings: how many convolutions, from the first, halve height and width.
        widths: channels after each convolution but the last; unless given there are as many convolutions as
            downsamplings, at least one, each with twice the channels of the one before it.
        padding: zeros added on every side of the image, so that its size divides as it must.

    Raises:
        ConfigError: for numbers out of range, or fewer convolutions than downsamplings.
    """

    def __init__(
        self,
        in_channels: int | None = None,
        channels: int = 32,
        downsamplings: int = 0,
        widths: Sequence[int] | None = None,
        padding: int = 0,
    ) -> None:
        channels = known("channels", channels)
        if widths is None:
            widths = [max(channels >> halving, 8) for halving in range(max(downsamplings, 1) - 1, 0, -1)]
        widths = [known("in_channels", in_channels), *widths, channels]
        if min(widths) < 1 or padding < 0 or not 0 <= downsamplings < len(widths):
            raise ConfigError(
                f"Expected positive channels, no negative padding, and from 0 to {len(widths) - 1}"
                f" downsamplings, one per convolution, got {widths}, {padding} and {downsamplings}."
            )
        layers: list[nn.Module] = [nn.ZeroPad2d(padding)] if padding else []
        for place, (a, b) in enumerate(pairwise(widths)):
            stride = 2 if place < downsamplings else 1
            layers += [nn.Conv2d(a, b, 3, stride, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        super().__init__(*layers)
        self.in_channels = widths[0]


class PooledStem(nn.Sequential):
    """One 3×3 convolution with bias, then average pooling, and neither norm nor ReLU (Xie et al. 2022, §7).

    Args:
        in_channels: channels of the images.
        channels: channels of the features.
        factor: by what height and width shrink.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(self, in_channels: int | None = None, channels: int = 30, factor: int = 1) -> None:
        convolution = nn.Conv2d(known("in_channels", in_channels), known("channels", channels), 3, padding=1)
        super().__init__(convolution, nn.AvgPool2d(known("factor", factor)))
        self.in_channels = convolution.in_channels


class ResNetStem(nn.Sequential):
    """The first stages of an untrained ResNet: `(batch, in_channels, H, W) ↦ (batch, C, H/8, W/8)`.

    After two stages `C` is 512 for the networks of bottlenecks, and 2048 after all four, of which the last
    two keep the size by dilated convolutions, as for segmentation. ResNet-18 and -34, which have a quarter of
    the channels and of which torchvision knows no dilated ones, halve it there. One stage leaves H/4.

    Args:
        in_channels: channels of the images; other than 3, the first convolution is a new one.
        backbone: torchvision's name for it: `"resnet18"`, `"resnet34"`, `"resnet50"`, `"resnet101"`,
            `"wide_resnet50_2"`, …
        stages: how many of its four stages.

    Raises:
        ConfigError: for an unknown backbone or numbers out of range.
    """

    def __init__(self, in_channels: int | None = None, backbone: str = "resnet50", stages: int = 2) -> None:
        if not 1 <= stages <= _STAGES:
            raise ConfigError(f"Expected from 1 to {_STAGES} `stages`, got {stages}.")
        dilated = backbone not in ("resnet18", "resnet34")
        network = make_resnet(backbone, replace_stride_with_dilation=[False, dilated, dilated])
        first, channels = network.conv1, known("in_channels", in_channels)
        if channels != first.in_channels:
            first = nn.Conv2d(channels, first.out_channels, 7, stride=2, padding=3, bias=False)
        layers = (network.layer1, network.layer2, network.layer3, network.layer4)
        super().__init__(first, network.bn1, network.relu, network.maxpool, *layers[:stages])
        self.in_channels = channels


def make_resnet(backbone: str, **options: Any) -> torchvision.models.ResNet:
    """One of torchvision's ResNets, untrained.

    Raises:
        ConfigError: for an unknown backbone.
    """
    names = [name for name in torchvision.models.list_models(torchvision.models) if "resnet" in name]
    check_choice("backbone", backbone, names)
    network = torchvision.models.get_model(backbone, **options)
    assert isinstance(network, torchvision.models.ResNet)
    return network
