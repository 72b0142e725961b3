"""Image files in folders, and the others there."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info
from torchvision.datasets.folder import IMG_EXTENSIONS

from opteq.errors import ConfigError
from opteq.system.files import check_folder

Tell = Callable[[str], None]

# How the names of files end that are taken for images, in folders and on the page of `opteq show`.
SUFFIXES = (*IMG_EXTENSIONS, ".gif")
_READ = f"ending in {', '.join(SUFFIXES)}"


def find_images(folder: Path, tell: Tell = rank_zero_info) -> list[Path]:
    """List the image files in a folder and the folders inside it, sorted.

    Links are followed. Hidden files and folders, such as `.ipynb_checkpoints`, are left out.

    Args:
        folder: The folder.
        tell: Receives a sentence about the files that are left out as they are not named like images.

    Raises:
        ConfigError: The folder does not exist or holds no image.
    """
    (images,) = find_images_of([folder], folder, tell)
    return images


def find_images_of(parts: Sequence[Path], whole: Path, tell: Tell = rank_zero_info) -> list[list[Path]]:
    """What `find_images` lists for each of several folders, with one sentence about them as a `whole`."""
    found, others = [], []
    for folder in parts:
        check_folder(folder)
        images, rest = _sorted_out(folder)
        if not images:
            raise ConfigError(f"The folder {folder} holds no images {_READ}.")
        found.append(images)
        others += rest
    if others:
        count = sum(map(len, found)) + len(others)
        kinds = ", ".join(sorted({path.suffix or path.name for path in others}))
        are = "is" if len(others) == 1 else "are"
        left_out = f"{len(others)} of {count} files in {whole} {are} left out ({kinds})"
        tell(f"{left_out}: only images {_READ} are read.")
    return found


def shown(name: str) -> bool:
    """Whether a file or folder of that name is not hidden."""
    return not name.startswith(".")


def _sorted_out(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files that are named like images, and the others."""
    images, others = [], []
    for path in sorted(_visible_files(folder), key=lambda path: path.split(os.sep)):
        file = Path(path)
        (images if file.suffix.lower() in SUFFIXES else others).append(file)
    return images, others


def _visible_files(folder: Path) -> list[str]:
    # Strings: where there are fifty thousand files, paths as objects take seconds.
    files: list[str] = []
    visited: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        # A link may lead back to a folder above it.
        visited.add(os.path.realpath(place))
        folders[:] = [
            name
            for name in folders
            if shown(name) and os.path.realpath(os.path.join(place, name)) not in visited
        ]
        paths = (os.path.join(place, name) for name in names if shown(name))
        files += filter(os.path.isfile, paths)
    return files
