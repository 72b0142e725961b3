"""Labelled images that are fetched a whole batch at a time.

Reading one image after the other costs more than a small network needs to classify it. The sets
below therefore answer `torch.utils.data.DataLoader` with one tensor per batch (`__getitems__`) and
leave it as bytes; `opteq.data.preprocess.Preprocess` turns it into what a network takes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, TiffImageFile
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import functional

from opteq.errors import ConfigError

# Decoded images up to this size are kept in memory; larger sets are read from disk batch by batch.
MEMORY_BUDGET_BYTES = 2 * 1024**3

# How a TIFF file says that its levels count from white to black.
WHITE_IS_ZERO = 0


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

    def class_counts(self, classes: int) -> Tensor:
        """Number of images, or of pixels, of each class."""
        return count_labels(self.labels, classes)

    def check(self) -> None:
        """Read every image once, so that a damaged file is found now rather than after a training.

        Raises:
            ConfigError: A file cannot be read.
        """
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(lambda index: self.__getitems__([index]), range(len(self))):
                pass


def count_labels(labels: Tensor, classes: int) -> Tensor:
    """How often each class is among labels, some of which may be of none."""
    return labels[labels < classes].long().bincount(minlength=classes)


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
        path: A file in a format that Pillow reads, see `read_pixels`.
        channels: 1 for grey images, 3 for colour.
        size: Height and width of the result.

    Returns:
        Pixels of dtype uint8, shape (channels, size, size).

    Raises:
        ConfigError: As for `read_pixels`.
    """
    pixels = read_pixels(path, channels)
    if pixels.shape[1:] != (size, size):
        pixels = functional.resize(pixels, [size], antialias=True)
        pixels = functional.center_crop(pixels, [size, size])
    return pixels


def read_pixels(path: Path, channels: int) -> Tensor:
    """Read one image file as a viewer shows it, as bytes of shape (channels, height, width).

    - It is turned as its EXIF data say.
    - What is transparent, by an alpha channel, a palette or a key colour, is laid over white.
    - Palettes become their colours, and grey levels become colours or the other way round as `channels` says.
    - 16 bits, or the 12 of a TIFF file, are scaled to 8. Wider or signed whole numbers have no white of
      their own: they are taken as they are, and must be from 0 to 255.
    - Of animations and files of several pages, the first image is read.

    Raises:
        ConfigError: The file is not a readable image, its pixels are floating-point numbers, or they are
            wide whole numbers beyond a byte.
    """
    with opened(path) as file:
        image = _over_white(_to_bytes(file, path))
        # By way of colours, to which Pillow converts every mode.
        image = image if image.mode in ("1", "L") else image.convert("RGB")
        return functional.pil_to_tensor(image.convert("L" if channels == 1 else "RGB"))


def check_channels(in_channels: int | None) -> None:
    """Raise a `ConfigError` unless images may have that number of channels; None leaves it open."""
    if in_channels not in (None, 1, 3):
        raise ConfigError(f"Expected `in_channels` of 1 for grey images or 3 for colour, got {in_channels}.")


def channels_of(paths: Iterable[Path]) -> int:
    """1 if all the images are grey by the heads of their files, else 3.

    Raises:
        ConfigError: A file is not an image.
    """
    return 1 if all(_is_grey(path) for path in paths) else 3


def _is_grey(path: Path) -> bool:
    with _file(path) as file:
        return file.mode in ("1", "L", "LA", "La", "F") or file.mode.startswith("I")


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file, decoded and upright; what goes wrong with reading it becomes a `ConfigError`."""
    with _file(path) as file:
        _scale_key(file)
        file.load()
        # Viewers show an image whose EXIF data are damaged as it is stored.
        with suppress(Exception):
            ImageOps.exif_transpose(file, in_place=True)
        yield file


@contextmanager
def _file(path: Path) -> Iterator[Image.Image]:
    try:
        # As a stream: files that it opens by their names Pillow may map into memory, and then mixes up height
        # and width of those that lie on their side.
        with path.open("rb") as stream, Image.open(stream) as file:
            yield file
    except ConfigError:
        raise
    except Exception as error:  # Decoders raise errors of every kind at damaged files.
        # It would be named by the stream.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "no known format" if unknown else " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"Could not read the image {path} ({reason}); repair it or remove it.") from error


def _scale_key(file: Image.Image) -> None:
    """Bring the transparent colour of a PNG file to the 8 bits that Pillow brings its pixels to."""
    key = file.info.get("transparency")
    depth = file.tile[0][3] if isinstance(file, PngImageFile) and file.tile else None
    if depth in ("L;2", "L;4"):
        file.info["transparency"] = key and key * {"L;2": 85, "L;4": 17}[depth]
    if depth == "RGB;16B":
        file.info["transparency"] = key and tuple(value >> 8 for value in key)


def _to_bytes(image: Image.Image, path: Path) -> Image.Image:
    """Bring grey levels of more than 8 bits to 8; Pillow's own conversion would clip them at 255."""
    if image.mode == "F":
        raise ConfigError(f"{path} holds floating-point pixels; convert it to an 8-bit or 16-bit image.")
    if not image.mode.startswith("I"):
        return image
    levels = np.asarray(image).astype(np.int64)
    key = image.info.get("transparency")
    opaque = None if key is None else levels != key
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    if image.mode.startswith("I;16") or image.format in ("PNG", "PPM"):
        largest = 2 ** tags.get(BITSPERSAMPLE, (16,))[0] - 1
        levels = levels.clip(0, largest) * 255 // largest
    elif levels.min() < 0 or levels.max() > 255:
        raise ConfigError(
            f"{path} holds whole numbers from {levels.min()} to {levels.max()} that do not say what is white;"
            " convert it to an 8-bit or 16-bit image."
        )
    if tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO:
        levels = 255 - levels
    grey = Image.fromarray(levels.astype(np.uint8))
    if opaque is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(opaque.astype(np.uint8) * 255)))


def _over_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    if image.mode == "La":
        image = image.convert("LA")
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), colours)
