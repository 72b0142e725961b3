"""Classifiers of images or of their pixels, composed of a stem, a body and a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opteq.errors import ShapeError
from opteq.layer import EquilibriumLayer
from opteq.options import check_kind
from opteq.results import State


class ImageClassifier(nn.Module):
    """`x ↦ stem ↦ features g(x) ↦ body ↦ equilibria ↦ head ↦ logits`, each of them any module.

    Images are `(batch, in_channels, H, W)`, logits `(batch, classes)`. A head that answers with logits
    `(batch, classes, h, w)` makes it a classifier of pixels: they are enlarged to the images by bilinear
    interpolation.

    The usual parts are in `opteq.models.stems`, `bodies` and `heads`. In a configuration each is chosen by
    its class path, and numbers that follow from others may be left out: `in_channels` of the stem and
    `classes` of the head are those of the data, `channels` of body and head those of the stem.

    Args:
        stem: from images to the features that equilibria are computed from.
        body: from features to what the head reads, a tensor or a tuple of them, one per branch: an
            `EquilibriumLayer` with any map, several of them, or an explicit network.
        head: from there to the logits.
    """

    def __init__(self, stem: nn.Module, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        for name, part in (("stem", stem), ("body", body), ("head", head)):
            check_kind(nn.Module, name, part, "a torch module")
        self.stem, self.body, self.head = stem, body, head

    @property
    def stages(self) -> list[nn.Module]:
        """What is applied in turn, for certificates."""
        return [self.stem, self.body, self.head]

    @property
    def equilibrium_layers(self) -> list[EquilibriumLayer]:
        """The equilibrium layers, first to last."""
        return [m for m in self.modules() if isinstance(m, EquilibriumLayer)]

    def features(self, x: Tensor) -> State:
        """What the body gives: a tensor, or a tuple of them, one per branch.

        Raises:
            ShapeError: if `x` is no batch of images such as the stem takes.
            NonFiniteError: if `x` has NaN or infinite values.
        """
        channels = getattr(self.stem, "in_channels", None)
        if x.dim() != 4 or channels not in (None, x.shape[1]):
            raise ShapeError(
                f"Expected images of shape (batch, {channels or 'channels'}, height, width),"
                f" got {tuple(x.shape)}."
            )
        dtype = next((p.dtype for p in self.parameters()), x.dtype)
        if x.dtype != dtype and not (torch.is_autocast_enabled(x.device.type) and x.is_floating_point()):
            raise ShapeError(
                f"Expected images of {dtype}, got {x.dtype}; convert them with images.to({dtype})."
            )
        return self.body(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, classes)` logits, or `(batch, classes, H, W)`; raises as `features` does."""
        logits = self.head(self.features(x))
        if logits.dim() < 4 or logits.shape[2:] == x.shape[2:]:
            return logits
        return F.interpolate(logits, x.shape[2:], mode="bilinear", align_corners=False)
