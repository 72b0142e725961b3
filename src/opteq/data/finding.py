"""Image files in folders, and the others there."""

import os
from collections.abc import Callable
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info
from torchvision.datasets.folder import IMG_EXTENSIONS

from opteq.errors import ConfigError


def find_images(folder: Path, tell: Callable[[str], None] = rank_zero_info) -> list[Path]:
    """List the image files in a folder and the folders inside it, sorted.

    Links are followed. Hidden files and folders, such as `.ipynb_checkpoints`, are left out.

    Args:
        folder: The folder.
        tell: Receives a sentence about the files that are left out as they are not named like images.

    Raises:
        ConfigError: The folder does not exist or holds no image.
    """
    if not folder.is_dir():
        raise ConfigError(f"The folder {folder} does not exist.")
    files = [Path(path) for path in sorted(_visible_files(folder), key=lambda path: path.split(os.sep))]
    images = [path for path in files if path.suffix.lower() in IMG_EXTENSIONS]
    if not images:
        raise ConfigError(f"The folder {folder} holds no images ({', '.join(IMG_EXTENSIONS)}).")
    if len(images) < len(files):
        known = set(images)
        others = sorted({path.suffix or path.name for path in files if path not in known})
        tell(
            f"{len(files) - len(images)} of {len(files)} files in {folder} are not named like images"
            f" ({', '.join(others)}); those that are end in {', '.join(IMG_EXTENSIONS)}."
        )
    return images


def shown(name: str) -> bool:
    """Whether a file or folder of that name is not hidden."""
    return not name.startswith(".")


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
