"""Data for segmentation: images with a class for every pixel."""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from opteq.data.base import ImageDataModule
from opteq.data.finding import find_images
from opteq.data.images import channels_of, check_channels
from opteq.data.places import PLACES
from opteq.data.preprocess import IMAGENET, IMAGENET_GREY
from opteq.data.scenes import VOID, FileScenes, SceneAugmentation, ScenePreprocess, Size, read_mask
from opteq.errors import ConfigError
from opteq.system.files import readable

CLASS_NAMES = "classes.txt"


class SegmentationDataModule(ImageDataModule):
    """Images with a class for every pixel; pixels without one count neither in losses nor in scores.

    Args:
        image_size: Height and width that images and masks are resized to.
        crop_size: Height and width of the random windows of `scale-crop-flip`; those of the images if None.
        batch_size, num_workers, train_limit, val_fraction: See `opteq.data.base.ImageDataModule`; the
            validation and limited training images are chosen at random, the same ones for every run.
        augmentation: Random changes to training scenes, see `opteq.data.scenes.ScenePreprocess`.
    """

    task = "segmentation"
    in_channels = 3
    normalization = IMAGENET

    def __init__(
        self,
        image_size: Size,
        crop_size: Size | None = None,
        batch_size: int = 8,
        num_workers: int = 0,
        train_limit: int | None = None,
        val_fraction: float = 0.1,
        augmentation: SceneAugmentation = "none",
    ) -> None:
        super().__init__(batch_size, num_workers, train_limit, val_fraction)
        crop_size = image_size if crop_size is None else crop_size
        if min(*image_size, *crop_size) < 1:
            raise ConfigError(
                f"Expected positive heights and widths, got `image_size` {list(image_size)} and"
                f" `crop_size` {list(crop_size)}."
            )
        self.size = self.image_size = image_size
        self.crop_size = crop_size
        self.scene_augmentation: SceneAugmentation = augmentation

    @abstractmethod
    def read(self, split: Literal["train", "val", "test"]) -> FileScenes | None: ...

    def _preprocess(self, augmented: bool) -> Callable[[Any], tuple[Tensor, Tensor]]:
        augmentation = self.scene_augmentation if augmented else "none"
        return ScenePreprocess(self.normalization, augmentation, self.crop_size)


class SegmentationFolder(SegmentationDataModule):
    """Images in `<root>/images/<split>`, masks in `<root>/masks/<split>`, for the splits train, val and test.

    `<root>/<split>/images` and `<root>/<split>/masks` are found as well. A mask is a PNG file with the name
    of its image, whose pixels are class numbers. With only one of `test` and `val`, that one is the test set
    and validation uses a slice of `train`.

    Args:
        root: The folder.
        image_size: Height and width that images and masks are resized to.
        names: Names of the classes, in the order of their numbers; by default the lines of
            `<root>/classes.txt`, or where there is none the numbers in the training masks.
        ignore_index: The number of pixels without a class.
        in_channels: 1 to read grey images, 3 for colour; unless given, what the network takes or, if that is
            left out too, 1 where all training images are grey.
        options: The other options of `opteq.data.segmentation.SegmentationDataModule`.

    Raises:
        ConfigError: A folder, an image or a mask is missing or cannot be read, or a mask holds numbers of
            no class.
    """

    def __init__(
        self,
        root: str,
        image_size: Size,
        names: list[str] | None = None,
        ignore_index: int = VOID,
        in_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(image_size, **options)
        check_channels(in_channels)
        if not 0 <= ignore_index <= 255:
            raise ConfigError(f"Expected `ignore_index` from 0 to 255, got {ignore_index}.")
        self.root = root
        self.all_classes = tuple(names or ())
        self.ignore_index = ignore_index
        self._channels = in_channels
        # By the split: what is found there is told once.
        self._found: dict[str, tuple[list[Path], list[Path]]] = {}

    @property
    def title(self) -> str:
        """Name of the folder."""
        return readable(Path(self.root).resolve().name)

    def read(self, split: Literal["train", "val", "test"]) -> FileScenes | None:
        has_test = self._folder("images", "test") is not None
        if split == "val" and not (has_test and self._folder("images", "val")):
            return None
        images, masks = self._files("val" if split == "test" and not has_test else split)
        if not self.all_classes:
            self.all_classes = self._find_classes()
        if self._channels is None:
            has_train = self._folder("images", "train") is not None
            self._channels = channels_of(self._files("train")[0] if has_train else images)
        self.in_channels = self._channels
        self.normalization = IMAGENET if self.in_channels == 3 else IMAGENET_GREY
        classes = torch.arange(256, dtype=torch.uint8)
        classes[self.ignore_index] = VOID
        return FileScenes(images, masks, self.size, classes, len(self.class_names), self.in_channels)

    def _folder(self, part: str, split: str) -> Path | None:
        root = Path(self.root)
        folders = (root / part / split, root / split / part)
        return next((folder for folder in folders if folder.is_dir()), None)

    def _files(self, split: str) -> tuple[list[Path], list[Path]]:
        """The images of a split and their masks."""
        if split not in self._found:
            self._found[split] = self._find(split)
        return self._found[split]

    def _find(self, split: str) -> tuple[list[Path], list[Path]]:
        images_folder, masks_folder = (self._folder(part, split) for part in ("images", "masks"))
        if images_folder is None or masks_folder is None:
            part = "images" if images_folder is None else "masks"
            place = PLACES["opteq.data.segmentation.SegmentationFolder"]
            raise ConfigError(place.complaint(self.root, Path(self.root) / part / split))
        images = find_images(images_folder)
        masks = [(masks_folder / path.relative_to(images_folder)).with_suffix(".png") for path in images]
        for image, mask in zip(images, masks, strict=True):
            if not mask.is_file():
                raise ConfigError(f"The image {image} has no mask {mask}; add it or remove the image.")
        return images, masks

    def _find_classes(self) -> tuple[str, ...]:
        path = Path(self.root) / CLASS_NAMES
        if path.is_file():
            try:
                names = path.read_text(encoding="utf-8").split("\n")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} is not a text file in UTF-8; save it as one.") from error
            names = [name.strip() for name in names if name.strip()]
            if len(set(names)) < len(names):
                raise ConfigError(f"{path} names a class twice; give every class a name of its own.")
            return tuple(names)
        numbers = {int(n) for mask in self._files("train")[1] for n in read_mask(mask).unique()}
        largest = max(numbers - {self.ignore_index, VOID}, default=-1)
        return tuple(str(number) for number in range(largest + 1))
