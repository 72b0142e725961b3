"""The C sources of the package as one library, compiled at its first use."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import shorten

import torch

_SOURCES = Path(__file__).parent
# One of the functions, by which the library is known from others.
_FUNCTION = "opteq_forces"
# By what PyTorch says of the processor: a name, not "native", so that machines that share a folder agree.
_TARGETS = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
# Seconds; it takes about five.
_PATIENCE = 120
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

    It takes a C compiler with OpenMP (`$CC`, else `cc`; GCC from 11 on) and an x86 processor with AVX2. The
    library is kept in `$XDG_CACHE_HOME/opteq`, by default `~/.cache/opteq`; other sources or another
    processor make another one. Where that is no place of the user's own, every process compiles for itself.
    It shares the threads of PyTorch wherever both use the same OpenMP library, as the wheels do with GCC.
    """
    target = _TARGETS.get(torch.backends.cpu.get_cpu_capability())
    if target is None or sys.platform == "win32":
        # Nothing that its user could change.
        return _none(logging.INFO, "it is for x86 processors with AVX2, and not for Windows")
    compiler = _compiler()
    flags = ["-O3", f"-march={target}", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC"]
    sources = sorted(_SOURCES.glob("*.c"))
    text = b"".join(path.read_bytes() for path in (*sources, *sorted(_SOURCES.glob("*.h"))))
    key = hashlib.sha256("\0".join((*compiler, *flags)).encode() + text).hexdigest()
    folder, name = _folder(), f"opteq-{key[:16]}.so"
    if folder is not None:
        with suppress(OSError, AttributeError):
            return Library(_opened(folder / name), f"kept as {folder / name}")
    if shutil.which(compiler[0]) is None:
        return _none(logging.WARNING, f"there is no C compiler {compiler[0]!r}; install gcc or set CC")
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            command = [*compiler, *flags, *map(str, sources), "-lm", "-o", str(made)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=_PATIENCE
            )
            # Before it takes its place: a process that has opened a foreign one there is given that again.
            functions = _opened(made)
            if folder is None:
                return Library(functions, "compiled now, for this process alone")
            # It takes its place when it is complete, on the disk too: other processes may be at it, and one
            # that opens a file that ends too early is killed.
            with made.open("rb+") as file:
                os.fsync(file.fileno())
            made.replace(folder / name)
        return Library(functions, f"compiled now, and kept as {folder / name}")
    except subprocess.TimeoutExpired:
        why = f"did not finish within {_PATIENCE} seconds"
    except subprocess.CalledProcessError as error:
        why = f"failed: {shorten(error.stderr, _SHOWN) or f'exit status {error.returncode}'}"
    except (OSError, AttributeError) as error:
        why = f"made nothing that can be used: {error}"
    return _none(logging.WARNING, f"the C compiler {shlex.join(compiler)!r} {why}; set CC to another one")


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
    library = ctypes.CDLL(str(path))
    getattr(library, _FUNCTION)
    return library


def _folder() -> Path | None:
    """A folder that this user alone can write to, for what lies there is executed; None without one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "opteq"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except (OSError, RuntimeError):  # without a home there is a RuntimeError
        return None
    own = info.st_uid == os.getuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if own and os.access(folder, os.W_OK) else None
