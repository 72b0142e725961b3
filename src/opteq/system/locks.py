"""Claims on folders, between processes."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opteq.errors import ConfigError

LOCK = ".lock"


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
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another process is at work in {folder}; wait until it is done, or stop it first."
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield
