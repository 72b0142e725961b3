"""Where data sets that are not part of the package are looked for; known without importing torch."""

from dataclasses import dataclass
from mimetypes import guess_type
from pathlib import Path

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a data set lies.

    Attributes:
        root: The folder that it is looked for in unless `--data.root` names one; None if it has to.
        inside: What that folder has to hold, one of these; absolute paths are looked for as they are.
        lacking: The sentence that it is not there, of `{root}` and what is `{missing}`.
        advice: What to do then, of `{root}`.
    """

    root: str | None
    inside: tuple[str, ...]
    lacking: str
    advice: str

    def holds(self, root: str) -> bool:
        """Whether the set seems to be there; only reading it shows whether it is complete."""
        return any((Path(root) / name).exists() for name in self.inside)

    def complaint(self, root: str, missing: Path | None = None) -> str:
        """What to say where `missing`, by default the first of `inside`, is not there."""
        missing = missing or Path(root) / self.inside[0]
        return f"{self.lacking.format(root=root, missing=missing)} {self.how_to_get(root)}"

    def how_to_get(self, root: str) -> str:
        """The advice alone."""
        return self.advice.format(root=root)


class _Sorted(Place):
    """That of images in one folder per class, which some have without `train` and `test` above them."""

    __slots__ = ()

    def complaint(self, root: str, missing: Path | None = None) -> str:
        classes = [] if self.holds(root) else _folders_of_images(Path(root))
        if not classes:
            return super().complaint(root, missing)
        some = ", ".join(classes[:5]) + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")
        found = f"{root} holds the class folders {some} itself, where train and test are expected"
        if Path(root).name == "train":
            return f"{found}; name the folder above it with --data.root."
        return (
            f"{found}; give --data.test_fraction 0.2 to test on a fifth of their images, or move them into"
            f" {Path(root, 'train')}, and those to test on into {Path(root, 'test', 'CLASS')}."
        )


def _folders_of_images(root: Path) -> list[str]:
    """The folders in `root`, but for hidden ones and those of a split, that directly hold an image."""
    # By the names of files alone: what is read as an image is known to torchvision, which takes its seconds.
    return sorted(
        path.name
        for path in (root.iterdir() if root.is_dir() else ())
        if path.is_dir()
        and not path.name.startswith(".")
        and path.name not in ("train", "val", "test")
        and any(str(guess_type(file.name, strict=False)[0]).startswith("image/") for file in path.iterdir())
    )


def _cifar(classes: int, folder: str) -> Place:
    return Place(
        "data",
        (folder,),
        f"CIFAR{classes} is missing or damaged in {{missing}}.",
        f"Unpack https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz into {{root}}, name the"
        " folder that holds it with --data.root, or use --data.download true where there is internet access.",
    )


# By the class that reads them.
PLACES = {
    "opteq.data.cifar.CIFAR10": _cifar(10, "cifar-10-batches-py"),
    "opteq.data.cifar.CIFAR100": _cifar(100, "cifar-100-python"),
    "opteq.data.fashion_mnist.FashionMNIST": Place(
        "data",
        ("FashionMNIST/raw", str(DEBIAN_FOLDER)),
        "Fashion-MNIST is not in {missing}.",
        "Install Debian's package dataset-fashion-mnist (apt install dataset-fashion-mnist), name the folder"
        " that holds it with --data.root, or use --data.download true where there is internet access.",
    ),
    "opteq.data.folder.ImageFolder": _Sorted(
        None,
        ("train",),
        "Expected image folders {root}/train/CLASS and {root}/test/CLASS (or val), but {missing} does not"
        " exist.",
        "Name the folder that holds them with --data.root.",
    ),
    "opteq.data.segmentation.SegmentationFolder": Place(
        None,
        ("images/train", "train/images"),
        "There is no folder {missing}.",
        "Name the folder that holds images/train, masks/train, images/test and masks/test (or val) with"
        " --data.root.",
    ),
    # Unpacked, or an archive that torchvision unpacks.
    "opteq.data.cityscapes.Cityscapes": Place(
        "data/cityscapes",
        ("leftImg8bit", "leftImg8bit_trainvaltest.zip"),
        "Cityscapes is missing or damaged in {root}.",
        "Unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip from https://www.cityscapes-dataset.com"
        " there, or name the folder that holds them with --data.root.",
    ),
}
