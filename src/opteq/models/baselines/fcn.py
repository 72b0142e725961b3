"""The fully convolutional network that segmentation with deep OptEq is compared with."""

from __future__ import annotations

import torchvision.models
from torch import Tensor, nn
from torchvision.models.segmentation.fcn import FCNHead

from opteq.errors import ConfigError
from opteq.models.classifier import check_images
from opteq.models.extractors import first_stages
from opteq.models.segmenter import enlarged

# Channels after the last stage. Networks of bottlenecks keep an eighth of the images' size in the last two
# stages, by dilated convolutions; torchvision has none for the others, which halve it twice more.
_BACKBONES = {"resnet18": 512, "resnet34": 512, "resnet50": 2048, "resnet101": 2048}
_STAGES = 4


class FCNSegmenter(nn.Module):
    """An untrained ResNet with torchvision's FCN head on it (FCN, Shelhamer et al. 2017).

    With four stages of `"resnet50"` it is torchvision's `fcn_resnet50`, 32,955,987 parameters for 19 classes.

    Args:
        in_channels: channels of the images.
        classes: number of classes.
        backbone: `"resnet18"`, `"resnet34"`, `"resnet50"` or `"resnet101"`.
        stages: how many of the backbone's four stages are used.

    Raises:
        ConfigError: for an unknown backbone or numbers out of range.
    """

    def __init__(
        self, in_channels: int = 3, classes: int = 19, backbone: str = "resnet50", stages: int = 4
    ) -> None:
        super().__init__()
        if backbone not in _BACKBONES:
            raise ConfigError(f"Expected `backbone` to be one of {', '.join(_BACKBONES)}, got {backbone!r}.")
        if min(in_channels, classes) < 1 or not 1 <= stages <= _STAGES:
            raise ConfigError("Expected positive channels and classes, and from 1 to 4 `stages`.")
        channels = _BACKBONES[backbone]
        dilated = [False, channels == 2048, channels == 2048]
        network = torchvision.models.get_model(backbone, replace_stride_with_dilation=dilated)
        assert isinstance(network, torchvision.models.ResNet)
        self.in_channels, self.classes = in_channels, classes
        self.backbone = first_stages(network, stages, in_channels)
        self.head = FCNHead(channels >> (_STAGES - stages), classes)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes, H, W)` logits of images `(batch, in_channels, H, W)`.

        Raises:
            ShapeError: if `x` is no batch of images with `in_channels` channels.
        """
        check_images(x, self)
        return enlarged(self.head(self.backbone(x)), x)
