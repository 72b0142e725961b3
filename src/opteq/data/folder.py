"""Any set of image files sorted into one folder per class."""

from pathlib import Path
from typing import Any, Literal

import torch
import torchvision.datasets
from torchvision.datasets.folder import IMG_EXTENSIONS

from opteq.data.base import ImageDataModule
from opteq.data.images import FileImages
from opteq.data.preprocess import IMAGENET
from opteq.errors import ConfigError


class ImageFolder(ImageDataModule):
    """Colour images in `<root>/train/<class>/` and `<root>/test/<class>/`, perhaps also `<root>/val`.

    With only one of `test` and `val`, that one is the test set and validation uses a slice of
    `train`.

    Args:
        root: The folder that holds `train`.
        image_size: Images are resized to this shorter side and cropped to a square.
        options: The options of `opteq.data.base.ImageDataModule`.

    Raises:
        ConfigError: A folder is missing or empty, or the classes of two folders differ.
    """

    in_channels = 3
    normalization = IMAGENET

    def __init__(self, root: str, image_size: int = 64, **options: Any) -> None:
        super().__init__(**options)
        if image_size < 1:
            raise ConfigError(f"Expected `image_size` of at least 1, got {image_size}.")
        self.root = root
        self.size = self.image_size = image_size
        self.all_classes = ()

    @property
    def title(self) -> str:
        """Name of the folder."""
        return Path(self.root).resolve().name

    def read(self, split: Literal["train", "val", "test"]) -> FileImages | None:
        root = Path(self.root)
        has_test = (root / "test").is_dir()
        if split == "val" and not (has_test and (root / "val").is_dir()):
            return None
        folder = root / ("val" if split == "test" and not has_test else split)
        if not folder.is_dir():
            raise ConfigError(
                f"Expected image folders {root}/train/CLASS and {root}/test/CLASS (or val), but "
                f"{folder} does not exist; name the folder that holds them with --data.root."
            )
        try:
            found = torchvision.datasets.ImageFolder(str(folder))
        except FileNotFoundError as error:
            raise ConfigError(
                f"{folder} needs one folder per class with at least one image in each "
                f"({', '.join(IMG_EXTENSIONS)})."
            ) from error
        self._check_classes(folder, found.classes)
        paths, labels = zip(*found.samples, strict=True)
        return FileImages([Path(path) for path in paths], torch.tensor(labels), self.in_channels, self.size)

    def _check_classes(self, folder: Path, classes: list[str]) -> None:
        if self.all_classes and tuple(classes) != self.all_classes:
            different = ", ".join(sorted(set(classes) ^ set(self.all_classes)))
            raise ConfigError(f"The classes in {folder} differ from those of the other folders: {different}.")
        self.all_classes = tuple(classes)


def find_images(folder: Path) -> list[Path]:
    """List the image files in a folder and the folders inside it, sorted.

    Raises:
        ConfigError: The folder does not exist or holds no image.
    """
    if not folder.is_dir():
        raise ConfigError(f"The folder {folder} does not exist.")
    named = (path for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
    images = sorted(path for path in named if path.is_file())
    if not images:
        raise ConfigError(f"The folder {folder} holds no images ({', '.join(IMG_EXTENSIONS)}).")
    return images
