"""Writing files so that a failure never costs the file that was there before."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from opteq.errors import ConfigError


def readable(name: str) -> str:
    """The name of a file or folder as text: in UTF-8, or else in Latin-1, which any name can be read in."""
    encoded = os.fsencode(name)
    try:
        return encoded.decode("utf-8")
    except UnicodeDecodeError:
        return encoded.decode("latin-1")


def check_folder(folder: Path) -> None:
    """Raise a `ConfigError` unless there is such a folder."""
    if not folder.is_dir():
        raise ConfigError(f"The folder {folder} does not exist.")


@contextmanager
def write_beside(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path` that takes its place once it is complete and on the disk.

    If the block fails (a full disk, an interrupt) the earlier file is as it was and nothing is left
    behind; if the process is killed, a file `<name>.part` remains, which the next write replaces.

    Args:
        path: The file to write.

    Yields:
        The file beside it, open for writing bytes.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        # The system names no file when a write fails.
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file as `write_beside` does."""
    with write_beside(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as `write_beside` does."""
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: The file holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ConfigError(f"Expected {path} to hold one JSON object, got {type(content).__name__}.")
    return content
