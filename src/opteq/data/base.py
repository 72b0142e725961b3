"""What all image data modules share: splits, loaders, and the facts that a network needs."""

from abc import abstractmethod
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from opteq.data.images import Images
from opteq.data.preprocess import Augmentation, Normalization, Preprocess
from opteq.data.splits import stratified_split
from opteq.errors import ConfigError

# The splits are part of the experiment: they must not move with the seed of the training.
SPLIT_SEED = 0

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

    Attributes:
        class_names: Name of every class; known for folders only after `setup`.
        in_channels: Channels of an image.
        image_size: Height and width of an image.
        normalization: Mean and standard deviation of each channel for pixels in [0, 1].
    """

    class_names: tuple[str, ...]
    in_channels: int
    image_size: int
    normalization: Normalization

    def __init__(
        self,
        batch_size: int = 128,
        num_workers: int = 0,
        train_limit: int | None = None,
        val_fraction: float = 0.1,
        augmentation: Augmentation = "none",
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError(f"Expected `batch_size` of at least 1, got {batch_size}.")
        if num_workers < 0:
            raise ConfigError(f"Expected `num_workers` of at least 0, got {num_workers}.")
        if not 0 < val_fraction < 1:
            raise ConfigError(f"Expected `val_fraction` between 0 and 1, got {val_fraction}.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.train_limit = train_limit
        self.val_fraction = val_fraction
        self.augmentation: Augmentation = augmentation
        self._train: Images | None = None
        self._val: Images | None = None
        self._test: Images | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

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
        """Read what a stage (`"fit"`, `"validate"` or `"test"`) needs; reads nothing twice."""
        if stage == "test" and self._test is None:
            self._test = self._require("test").in_memory()
        if stage in ("fit", "validate") and self._val is None:
            self._read_training_splits()

    def train_dataloader(self) -> Loader:
        train = self._loaded(self._train)
        # A last batch of a few images would make batch statistics noisy.
        return self._loader(train, self.augmentation, shuffle=True, drop_last=len(train) >= self.batch_size)

    def val_dataloader(self) -> Loader:
        return self._loader(self._loaded(self._val))

    def test_dataloader(self) -> Loader:
        return self._loader(self._loaded(self._test))

    def _read_training_splits(self) -> None:
        train = self._require("train")
        val = self.read("val")
        if val is None:
            chosen, rest = stratified_split(train.labels, round(self.val_fraction * len(train)), SPLIT_SEED)
            if len(chosen) == 0 or len(rest) == 0:
                raise ConfigError(
                    f"`val_fraction={self.val_fraction}` of {len(train)} training images leaves the "
                    "training or the validation set empty; choose another fraction or add images."
                )
            train, val = train.subset(rest), train.subset(chosen)
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
        images = self.read(split)
        if images is None or len(images) == 0:
            raise ConfigError(f"{type(self).__name__} has no {split} images.")
        return images

    def _loaded(self, images: Images | None) -> Images:
        if images is None:
            raise ConfigError(f"Call {type(self).__name__}.setup(stage) before asking for its images.")
        return images

    def _loader(self, images: Images, augmentation: Augmentation = "none", **options: Any) -> Loader:
        return DataLoader(
            images,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=Preprocess(self.normalization, augmentation),
            **options,
        )
