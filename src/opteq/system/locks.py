"""Claims on folders, between processes."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from opteq.errors import ConfigError

# Each system has a module of its own for this, and lacks the other's.
if sys.platform == "win32":
    import msvcrt

    def _claim(file: BinaryIO) -> None:
        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _claim(file: BinaryIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


LOCK = ".lock"

_held: set[BinaryIO] = set()


def _let_go() -> None:
    for file in _held:
        file.close()


# A worker of a loader may live on for seconds after its training was killed, which must not hold the folder.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other processes that ask for the same folder out of it.

    The system ends the claim with the process, however that ends, so that nothing has to be cleared
    away after a crash. File systems that know no locks are used without.

    Raises:
        ConfigError: Another process is in the folder.
    """
    with (folder / LOCK).open("ab") as file:
        try:
            _claim(file)
        except (BlockingIOError, PermissionError) as error:  # what Linux and macOS, and what Windows says
            raise ConfigError(
                f"Another process is at work in {folder}; wait until it is done, or stop it first."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        _held.add(file)
        try:
            yield
        finally:
            _held.discard(file)
