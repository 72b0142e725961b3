"""The C sources of the package as one library, compiled at its first use."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
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
# Seconds without work after which a compiler is taken for hung, and seconds of work; it takes about ten.
_PATIENCE, _WORK = 30, 300
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

    It takes a C compiler with OpenMP (`$CC`, else `cc`; GCC from 11 on) and an x86 processor with AVX2. The
    library is kept in `$XDG_CACHE_HOME/opteq`, by default `~/.cache/opteq`; other sources or another
    processor make another one. Where that is no place of the user's own, or cannot be written to, every
    process compiles for itself. A compiler that does not come to an end is not asked again for ten minutes;
    one that works, or waits for its turn on a busy machine, is waited for.
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
            _compile([*compiler, *flags, *map(str, sources), "-lm", "-o", str(made)])
            _seal(made)
            # Before it takes its place: a process that has opened a foreign one there is given that again.
            functions = _opened(made)
            if folder is None:
                return Library(functions, "compiled now, for this process alone")
            made.replace(folder / name)
        return Library(functions, f"compiled now, and kept as {folder / name}")
    except _Hung as error:
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


class _Hung(Exception):
    """Says what a compiler did that does not come to an end."""


def _compile(command: list[str]) -> None:
    """Run a compiler, and end it with all that it has started if it does not come to an end.

    Not by the clock, but by the work it does: on a busy machine it may wait for its turn for minutes.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said = _said(process)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, said)


def _said(process: subprocess.Popen[str]) -> str:
    """What a process has said by its end.

    Raises:
        _Hung: it does nothing, or too much.
    """
    work, idle_since = 0.0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=_PATIENCE / 10)[0]
        before, work = work, _work(process.pid)
        if work != before:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > _PATIENCE:
            raise _Hung(f"did nothing for {_PATIENCE:g} seconds")
        if work > _WORK:
            raise _Hung(f"did not finish within {_WORK:g} seconds of work")


def _work(group: int) -> float:
    """Seconds of processor time of a group of processes and of those that they have waited for."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # The name, which comes before, may have spaces and parentheses.
            values = path.read_bytes().rpartition(b")")[2].split()
            if int(values[2]) == group:
                ticks += sum(map(int, values[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _seal(path: Path) -> None:
    """Append a checksum, which loaders of libraries do not look at, and have all of it on the disk."""
    with path.open("rb+") as file:
        file.write(hashlib.sha256(file.read()).digest())
        file.flush()
        os.fsync(file.fileno())


def _opened(path: Path) -> ctypes.CDLL:
    """The library there. One whose end is missing would end the process that opens it.

    Raises:
        OSError: if there is none, or a damaged one.
        AttributeError: if it is a foreign one.
    """
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[:-size]).digest() != content[-size:]:
        raise OSError(f"{path} is damaged")
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
