"""Images of scenes with a class for every pixel, and their random views."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, functional, v2

from opteq.data.images import MEMORY_BUDGET_BYTES, ArrayImages, Images, count_labels, opened, read_pixels
from opteq.data.preprocess import Normalization, Preprocess
from opteq.errors import ConfigError

# In the masks, as is customary, and in the labels of a batch, as torch's cross entropy has it.
VOID = 255
IGNORED = -100

SCALES = (0.5, 2.0)

SceneAugmentation = Literal["none", "flip", "scale-crop-flip"]
Size = tuple[int, int]


class FileScenes(Images):
    """Files of images and of masks, resized as they are read.

    Args:
        images: The image files.
        masks: The file with the mask of each image, one channel of class numbers.
        size: Height and width that images and masks are resized to.
        classes: What the numbers in the files stand for: the class, or `VOID` for pixels that have none;
            shape (256,).
        num_classes: Number of classes.
        channels: 1 for grey images, 3 for colour.
    """

    def __init__(
        self,
        images: Sequence[Path],
        masks: Sequence[Path],
        size: Size,
        classes: Tensor,
        num_classes: int,
        channels: int = 3,
    ) -> None:
        self.images = list(images)
        self.masks = list(masks)
        self.size = size
        self.classes = classes
        self.num_classes = num_classes
        self.channels = channels
        # A scene has many classes: with one label for all, splits are plain random ones.
        self.labels = torch.zeros(len(self.images), dtype=torch.long)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), self.channels, *self.size, dtype=torch.uint8)
        masks = torch.empty(len(indices), *self.size, dtype=torch.uint8)
        for row, index in enumerate(indices):
            image = read_pixels(self.images[index], self.channels)
            mask = self._read_mask(self.masks[index])
            if image.shape[1:] != mask.shape:
                height, width = image.shape[1:]
                raise ConfigError(
                    f"{self.masks[index]} has {mask.shape[1]}×{mask.shape[0]} pixels, but its image"
                    f" {self.images[index]} has {width}×{height}."
                )
            images[row], masks[row] = _resized(image, self.size), _resized_mask(mask, self.size)
        return images, masks

    def subset(self, indices: Tensor) -> "FileScenes":
        images, masks = ([paths[i] for i in indices.tolist()] for paths in (self.images, self.masks))
        return FileScenes(images, masks, self.size, self.classes, self.num_classes, self.channels)

    def class_counts(self, classes: int) -> Tensor:
        return torch.stack([count_labels(self._read_mask(mask), classes) for mask in self.masks]).sum(0)

    def in_memory(self) -> Images:
        if len(self) * (self.channels + 1) * self.size[0] * self.size[1] > MEMORY_BUDGET_BYTES:
            return self
        return ArrayImages(*self.__getitems__(range(len(self))))

    def _read_mask(self, path: Path) -> Tensor:
        mask = self.classes[read_mask(path).long()]
        wrong = mask[(mask >= self.num_classes) & (mask != VOID)]
        if len(wrong):
            raise ConfigError(
                f"{path} has a pixel of class {int(wrong[0])}, but the {self.num_classes} classes are"
                f" numbered from 0; correct it, name more classes, or set --data.ignore_index."
            )
        return mask


def read_mask(path: Path) -> Tensor:
    """Read the class numbers in one mask file, turned as its EXIF data say, bytes of shape (height, width).

    Raises:
        ConfigError: The file is not a readable image, or has more than one channel or byte for a pixel.
    """
    with opened(path) as file:
        # The numbers in a file with a palette are classes too; the colours are for the eye.
        if file.mode not in ("L", "P"):
            raise ConfigError(
                f"Expected one byte for every pixel in the mask {path}, its class, got an image of mode"
                f" {file.mode}."
            )
        return torch.from_numpy(np.array(file))


class ScenePreprocess:
    """Collates a batch of scenes: random views of image and mask together, then normalised images.

    Labels come out as `int64`, `IGNORED` where there is no class.

    Args:
        normalization: Mean and standard deviation of each channel.
        augmentation: `"none"`; `"flip"`, a left-right flip of every second scene; `"scale-crop-flip"`, also a
            random scale from one half to two and a random window of `crop_size`, with black pixels without
            a class where the window goes beyond the scene.
        crop_size: Height and width of the window.
    """

    def __init__(
        self, normalization: Normalization, augmentation: SceneAugmentation, crop_size: Size
    ) -> None:
        self.augmentation = augmentation
        self._normalise = Preprocess(normalization)
        fill: dict[Any, Any] = {tv_tensors.Image: 0, tv_tensors.Mask: VOID}
        self._crop = v2.RandomCrop(crop_size, pad_if_needed=True, fill=fill)
        self._flip = v2.RandomHorizontalFlip()

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        images, masks = batch
        if self.augmentation != "none":
            views = [self._view(image, mask) for image, mask in zip(images, masks, strict=True)]
            images, masks = (torch.stack(part) for part in zip(*views, strict=True))
        return self._normalise((images, masks.long().masked_fill(masks == VOID, IGNORED)))

    def _view(self, image: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.augmentation == "flip":
            return self._flip(tv_tensors.Image(image), tv_tensors.Mask(mask))
        scale = torch.empty(()).uniform_(*SCALES).item()
        height, width = (max(1, round(scale * length)) for length in mask.shape)
        # torchvision's own random scales would take masks half a pixel beside their images.
        image, mask = _resized(image, (height, width)), _resized_mask(mask, (height, width))
        return self._flip(*self._crop(tv_tensors.Image(image), tv_tensors.Mask(mask)))


def _resized(image: Tensor, size: Size) -> Tensor:
    return image if image.shape[1:] == size else functional.resize(image, list(size), antialias=True)


def _resized_mask(mask: Tensor, size: Size) -> Tensor:
    return functional.resize(mask[None], list(size), InterpolationMode.NEAREST_EXACT)[0]
