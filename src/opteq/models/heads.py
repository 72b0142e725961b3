"""Heads: from the equilibria to logits, for whole images or for each of their pixels."""

from __future__ import annotations

from torch import Tensor, nn
from torchvision.models.segmentation.fcn import FCNHead

from opteq.errors import ConfigError
from opteq.models.fusion import Fusion, PooledFeatures
from opteq.models.parts import known
from opteq.options import check
from opteq.theory.lipschitz import lipschitz_bound


class Head(nn.Sequential):
    """Fusion of the branches, batch norm and ReLU, average pooling, dropout and a linear layer.

    It reads a tensor `(batch, channels, h, w)` or a tuple of them. The papers have no norm here.

    Args:
        channels: channels of the body's output, of every branch.
        classes: number of classes.
        branches: number of branches.
        fusion: `"concat"`, `"sum"`, `"conv"` or `"average"`, see `Fusion`.
        norm: whether there are batch norm and ReLU, of their own for each fused branch.
        pool: height and width that each fused branch is averaged to.
        dropout: probability of dropping a feature before the linear layer.

    Raises:
        ConfigError: for an unknown fusion or numbers out of range.
    """

    def __init__(
        self,
        channels: int | None = None,
        classes: int | None = None,
        branches: int = 1,
        fusion: str = "concat",
        norm: bool = True,
        pool: int = 1,
        dropout: float = 0.0,
    ) -> None:
        channels, classes = known("channels", channels), known("classes", classes)
        check(0 <= dropout <= 1, "dropout", dropout, "a probability from 0 to 1")
        fuse = Fusion(fusion, known("branches", branches), channels)
        super().__init__(
            fuse,
            *([BranchNorm(fuse.outputs, channels)] if norm else []),
            PooledFeatures(known("pool", pool)),
            nn.Dropout(dropout),
            nn.Linear(fuse.outputs * channels * pool**2, classes),
        )


class BranchNorm(nn.Module):
    """Batch norm and ReLU, of its own for each branch.

    Args:
        branches: number of branches.
        channels: channels of each.
    """

    def __init__(self, branches: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(branches)
        )

    def forward(self, z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(norm(z_i) for norm, z_i in zip(self.norms, z, strict=True))

    def lipschitz(self, z: tuple[Tensor, ...]) -> float:
        """The largest of the branches' constants: each has a block of its own."""
        pairs = zip(self.norms, z, strict=True)
        return max(lipschitz_bound(norm, z_i).value.item() for norm, z_i in pairs)


class ResNetHead(nn.Sequential):
    """Two 1×1 convolutions with ReLU and max pooling, average pooling, linear (Xie et al. 2022, Table 6).

    Args:
        channels: channels of the equilibrium.
        classes: number of classes.
        widths: channels after each convolution.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(
        self, channels: int | None = None, classes: int | None = None, widths: tuple[int, int] = (1024, 2048)
    ) -> None:
        sizes = [known("channels", channels), *widths]
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 1), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True))
            for a, b in zip(sizes, widths, strict=False)
        ]
        linear = nn.Linear(sizes[-1], known("classes", classes))
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)


class PixelHead(FCNHead):
    """Logits for every pixel by torchvision's FCN head.

    A 3×3 convolution to a quarter of the channels with batch norm, dropout, a 1×1 convolution to the classes.

    Args:
        channels: channels of the body's output, at least 4.
        classes: number of classes.

    Raises:
        ConfigError: for numbers out of range.
    """

    def __init__(self, channels: int | None = None, classes: int | None = None) -> None:
        channels = known("channels", channels)
        if channels < 4:
            raise ConfigError(f"Expected at least 4 `channels` for a head of pixels, got {channels}.")
        super().__init__(channels, known("classes", classes))
