"""Writing files so that a failure never costs the file that was there before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
