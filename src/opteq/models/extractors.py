"""Feature extractors from torchvision."""

from __future__ import annotations

import torchvision.models
from torch import nn

EXTRACTORS = {
    "resnet50": torchvision.models.resnet50,
    "wide_resnet50": torchvision.models.wide_resnet50_2,
}


def resnet_stages(name: str, in_channels: int = 3) -> nn.Sequential:
    """The stem and first two stages of an untrained ResNet: `(batch, C, H, W) ↦ (batch, 512, H/8, W/8)`.

    Args:
        name: one of `EXTRACTORS`.
        in_channels: channels of the images.
    """
    return first_stages(EXTRACTORS[name](weights=None), 2, in_channels)


def first_stages(network: torchvision.models.ResNet, stages: int, in_channels: int = 3) -> nn.Sequential:
    """The stem and the first stages of a ResNet, for images of any number of channels.

    Args:
        network: torchvision's network, whose stem has weights for 3 channels.
        stages: how many of its four stages.
        in_channels: channels of the images; other than 3, the stem's convolution is a new one.
    """
    stem = network.conv1
    if in_channels != stem.in_channels:
        stem = nn.Conv2d(in_channels, stem.out_channels, 7, stride=2, padding=3, bias=False)
    chosen = (network.layer1, network.layer2, network.layer3, network.layer4)[:stages]
    return nn.Sequential(stem, network.bn1, network.relu, network.maxpool, *chosen)
