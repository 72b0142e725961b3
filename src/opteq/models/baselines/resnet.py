"""Residual networks as bodies."""

from __future__ import annotations

from torch import nn
from torchvision.models.resnet import BasicBlock

from opteq.errors import ConfigError
from opteq.models.parts import known
from opteq.models.stems import make_resnet


class ResNetStages(nn.Sequential):
    """The four stages of one of torchvision's ResNets, untrained: `(batch, 64, H, W) ↦ (batch, C, H/8, W/8)`.

    `C` is 512 for ResNet-18 and -34 and 2048 for the others; the head has to be told. Behind
    `ConvStem(channels=64)` it is the ResNet for small images, whose first convolution is 3×3 and which has no
    max pooling.

    Args:
        channels: channels of the features, 64.
        backbone: torchvision's name for the network, see `ResNetStem`.

    Raises:
        ConfigError: for an unknown backbone, or other channels than it reads.
    """

    def __init__(self, channels: int | None = None, backbone: str = "resnet18") -> None:
        network = make_resnet(backbone)
        first = network.conv1.out_channels
        if channels != first:
            raise ConfigError(
                f"The stages of {backbone} read {first} channels; give the stem as many, got {channels}."
            )
        super().__init__(network.layer1, network.layer2, network.layer3, network.layer4)


class ResidualBlocks(nn.Sequential):
    """torchvision's basic blocks one after the other, all with the channels and the size of the features.

    The explicit counterpart of one weight-tied block: two 3×3 convolutions with batch norm, and a shortcut.

    Args:
        channels: channels of the features.
        depth: number of blocks.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(self, channels: int | None = None, depth: int = 2) -> None:
        channels = known("channels", channels)
        super().__init__(*(BasicBlock(channels, channels) for _ in range(known("depth", depth))))
