"""Cityscapes: street scenes of 1024×2048 pixels with 19 classes (Cordts et al. 2016)."""

from pathlib import Path
from typing import Any, Literal

import torch
import torchvision.datasets

from opteq.data.places import PLACES
from opteq.data.scenes import VOID, FileScenes, Size
from opteq.data.segmentation import SegmentationDataModule
from opteq.errors import ConfigError

# The classes that are trained and tested on, in the order of their training numbers.
_CLASSES = sorted(
    (c for c in torchvision.datasets.Cityscapes.classes if 0 <= c.train_id < VOID), key=lambda c: c.train_id
)


class Cityscapes(SegmentationDataModule):
    """Cityscapes with its fine masks, read from `<root>/leftImg8bit` and `<root>/gtFine`.

    The masks of its test set are not public: as is customary, its validation set is tested on, and a slice
    of the training set takes its place.

    Args:
        root: The folder that holds the two unpacked archives.
        image_size: Height and width that images and masks are resized to.
        options: The other options of `opteq.data.segmentation.SegmentationDataModule`.

    Raises:
        ConfigError: The set is missing or damaged.
    """

    all_classes = tuple(c.name for c in _CLASSES)

    def __init__(
        self, root: str = "data/cityscapes", image_size: Size = (1024, 2048), **options: Any
    ) -> None:
        super().__init__(image_size, **options)
        self.root = root

    def read(self, split: Literal["train", "val", "test"]) -> FileScenes | None:
        if split == "val":
            return None
        folder = "train" if split == "train" else "val"
        try:
            found: Any = torchvision.datasets.Cityscapes(self.root, folder, "fine", "semantic")
        except (OSError, RuntimeError) as error:
            raise ConfigError(PLACES["opteq.data.cityscapes.Cityscapes"].complaint(self.root)) from error
        classes = torch.full((256,), VOID, dtype=torch.uint8)
        for c in _CLASSES:
            classes[c.id] = c.train_id
        images = [Path(path) for path in found.images]
        masks = [Path(targets[0]) for targets in found.targets]
        return FileScenes(images, masks, self.size, classes, len(self.class_names))
