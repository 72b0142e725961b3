"""From bytes to the input of a network: augmentation, then normalisation, on whole batches."""

from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms import v2

Augmentation = Literal["none", "crop", "crop-flip", "resized-crop-flip", "randaugment"]


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel, for pixels scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def none(cls, channels: int) -> Self:
        """The one that leaves pixels as they are."""
        return cls((0.0,) * channels, (1.0,) * channels)


# The statistics of ImageNet, customary for photographs.
IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
# Their means over the colours, for grey ones.
IMAGENET_GREY = Normalization(mean=(0.449,), std=(0.226,))


class Preprocess:
    """Collates a batch of bytes into a normalised batch, `(x / 255 - mean) / std`.

    Args:
        normalization: Mean and standard deviation of each channel.
        augmentation: What is done to each image: `"none"`; `"crop"`, a shift by up to an eighth of
            the image; `"crop-flip"`, also a left-right flip of every second one; `"resized-crop-flip"`, in
            place of the shift a part of 8 % to all of the image, its sides as 3:4 to 4:3, enlarged (Szegedy
            et al. 2015);
            `"randaugment"`, also two random operations of RandAugment (Cubuk et al. 2020).
    """

    def __init__(self, normalization: Normalization, augmentation: Augmentation = "none") -> None:
        self.mean = torch.tensor(normalization.mean).view(-1, 1, 1)
        self.std = torch.tensor(normalization.std).view(-1, 1, 1)
        self.augmentation = augmentation
        self._randaugment = v2.RandAugment()

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        # DataLoader types what it collates as a list of samples; here it is one (images, labels).
        images, labels = batch
        if self.augmentation == "resized-crop-flip":
            images = torch.stack([random_part(image) for image in images])
        elif self.augmentation != "none":
            images = random_crop(images, padding=max(1, images.shape[-1] // 8))
        if self.augmentation in ("crop-flip", "resized-crop-flip", "randaugment"):
            images = random_flip(images)
        if self.augmentation == "randaugment":
            images = torch.stack([self._randaugment(image) for image in images])
        return (images.float() / 255 - self.mean) / self.std, labels


def random_crop(images: Tensor, padding: int) -> Tensor:
    """Shift every image by its own offset of up to `padding` pixels; what comes in is black.

    torchvision's transforms would draw one offset for the whole batch.

    Args:
        images: Shape (batch, channels, height, width).
        padding: Largest shift in each direction.
    """
    batch, _, height, width = images.shape
    padded = pad(images, [padding] * 4)
    tops, lefts = torch.randint(0, 2 * padding + 1, (2, batch, 1))
    rows = (tops + torch.arange(height))[:, :, None]
    columns = (lefts + torch.arange(width))[:, None, :]
    sample = torch.arange(batch)[:, None, None]
    # Index tensors around a slice put the indexed dimensions first: (batch, height, width, c).
    return padded[sample, :, rows, columns].movedim(-1, 1)


def random_part(image: Tensor) -> Tensor:
    """A random part of an image `(channels, height, width)`, enlarged to the size of the whole."""
    return v2.RandomResizedCrop(tuple(image.shape[1:]), antialias=True)(image)


def random_flip(images: Tensor) -> Tensor:
    """Flip a random half of the images left to right; shape (batch, channels, height, width)."""
    flipped = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(flipped, images.flip(-1), images)
