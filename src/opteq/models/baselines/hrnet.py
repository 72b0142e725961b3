"""High-resolution networks, and the other networks of the package timm, as bodies."""

from __future__ import annotations

from torch import Tensor, nn

from opteq.errors import ConfigError
from opteq.models.parts import known


class TimmFeatures(nn.Module):
    """The features of one of timm's networks, untrained: `(batch, channels, H, W) ↦ (batch, C, h, w)`.

    A whole network, stem included, so that `torch.nn.Identity` stands before it. HRNet-W18 has `C = 2048` at
    a 32nd of height and width; the head has to be told. Needs the package timm.

    Args:
        channels: channels of the images.
        backbone: timm's name for the network: `"hrnet_w18"`, `"hrnet_w18_small"`, …

    Raises:
        ConfigError: without timm, or for an unknown backbone.
    """

    def __init__(self, channels: int | None = None, backbone: str = "hrnet_w18") -> None:
        super().__init__()
        try:
            import timm  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ConfigError("TimmFeatures needs the package timm: pip install 'opteq[rivals]'.") from error
        if backbone not in timm.list_models():
            raise ConfigError(f"Expected `backbone` to be a network of timm.list_models(), got {backbone!r}.")
        # Without a classifier and without pooling it gives the features that the head is to read.
        self.network = timm.create_model(
            backbone, in_chans=known("channels", channels), num_classes=0, global_pool=""
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)
