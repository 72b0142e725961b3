"""The library of C that a process uses: of a wheel, kept from before, or compiled at its first use."""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from textwrap import shorten

import torch

from opteq.native import compiling

# One of the functions, by which the library is known from others.
_FUNCTION = "opteq_forces"
# By what PyTorch says of the processor.
_PROCESSORS: dict[str, str] = dict(zip(("AVX2", "AVX512"), compiling.PROCESSORS, strict=True))
# Seconds for which a compiler that did not come to an end is not asked again.
_MEMORY = 600
# Characters of what a compiler says that are shown.
_SHOWN = 400

_log = logging.getLogger("opteq.native")


@dataclass(frozen=True)
class Library:
    """The compiled code of this process.

    Attributes:
        functions: what can be called; None if there is none.
        account: where it comes from, or why there is none.
    """

    functions: ctypes.CDLL | None
    account: str


@cache
def library() -> Library:
    """The library made from the C sources; where there is none, the logger `opteq.native` says so once.

    It takes an x86 processor with AVX2, and either the wheel `opteq-native` of the same version or a C
    compiler with OpenMP (`$CC`, else `cc`; GCC from 11 on). What the compiler makes is kept in
    `$XDG_CACHE_HOME/opteq`, by default `~/.cache/opteq`; other sources or another processor make another
    one. Where that is no place of the user's own, or cannot be written to, every process compiles for
    itself. A compiler that does not come to an end is not asked again for ten minutes; one that works, or
    waits for its turn on a busy machine, is waited for. The library shares the threads of PyTorch wherever
    both use the same OpenMP library, as the wheels do with GCC.
    """
    processor = _PROCESSORS.get(torch.backends.cpu.get_cpu_capability())
    if processor is None or sys.platform == "win32":
        # Nothing that its user could change.
        return _none(logging.INFO, "it is for x86 processors with AVX2, and not for Windows")
    if (wheel := _wheel()) is None:
        return _compiled(processor)
    path = wheel / compiling.file_name(processor)
    try:
        return Library(_opened(path), f"from the wheel opteq-native, {path}")
    except FileNotFoundError:
        ask = "pip install 'opteq[native]' brings the one for this opteq"
        why = f"it is for another version or other processors than {processor}; {ask}"
    except (OSError, AttributeError) as error:
        why = f"{error}; install it again"
    _log.warning("The wheel opteq-native is not used: %s.", why)
    made = _compiled(processor)
    return replace(made, account=f"{made.account}; the wheel opteq-native is not used: {why}")


def _wheel() -> Path | None:
    """The folder of the wheel `opteq-native`, where it is installed."""
    # Not the current folder, which the command `opteq` adds to the path: what lies there is executed.
    places = [place for place in sys.path if place and Path(place).absolute() != Path.cwd()]
    found = PathFinder.find_spec("opteq_native", places)
    return Path(found.origin).parent if found is not None and found.origin else None


def _compiled(processor: str) -> Library:
    """The library that is kept in the cache, or else made by the compiler."""
    compiler = _compiler()
    folder, name = _folder(), compiling.file_name(processor, *compiler)
    if folder is not None:
        with suppress(OSError, AttributeError):
            return Library(_opened(folder / name), f"kept as {folder / name}")
        if not os.access(folder, os.W_OK):
            folder = None
    asked = f"the C compiler {shlex.join(compiler)!r}"
    hung = None if folder is None else (folder / name).with_suffix(".hung")
    if hung is not None and hung.is_file() and time.time() - hung.stat().st_mtime < _MEMORY:
        return _none(
            logging.WARNING, f"{asked} did not finish lately; set CC to another one or delete {hung}"
        )
    if shutil.which(compiler[0]) is None:
        return _none(logging.WARNING, f"there is no C compiler {compiler[0]!r}; install gcc or set CC")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            compiling.make(compiler, processor, made)
            # Before it takes its place: a process that has opened a foreign one there is given that again.
            functions = _opened(made)
            if folder is None:
                return Library(functions, "compiled now, for this process alone")
            made.replace(folder / name)
        return Library(functions, f"compiled now, and kept as {folder / name}")
    except compiling.HungError as error:
        why = str(error)
        if hung is not None:
            hung.touch()
    except subprocess.CalledProcessError as error:
        why = f"failed: {shorten(error.output, _SHOWN) or f'exit status {error.returncode}'}"
    except (OSError, AttributeError) as error:
        why = f"made nothing that can be used: {error}"
    return _none(logging.WARNING, f"{asked} {why}; set CC to another one")


def _none(level: int, reason: str) -> Library:
    _log.log(level, "Going without compiled code, so that solves are slower: %s.", reason)
    return Library(None, reason)


def _compiler() -> list[str]:
    asked = os.environ.get("CC", "")
    try:
        return shlex.split(asked) or ["cc"]
    except ValueError:  # a quotation that does not end
        return [asked]


def _opened(path: Path) -> ctypes.CDLL:
    """The library there.

    Raises:
        OSError: if there is none, or a damaged one.
        AttributeError: if it is a foreign one.
    """
    compiling.check_seal(path)
    library = ctypes.CDLL(str(path))
    getattr(library, _FUNCTION)
    return library


def _folder() -> Path | None:
    """A folder that nobody but this user can write to, for what lies there is executed; None without one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opteq"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except (OSError, RuntimeError):  # without a home there is a RuntimeError
        return None
    own = info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own else None
