"""Fashion-MNIST: 70,000 grey images of clothes, 28×28 pixels (Xiao et al. 2017)."""

import gzip
import shutil
from pathlib import Path
from typing import Any, Literal

import torchvision.datasets
from lightning_utilities.core.rank_zero import rank_zero_info

from opteq.data.base import ImageDataModule
from opteq.data.images import ArrayImages
from opteq.data.places import DEBIAN_FOLDER, PLACES
from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError
from opteq.system.files import write_beside

PLACE = PLACES["opteq.data.fashion_mnist.FashionMNIST"]
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class FashionMNIST(ImageDataModule):
    """Fashion-MNIST, read from `<root>/FashionMNIST/raw`.

    A missing set is unpacked from Debian's package `dataset-fashion-mnist` if that is installed,
    and downloaded if `download` says so.

    Args:
        root: Folder of data sets.
        download: Download the set if it is missing.
        options: The options of `opteq.data.base.ImageDataModule`.

    Raises:
        ConfigError: The set is missing or damaged.
    """

    all_classes = tuple(torchvision.datasets.FashionMNIST.classes)
    in_channels = 1
    image_size = 28
    normalization = Normalization(mean=(0.2860,), std=(0.3530,))

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        raw = Path(self.root) / "FashionMNIST" / "raw"
        if all((raw / name).is_file() for name in FILES):
            return
        if DEBIAN_FOLDER.is_dir():
            _unpack_debian(raw)
        elif self.download:
            try:
                torchvision.datasets.FashionMNIST(self.root, download=True)
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"Could not download Fashion-MNIST. {PLACE.how_to_get(self.root)}"
                ) from error
        else:
            raise ConfigError(PLACE.complaint(self.root))

    def read(self, split: Literal["train", "val", "test"]) -> ArrayImages | None:
        if split == "val":
            return None
        try:
            images = torchvision.datasets.FashionMNIST(self.root, train=split == "train")
        except (RuntimeError, AssertionError, ValueError, OSError) as error:
            folder = Path(self.root) / "FashionMNIST"
            raise ConfigError(
                f"Fashion-MNIST in {folder} is damaged ({error}); delete that folder."
            ) from error
        return ArrayImages(images.data.unsqueeze(1), images.targets)


def _unpack_debian(raw: Path) -> None:
    """Decompress Debian's files; torchvision would refuse the `.gz`, whose checksums differ."""
    rank_zero_info(f"Unpacking Debian's dataset-fashion-mnist into {raw}.")
    raw.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        packed = DEBIAN_FOLDER / f"{name}.gz"
        try:
            with gzip.open(packed) as source, write_beside(raw / name) as target:
                shutil.copyfileobj(source, target)
        except (OSError, EOFError) as error:
            raise ConfigError(
                f"Could not unpack {packed} ({error}); reinstall dataset-fashion-mnist and check the "
                "space on the disk."
            ) from error
