"""Stems: what turns images into the features that an equilibrium is computed from."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from opteq.errors import ConfigError


def convolutional_stem(
    in_channels: int, widths: Sequence[int], downsamplings: int = 0, padding: int = 0
) -> nn.Sequential:
    """3×3 convolutions, each with batch norm and ReLU, after optional zero padding of the image.

    The early convolutions are the strided ones: a stride later would cost four times the work.

    Args:
        in_channels: channels of the images.
        widths: channels after each convolution.
        downsamplings: how many of the convolutions, from the first, have stride 2.
        padding: zeros added on every side of the image.

    Raises:
        ConfigError: for no convolution, or fewer than there are down-samplings.
    """
    if not widths or min(widths) < 1:
        raise ConfigError(f"Expected the stem to have positive widths, got {list(widths)}.")
    if not 0 <= downsamplings <= len(widths) or padding < 0:
        raise ConfigError(
            f"Expected from 0 to {len(widths)} downsamplings, one per convolution of the stem, and no"
            f" negative padding, got {downsamplings} and {padding}."
        )
    layers: list[nn.Module] = [nn.ZeroPad2d(padding)] if padding else []
    for place, width in enumerate(widths):
        stride = 2 if place < downsamplings else 1
        layers += [
            nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        in_channels = width
    return nn.Sequential(*layers)


def doubling_stem(in_channels: int, channels: int, downsamplings: int, padding: int = 0) -> nn.Sequential:
    """A convolution per down-sampling, at least one, each with twice the channels of the one before it.

    Early resolutions are expensive, so the width doubles as the image halves.

    Args:
        in_channels: channels of the images.
        channels: channels after the last convolution.
        downsamplings: how many times height and width are halved.
        padding: zeros added on every side of the image.
    """
    halvings = range(max(downsamplings, 1) - 1, 0, -1)
    widths = [max(channels >> halving, 8) for halving in halvings] + [channels]
    return convolutional_stem(in_channels, widths, downsamplings, padding)
