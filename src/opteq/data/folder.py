"""Any set of image files sorted into one folder per class."""

from pathlib import Path
from typing import Any, Literal

import torch

from opteq.data.base import ImageDataModule, set_aside
from opteq.data.finding import find_images_of, shown
from opteq.data.images import FileImages, Images, channels_of, check_channels
from opteq.data.places import PLACES
from opteq.data.preprocess import IMAGENET, IMAGENET_GREY
from opteq.errors import ConfigError
from opteq.system.files import readable


class ImageFolder(ImageDataModule):
    """Images in `<root>/train/<class>/` and `<root>/test/<class>/`, perhaps also `<root>/val`.

    With only one of `test` and `val`, that one is the test set and validation uses a slice of
    `train`. Where there is neither, `test_fraction` says how many images are tested on, and the classes may
    lie in `<root>/<class>/`. Hidden files and folders, whose names start with a dot, are left out.

    Args:
        root: The folder that holds `train`, or those of the classes.
        image_size: Images are resized to this shorter side and cropped to a square.
        in_channels: 1 to read grey images, 3 for colour; unless given, what the network takes or, if that is
            left out too, 1 where all training images are grey.
        test_fraction: Share of the images of each class that is set aside for the test, the same ones in
            every run as long as the files are the same; None where there are test images.
        options: The options of `opteq.data.base.ImageDataModule`.

    Raises:
        ConfigError: A folder is missing or empty, the classes of two folders differ, or `test_fraction` is
            not between 0 and 1, leaves a part empty, or is given beside test images.
    """

    def __init__(
        self,
        root: str,
        image_size: int = 64,
        in_channels: int | None = None,
        test_fraction: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if test_fraction is not None and not 0 < test_fraction < 1:
            raise ConfigError(f"Expected `test_fraction` between 0 and 1, got {test_fraction}.")
        self.test_fraction = test_fraction
        if image_size < 1:
            raise ConfigError(f"Expected `image_size` of at least 1, got {image_size}.")
        self.root = root
        self.size = self.image_size = image_size
        self.all_classes = ()
        check_channels(in_channels)
        self._channels = in_channels
        # By the folder: what is found there is told once.
        self._found: dict[Path, dict[str, list[Path]]] = {}

    @property
    def title(self) -> str:
        """Name of the folder."""
        return readable(Path(self.root).resolve().name)

    def read(self, split: Literal["train", "val", "test"]) -> Images | None:
        root = Path(self.root)
        if self.test_fraction is not None:
            return None if split == "val" else self._part(split, self.test_fraction)
        has_test = (root / "test").is_dir()
        if split == "val" and not (has_test and (root / "val").is_dir()):
            return None
        return self._images(root / ("val" if split == "test" and not has_test else split))

    def _part(self, split: Literal["train", "test"], fraction: float) -> Images:
        """The images that are set aside for the test, or the others."""
        root, train = Path(self.root), Path(self.root, "train")
        if beside := [name for name in ("test", "val") if (root / name).is_dir()]:
            raise ConfigError(f"{root / beside[0]} holds images to test on; leave out `test_fraction`.")
        images = self._images(train if train.is_dir() else root)
        tested, others = set_aside(images, fraction, "test_fraction", "images", "test")
        return tested if split == "test" else others

    def _images(self, folder: Path) -> FileImages:
        """All images of a folder of classes."""
        files = self._files(folder)
        self._check_classes(folder, tuple(files))
        if self._channels is None:
            # Those of the training images also where others are tested on.
            train = Path(self.root, "train")
            first = self._files(train) if train.is_dir() else files
            self._channels = channels_of(path for paths in first.values() for path in paths)
        self.in_channels = self._channels
        self.normalization = IMAGENET if self.in_channels == 3 else IMAGENET_GREY
        labels = [label for label, paths in enumerate(files.values()) for _ in paths]
        paths = [path for paths in files.values() for path in paths]
        return FileImages(paths, torch.tensor(labels), self.in_channels, self.size)

    def _files(self, folder: Path) -> dict[str, list[Path]]:
        """The images of each class."""
        if folder not in self._found:
            self._found[folder] = self._find(folder)
        return self._found[folder]

    def _find(self, folder: Path) -> dict[str, list[Path]]:
        if not folder.is_dir():
            raise ConfigError(PLACES["opteq.data.folder.ImageFolder"].complaint(self.root, folder))
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and shown(path.name))
        names = [readable(path.name) for path in classes]
        files = dict(zip(names, find_images_of(classes, folder), strict=True))
        if len(files) < len(classes):
            raise ConfigError(f"Two folders in {folder} have one name, in UTF-8 and Latin-1; rename one.")
        if not files:
            raise ConfigError(f"{folder} needs one folder per class with at least one image in each.")
        return files

    def _check_classes(self, folder: Path, classes: tuple[str, ...]) -> None:
        known = self.all_classes or classes
        if classes != known:
            missing = [f"{name} is missing" for name in known if name not in classes]
            unknown = [f"{name} is only there" for name in classes if name not in known]
            raise ConfigError(
                f"The classes in {folder} differ from those of the other folders: "
                f"{', '.join(missing + unknown)}."
            )
        self.all_classes = classes
