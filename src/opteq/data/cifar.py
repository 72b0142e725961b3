"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32×32 pixels (Krizhevsky 2009)."""

from typing import Any, Literal

import torch
import torchvision.datasets

from opteq.data.base import ImageDataModule
from opteq.data.images import ArrayImages
from opteq.data.places import PLACES
from opteq.data.preprocess import Normalization
from opteq.errors import ConfigError

_SUBCLASSES = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}
_SUPERCLASS_OF = {sub: above for above, below in _SUBCLASSES.items() for sub in below.split()}


class CIFAR10(ImageDataModule):
    """CIFAR-10, read from torchvision's folder `<root>/cifar-10-batches-py`.

    Args:
        root: Folder of data sets.
        download: Download the set if it is missing.
        options: The options of `opteq.data.base.ImageDataModule`.

    Raises:
        ConfigError: The set is missing or damaged.
    """

    dataset = torchvision.datasets.CIFAR10
    place = PLACES["opteq.data.cifar.CIFAR10"]
    in_channels = 3
    image_size = 32
    normalization = Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))

    def __init__(self, root: str = "data", download: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.root = root
        self.download = download

    def prepare_data(self) -> None:
        if self.download and not self.place.holds(self.root):
            try:
                self.dataset(self.root, download=True)
            except (OSError, RuntimeError) as error:
                advice = self.place.how_to_get(self.root)
                raise ConfigError(f"Could not download {type(self).__name__} ({error}). {advice}") from error

    def read(self, split: Literal["train", "val", "test"]) -> ArrayImages | None:
        if split == "val":
            return None
        try:
            images = self.dataset(self.root, train=split == "train")
        except (OSError, RuntimeError) as error:
            raise ConfigError(self.place.complaint(self.root)) from error
        self.all_classes = tuple(images.classes)
        pixels = torch.from_numpy(images.data).permute(0, 3, 1, 2).contiguous()
        return ArrayImages(pixels, torch.tensor(images.targets))


class CIFAR100(CIFAR10):
    """CIFAR-100 with its 100 fine classes, read from `<root>/cifar-100-python`; options of CIFAR10.

    With `superclasses` the classes are called `SUPER.SUB`: the data set has 20 super-classes of five.
    """

    dataset = torchvision.datasets.CIFAR100
    place = PLACES["opteq.data.cifar.CIFAR100"]
    normalization = Normalization(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))

    def read(self, split: Literal["train", "val", "test"]) -> ArrayImages | None:
        images = super().read(split)
        if images is not None and self.superclasses:
            self.all_classes = tuple(f"{_SUPERCLASS_OF[name]}.{name}" for name in self.all_classes)
        return images
