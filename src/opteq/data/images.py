"""Labelled images that are fetched a whole batch at a time.

Reading one image after the other costs more than a small network needs to classify it. The sets
below therefore answer `torch.utils.data.DataLoader` with one tensor per batch (`__getitems__`) and
leave it as bytes; `opteq.data.preprocess.Preprocess` turns it into what a network takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import functional

from opteq.errors import ConfigError

# Decoded images up to this size are kept in memory; larger sets are read from disk batch by batch.
MEMORY_BUDGET_BYTES = 2 * 1024**3


class Images(Dataset[Any], ABC):
    """A labelled set of images of one size.

    Attributes:
        labels: Class of every image, shape (n,).
    """

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images as bytes, shape (batch, channels, height, width), and labels, shape (batch,)."""

    @abstractmethod
    def subset(self, indices: Tensor) -> "Images":
        """The images with the given indices."""

    @abstractmethod
    def in_memory(self) -> "Images":
        """The same images decoded, or the images as they are where that would need too much memory."""


class ArrayImages(Images):
    """Images held in one tensor.

    Args:
        images: Pixels of dtype uint8, shape (n, channels, height, width).
        labels: Class of every image, shape (n,), or of every pixel, shape (n, height, width).
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.labels[chosen]

    def subset(self, indices: Tensor) -> "ArrayImages":
        return ArrayImages(self.images[indices], self.labels[indices])

    def in_memory(self) -> "ArrayImages":
        return self


class FileImages(Images):
    """Image files, resized and cropped to squares as they are read.

    Args:
        paths: The files.
        labels: Class of every file, shape (n,).
        channels: 1 for grey images, 3 for colour.
        size: Height and width of the images returned.
    """

    def __init__(self, paths: Sequence[Path], labels: Tensor, channels: int, size: int) -> None:
        self.paths = list(paths)
        self.labels = labels
        self.channels = channels
        self.size = size

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images = torch.empty(len(indices), self.channels, self.size, self.size, dtype=torch.uint8)
        for row, index in enumerate(indices):
            images[row] = read_image(self.paths[index], self.channels, self.size)
        return images, self.labels[torch.as_tensor(indices)]

    def subset(self, indices: Tensor) -> "FileImages":
        paths = [self.paths[index] for index in indices.tolist()]
        return FileImages(paths, self.labels[indices], self.channels, self.size)

    def in_memory(self) -> Images:
        if len(self) * self.channels * self.size**2 > MEMORY_BUDGET_BYTES:
            return self
        return ArrayImages(*self.__getitems__(range(len(self))))


def read_image(path: Path, channels: int, size: int) -> Tensor:
    """Read one image file as bytes.

    The shorter side is resized to `size` and the centre is cropped; an image that has the size
    already is untouched.

    Args:
        path: A file in a format that Pillow reads, with 8 or 16 bits per channel.
        channels: 1 for grey images, 3 for colour.
        size: Height and width of the result.

    Returns:
        Pixels of dtype uint8, shape (channels, size, size).

    Raises:
        ConfigError: The file is not a readable image, or its pixels are floating-point numbers.
    """
    pixels = read_pixels(path, channels)
    if pixels.shape[1:] != (size, size):
        pixels = functional.resize(pixels, [size], antialias=True)
        pixels = functional.center_crop(pixels, [size, size])
    return pixels


def read_pixels(path: Path, channels: int) -> Tensor:
    """Read one image file as it is, as bytes of shape (channels, height, width); raises as `read_image`."""
    with opened(path) as file:
        return functional.pil_to_tensor(_to_bytes(file, path).convert("L" if channels == 1 else "RGB"))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file; what goes wrong with reading it becomes a `ConfigError`."""
    try:
        with Image.open(path) as file:
            yield file
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"Could not read the image {path} ({error}); repair it or remove it.") from error


def _to_bytes(image: Image.Image, path: Path) -> Image.Image:
    """Scale 16-bit pixels to 8 bits; Pillow's own conversion would clip them at 255."""
    if image.mode == "F":
        raise ConfigError(f"{path} holds floating-point pixels; convert it to an 8-bit or 16-bit image.")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    return image
