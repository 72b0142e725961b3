"""C sources of the package, compiled at their first use.

Everything that they do is done with PyTorch as well, wherever they cannot be had.
"""

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
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

enabled = True
"""Whether compiled code is used at all, like `torch.backends.mkldnn.enabled`."""

# By what PyTorch says of the processor: a name, not "native", so that machines that share a folder agree.
_TARGETS = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
# Seconds; it takes less than one.
_PATIENCE = 60
# Where sources find the headers that they share.
_HEADERS = Path(__file__).parent

_log = logging.getLogger(__name__)


def load_native(source: Path, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    """The library made from a C source, or None where that cannot be had or is not `enabled`.

    It takes a C compiler with OpenMP (`$CC`, else `cc`; GCC from 11 on) and an x86 processor with AVX2. The
    library is kept in `$XDG_CACHE_HOME/opteq`, by default `~/.cache/opteq`; another source or processor makes
    another one. Where that is no place of the user's own, every process compiles for itself. It shares the
    threads of PyTorch wherever both use the same OpenMP library, as the wheels do with GCC.

    Args:
        source: the file.
        declare: says what the functions of a new library take.
    """
    return _loaded(source, declare) if enabled else None


def plain(*tensors: Tensor) -> bool:
    """Whether compiled code can take these tensors for the numbers that lie in their memory."""
    # A loop takes half the time of `all`, at every step of every solve.
    for t in tensors:
        if t.dtype != torch.float32 or not t.is_cpu:
            return False
        if t.is_neg():
            return False
    return True


def readable(*matrices: Tensor) -> bool:
    """Whether compiled code can work on these matrices, which may have gaps between their rows."""
    for m in matrices:
        if m.stride(1) != 1 and m.shape[1] != 1:
            return False
    return plain(*matrices)


@cache
def _loaded(source: Path, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    library = _compiled(source)
    if library is not None:
        declare(library)
    return library


def _compiled(source: Path) -> ctypes.CDLL | None:
    target = _TARGETS.get(torch.backends.cpu.get_cpu_capability())
    compiler = _compiler()
    if sys.platform == "win32" or target is None or shutil.which(compiler[0]) is None:
        needs = "an x86 processor with AVX2 and a C compiler"
        _log.info("Going without %s: it takes %s ($CC, else cc; here %r).", source.name, needs, compiler[0])
        return None
    flags = ["-O3", f"-march={target}", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC"]
    text = b"".join(path.read_bytes() for path in (source, *sorted(_HEADERS.glob("*.h"))))
    key = hashlib.sha256("\0".join((*compiler, *flags)).encode() + text).hexdigest()
    folder, name = _folder(), f"{source.stem}-{key[:16]}.so"
    if folder is not None and (kept := _opened(folder / name)) is not None:
        return kept
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / name
            command = [*compiler, *flags, f"-I{_HEADERS}", str(source), "-lm", "-o", str(made)]
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=_PATIENCE
            )
            if folder is None:
                return ctypes.CDLL(str(made))
            # It takes its place when it is complete, on the disk too: other processes may be at it, and one
            # that opens a file that ends too early is killed.
            with made.open("rb+") as file:
                os.fsync(file.fileno())
            made.replace(folder / name)
        return ctypes.CDLL(str(folder / name))
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else ""
        _log.warning("Going without %s, so that solves are slower: %s", source.name, said or error)
        return None


def _compiler() -> list[str]:
    asked = os.environ.get("CC", "")
    try:
        return shlex.split(asked) or ["cc"]
    except ValueError:  # a quotation that does not end
        return [asked]


def _opened(path: Path) -> ctypes.CDLL | None:
    """The library there, None where there is none or a damaged one, which is then made again."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


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
