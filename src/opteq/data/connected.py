"""Mazes by chance, whose pixels have a class that depends on pixels far away."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from opteq.data.base import ImageDataModule
from opteq.data.images import ArrayImages
from opteq.data.preprocess import Normalization
from opteq.data.scenes import VOID, ScenePreprocess
from opteq.errors import ConfigError

# A seed for each split, which must not move with that of the training.
_SEEDS = {"train": 0, "val": 1, "test": 2}
_WALL, _OPEN, _MARK = (0, 0, 0), (255, 255, 255), (255, 0, 0)


class ConnectedPixels(ImageDataModule):
    """Black walls, white open pixels, a red one: which of the open ones are connected to it?

    Every pixel is open by chance. Two open pixels are connected if a path leads from one to the other, up,
    down, left and right, through open pixels. With 62 % of them open, a little above the percolation
    threshold, paths wind, and a network that looks `k` pixels far can only guess beyond. Walls and the red
    pixel have no class. The scores are those of segmentation; the mean accuracy of the two classes, `mAcc`,
    is a half for a guess.

    Args:
        size: Height and width of the images in training and validation.
        test_size: Those of the test images; the same unless given.
        train_images: Number of training images.
        test_images: Number of test images, and of those for validation.
        open_share: Probability that a pixel is open.
        batch_size, num_workers: See `opteq.data.base.ImageDataModule`.

    Raises:
        ConfigError: For numbers out of range.
    """

    task = "segmentation"
    all_classes = ("cut off", "connected")
    in_channels = 3
    normalization = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

    def __init__(
        self,
        size: int = 16,
        test_size: int | None = None,
        train_images: int = 20_000,
        test_images: int = 400,
        open_share: float = 0.62,
        batch_size: int = 16,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        test_size = size if test_size is None else test_size
        if min(size, test_size) < 2 or min(train_images, test_images) < 1:
            raise ConfigError(
                "Expected images of at least 2 pixels a side, and at least one in every split, got"
                f" `size` {size}, `test_size` {test_size}, {train_images} and {test_images} images."
            )
        if not 0 < open_share < 1:
            raise ConfigError(f"Expected `open_share` between 0 and 1, got {open_share}.")
        self.size = self.image_size = size
        self.test_size = test_size
        self.train_images, self.test_images = train_images, test_images
        self.open_share = open_share

    def read(self, split: Literal["train", "val", "test"]) -> ArrayImages:
        count = self.train_images if split == "train" else self.test_images
        size = self.test_size if split == "test" else self.size
        return ArrayImages(*mazes(count, size, self.open_share, _SEEDS[split]))

    def _preprocess(self, augmented: bool) -> Any:
        return ScenePreprocess(self.normalization, "none", (1, 1))


def mazes(count: int, size: int, open_share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random images and the class of every pixel.

    Returns:
        Images as bytes, (count, 3, size, size), and masks, (count, size, size): 1 where an open pixel is
        connected to the red one, 0 where it is not, `VOID` elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    chances = torch.rand(count, size, size, generator=generator)
    free = chances < open_share
    # The mark is open whatever the chances are: the pixel that came first in another draw.
    order = torch.rand(count, size * size, generator=generator)
    mark = F.one_hot(order.masked_fill(~free.flatten(1), -1).argmax(1), size * size).view_as(free).bool()
    reached = flooded(mark, free | mark)
    colours = torch.tensor([_WALL, _OPEN, _MARK], dtype=torch.uint8)
    images = colours[free.long().masked_fill(mark, 2)].movedim(-1, 1).contiguous()
    masks = reached.to(torch.uint8).masked_fill(~free | mark, VOID)
    return images, masks


def flooded(start: Tensor, free: Tensor) -> Tensor:
    """What is connected to the `start` through the `free` pixels of each image, (count, height, width)."""
    reached, before = start, torch.zeros_like(start)
    while not torch.equal(reached, before):
        before, padded = reached, F.pad(reached, (1, 1, 1, 1))
        sides = (padded[:, 1:-1, 2:], padded[:, 1:-1, :-2], padded[:, 2:, 1:-1], padded[:, :-2, 1:-1])
        reached = free & (reached | sides[0] | sides[1] | sides[2] | sides[3])
    return reached
