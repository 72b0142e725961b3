"""What has to be known of a data set beside its batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError

Task = Literal["classification", "segmentation"]


class Facts:
    """The facts about the data of any `LightningDataModule`, after `prepare_data` and `setup`.

    It must have loaders for training and for tests, which give batches `(images, labels)`, images
    `(batch, channels, H, W)`, and `class_names`, one for each label. Without a loader for validation, the
    checkpoint that is tested is the last. What else it has is used:

    - `title`: what the data set is called; its class unless given
    - `task`: `"segmentation"`, where every pixel has a label (negative for none), or else `"classification"`
    - `in_channels`, `image_size`: those of the images; else they are read off a batch
    - `class_counts`: number of training images, or pixels, of each class, for balanced class weights
    - `normalization`: mean and standard deviation of each channel that were applied to pixels in [0, 1]; none
      unless given

    Args:
        data: the data module.
        stage: `"fit"`, `"validate"` or `"test"`, what it was set up for.
    """

    def __init__(self, data: Any, stage: str = "fit") -> None:
        self.data, self.stage = data, stage

    @property
    def title(self) -> str:
        """What the data set is called in summaries and reports."""
        return getattr(self.data, "title", type(self.data).__name__)

    @property
    def task(self) -> Task:
        """Whether an image or each of its pixels has a class."""
        return getattr(self.data, "task", "classification")

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name per class, in the order of the labels.

        Raises:
            ConfigError: There are none, or only one.
        """
        names = getattr(self.data, "class_names", None)
        if not names:
            raise ConfigError(
                f"Expected {type(self.data).__name__} to have `class_names`, a list with the name of each"
                " class, as an attribute or a property, once `setup` was called."
            )
        if len(names) < 2:
            raise ConfigError(f"{self.title} has the one class {names[0]}; give at least two to tell apart.")
        return tuple(names)

    @property
    def class_counts(self) -> Tensor:
        """Number of training images, or pixels, of each class.

        Raises:
            ConfigError: They are not known.
        """
        counts = getattr(self.data, "class_counts", None)
        if counts is None or len(counts) != len(self.class_names):
            raise ConfigError(
                f"Expected {type(self.data).__name__} to have `class_counts`, how many training images each"
                " class has, for balanced class weights; or list the weights in --model.class_weights."
            )
        return torch.as_tensor(counts)

    @property
    def in_channels(self) -> int:
        """Channels of an image."""
        return getattr(self.data, "in_channels", None) or self.sample[0].shape[1]

    @property
    def image_size(self) -> int | tuple[int, int]:
        """Height and width of an image, one number where they are equal."""
        if size := getattr(self.data, "image_size", None):
            return size
        height, width = self.sample[0].shape[2:]
        return height if height == width else (height, width)

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation of each channel for pixels in [0, 1]."""
        if given := getattr(self.data, "normalization", None):
            return Normalization(*given)
        return Normalization.none(self.in_channels)

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """A batch of images and labels that are not trained on.

        Raises:
            ConfigError: There is no loader for them, or it gives something else.
        """
        of_test = self.stage == "test" or (self.stage == "fit" and not self.has_validation)
        loader = self._loader("test_dataloader" if of_test else "val_dataloader")
        match next(iter(loader), None):
            case [Tensor(ndim=4) as images, Tensor() as labels]:
                return images, labels
        raise ConfigError(
            f"Expected batches (images, labels) of {self.title}, images of shape (batch, channels, H, W)."
        )

    @property
    def has_validation(self) -> bool:
        """Whether there are batches to validate a training on."""
        return self._given("val_dataloader") is not None

    def val_dataloader(self) -> Iterable[Sequence[Tensor]]:
        """The batches to validate a training on.

        Raises:
            ConfigError: There are none.
        """
        return self._loader("val_dataloader")

    def test_dataloader(self) -> Iterable[Sequence[Tensor]]:
        """The batches of the test set.

        Raises:
            ConfigError: There are none.
        """
        return self._loader("test_dataloader")

    def _loader(self, name: str) -> Iterable[Sequence[Tensor]]:
        loader = self._given(name)
        if loader is None:
            raise ConfigError(
                f"Expected {type(self.data).__name__} to have `{name}`, a method that gives batches (images,"
                " labels)."
            )
        return loader

    def _given(self, name: str) -> Iterable[Sequence[Tensor]] | None:
        """What the data module gives by that name, if it does."""
        # Lightning's own, which every module inherits, raises an error.
        loader = getattr(self.data, name)() if is_overridden(name, self.data) else None
        return None if loader == [] else loader
