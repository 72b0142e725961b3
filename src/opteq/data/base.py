"""What all image data modules share: splits, loaders, and the facts that a network needs."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, WeightedRandomSampler

from opteq.data.facts import Task
from opteq.data.images import ArrayImages, Images
from opteq.data.preprocess import Augmentation, Normalization, Preprocess
from opteq.data.splits import stratified_split
from opteq.errors import ConfigError

# The splits are part of the experiment: they must not move with the seed of the training.
SPLIT_SEED = 0
# Below it, the accuracy on the validation images goes by steps of more than 2 %.
FEW_FOR_VALIDATION = 50

Loader = DataLoader[Any]


class ImageDataModule(LightningDataModule):
    """Images with labels, split into training, validation and test sets.

    The validation images are a stratified slice of the training images, the same one for every run,
    unless the data set brings its own. Checkpoints are chosen on them; the test images are used
    once, at the end.

    Args:
        batch_size: Images in a batch.
        num_workers: Processes that prepare batches; 0 is fastest for sets that fit into memory.
        train_limit: Number of training images to use, chosen with the proportions of the classes;
            all if None.
        val_fraction: Share of the training images that is set aside for validation.
        augmentation: Random changes to training images, see `opteq.data.preprocess.Preprocess`.
        classes: Names of the classes to keep, in the order of their labels; all if None. The images of
            the others are what `unseen_dataloader` gives.
        superclasses: Whether classes with names `SUPER.SUB` are classified by their super-class. `classes`
            then keeps some of the sub-classes.
        fold: In place of `classes`, which sub-class of each super-class is left out, from 0 on; with five in
            each there are five folds.
        balanced: Whether the training images are drawn at random so that every class comes equally often, as
            many in an epoch as there are; otherwise each comes once.

    Attributes:
        task: Whether an image or each of its pixels has a class.
        all_classes: Name of every class of the data set; known for folders only after `setup`.
        in_channels: Channels of an image.
        image_size: Height and width of an image, one number where they are equal.
        normalization: Mean and standard deviation of each channel for pixels in [0, 1].
    """

    task: Task = "classification"
    all_classes: tuple[str, ...]
    in_channels: int
    image_size: int | tuple[int, int]
    normalization: Normalization

    def __init__(
        self,
        batch_size: int = 128,
        num_workers: int = 0,
        train_limit: int | None = None,
        val_fraction: float = 0.1,
        augmentation: Augmentation = "none",
        classes: Sequence[str] | None = None,
        superclasses: bool = False,
        fold: int | None = None,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError(f"Expected `batch_size` of at least 1, got {batch_size}.")
        if num_workers < 0:
            raise ConfigError(f"Expected `num_workers` of at least 0, got {num_workers}.")
        if not 0 < val_fraction < 1:
            raise ConfigError(f"Expected `val_fraction` between 0 and 1, got {val_fraction}.")
        if classes is not None and len(set(classes)) < max(2, len(classes)):
            raise ConfigError(f"Expected `classes` to be two or more different names, got {list(classes)}.")
        if fold is not None and (classes is not None or not superclasses or fold < 0):
            raise ConfigError(
                "Expected `fold` to be 0, 1, … and to stand in place of `classes`, with `superclasses: true`."
            )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_limit = train_limit
        self.val_fraction = val_fraction
        self.augmentation: Augmentation = augmentation
        self.classes = None if classes is None else tuple(classes)
        self.superclasses = superclasses
        self.fold = fold
        self.balanced = balanced
        self._train: Images | None = None
        self._val: Images | None = None
        self._test: Images | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """Name of every class that is told apart, in the order of the labels."""
        kept = self.kept_classes
        return tuple(dict.fromkeys(map(_superclass, kept))) if self.superclasses else kept

    @property
    def kept_classes(self) -> tuple[str, ...]:
        """The classes of the data set that are trained on."""
        if self.fold is None:
            return self.all_classes if self.classes is None else self.classes
        below: dict[str, list[str]] = {}
        for name in self.all_classes:
            below.setdefault(_superclass(name), []).append(name)
        fewest = min(below, key=lambda name: len(below[name]))
        if len(below[fewest]) < 2 or self.fold >= len(below[fewest]):
            raise ConfigError(
                "Expected `fold` below the number of sub-classes of every super-class, and two of them, got"
                f" {self.fold} with {len(below[fewest])} of {fewest}."
            )
        left_out = {names[self.fold] for names in below.values()}
        return tuple(name for name in self.all_classes if name not in left_out)

    @property
    def class_counts(self) -> Tensor:
        """Number of training images, or pixels, of each class."""
        return self._loaded(self._train).class_counts(len(self.class_names))

    @property
    def title(self) -> str:
        """What the data set is called in summaries and reports."""
        return type(self).__name__

    @abstractmethod
    def read(self, split: Literal["train", "val", "test"]) -> Images | None:
        """Read one split from disk; None for a validation split that the data set does not have.

        Raises:
            ConfigError: The data set is missing or damaged.
        """

    def setup(self, stage: str) -> None:
        """Read what a stage (`"fit"`, `"validate"` or `"test"`) needs; reads nothing twice.

        A training is tested at its end: what is wrong with the test images is found before it.
        """
        if stage in ("fit", "validate") and self._val is None:
            self._read_training_splits()
            if stage == "fit":
                _tell_if_few(self._loaded(self._val))
        if stage in ("fit", "test") and self._test is None:
            self._test = self._require("test").in_memory()
            if stage == "fit" and not isinstance(self._test, ArrayImages):
                self._test.check()

    def train_dataloader(self) -> Loader:
        train = self._loaded(self._train)
        # A last batch of a few images would make batch statistics noisy.
        options: dict[str, Any] = {"augmented": True, "drop_last": len(train) >= self.batch_size}
        if not self.balanced:
            return self._loader(train, shuffle=True, **options)
        weights = 1 / self.class_counts.clamp(min=1)[train.labels]
        return self._loader(train, sampler=WeightedRandomSampler(weights.tolist(), len(train)), **options)

    def val_dataloader(self) -> Loader:
        return self._loader(self._loaded(self._val))

    def test_dataloader(self) -> Loader:
        return self._loader(self._loaded(self._test))

    def unseen_dataloader(self) -> Loader:
        """The test images of the classes that `classes` leaves out.

        Their labels are those in the data set or, where sub-classes are left out, of the super-classes.

        Raises:
            ConfigError: No class is left out, or there are no such images.
        """
        images = self.read("test")
        if (self.classes is None and self.fold is None) or images is None:
            raise ConfigError("There are unseen classes only where `classes` leaves some out.")
        unseen = images.subset((self._new_labels()[images.labels] < 0).nonzero()[:, 0])
        if len(unseen) == 0:
            raise ConfigError("The test set has no images of the classes that `classes` leaves out.")
        if self.superclasses:
            unseen.labels = self._labels_of(self.all_classes)[unseen.labels]
        return self._loader(unseen.in_memory())

    def subclass_dataloader(self) -> Loader:
        """All test images, also of sub-classes that are left out, with their labels in `all_classes`.

        Raises:
            ConfigError: `superclasses` is not set, or there are no test images.
        """
        images = self.read("test")
        if not self.superclasses or images is None:
            raise ConfigError("Sub-classes are those of data with `superclasses: true`.")
        return self._loader(images.in_memory())

    @property
    def superclass_labels(self) -> Tensor:
        """The label of the super-class of each of `all_classes`."""
        return self._labels_of(self.all_classes)

    def _read_training_splits(self) -> None:
        train = self._require("train")
        val = self._read_kept("val")
        if val is not None and len(val) == 0:
            raise ConfigError(
                f"No validation image of {self.title} is of a class that is kept; add some, or remove the"
                " validation images, so that a part of the training images takes their place."
            )
        if val is None:
            val, train = set_aside(train, self.val_fraction, "val_fraction", "training images", "validation")
        if self.train_limit is not None:
            if not 1 <= self.train_limit <= len(train):
                raise ConfigError(
                    f"Expected `train_limit` between 1 and {len(train)}, the training images that "
                    f"remain after validation, or null for all of them, got {self.train_limit}."
                )
            chosen, _ = stratified_split(train.labels, self.train_limit, SPLIT_SEED)
            train = train.subset(chosen)
        self._train, self._val = train.in_memory(), val.in_memory()

    def _require(self, split: Literal["train", "test"]) -> Images:
        images = self._read_kept(split)
        if images is None or len(images) == 0:
            raise ConfigError(f"{type(self).__name__} has no {split} images.")
        return images

    def _read_kept(self, split: Literal["train", "val", "test"]) -> Images | None:
        """One split, without the classes that are left out."""
        images = self.read(split)
        if images is None or (self.classes is None and not self.superclasses):
            return images
        labels = self._new_labels()[images.labels]
        kept = images.subset((labels >= 0).nonzero()[:, 0])
        kept.labels = labels[labels >= 0]
        return kept

    def _new_labels(self) -> torch.Tensor:
        """The label of each class of the data set, -1 for those that `classes` leaves out."""
        kept = self.kept_classes
        unknown = [name for name in kept if name not in self.all_classes]
        if unknown:
            raise ConfigError(
                f"There is no class {unknown[0]} in {self.title}; it has {', '.join(self.all_classes)}."
            )
        labels = torch.full((len(self.all_classes),), -1)
        labels[[self.all_classes.index(name) for name in kept]] = self._labels_of(kept)
        return labels

    def _labels_of(self, classes: Sequence[str]) -> torch.Tensor:
        """The labels of classes, or of their super-classes."""
        names = [_superclass(name) for name in classes] if self.superclasses else list(classes)
        unknown = [name for name in names if name not in self.class_names]
        if unknown:
            raise ConfigError(
                f"Expected `classes` to keep a sub-class of every super-class, but not of {unknown[0]}."
            )
        return torch.tensor([self.class_names.index(name) for name in names])

    def _loaded(self, images: Images | None) -> Images:
        if images is None:
            raise ConfigError(f"Call {type(self).__name__}.setup(stage) before asking for its images.")
        return images

    def _preprocess(self, augmented: bool) -> Callable[[Any], tuple[Tensor, Tensor]]:
        """What makes a batch for a network of what the loader has read."""
        return Preprocess(self.normalization, self.augmentation if augmented else "none")

    def _loader(self, images: Images, augmented: bool = False, **options: Any) -> Loader:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=self._preprocess(augmented),
            **options,
        )


def set_aside(images: Images, fraction: float, option: str, what: str, part: str) -> tuple[Images, Images]:
    """A share of images with the proportions of the classes, the same one in every run, and the others.

    Raises:
        ConfigError: One of the two would be empty. It names the `option`, `what` it is a share of and which
            `part` of the data it is for.
    """
    chosen, rest = stratified_split(images.labels, round(fraction * len(images)), SPLIT_SEED)
    if len(chosen) == 0 or len(rest) == 0:
        raise ConfigError(
            f"`{option}={fraction}` of {len(images)} {what} leaves the training or the {part} set empty;"
            " choose another fraction or add images."
        )
    return images.subset(chosen), images.subset(rest)


def _tell_if_few(val: Images) -> None:
    """Say so where hardly any images choose the best checkpoint."""
    count = len(val)
    if count < FEW_FOR_VALIDATION:
        images = "1 validation image" if count == 1 else f"{count} validation images"
        rank_zero_info(
            f"The best checkpoint is chosen by {images}, each worth {1 / count:.0%} of the score; more of"
            " them, or a larger --data.val_fraction, choose better."
        )


def _superclass(name: str) -> str:
    above, dot, below = name.partition(".")
    if not (above and dot and below):
        raise ConfigError(f"Expected classes with names SUPER.SUB for `superclasses`, got {name!r}.")
    return above
