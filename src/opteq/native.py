"""C sources of the package, compiled at their first use."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

# By what PyTorch says of the processor: a name, not "native", so that machines that share a folder agree.
_TARGETS = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}
# Seconds; it takes less than one.
_PATIENCE = 60

_log = logging.getLogger(__name__)


@cache
def load_native(source: Path) -> ctypes.CDLL | None:
    """The library made from a C source, or None where that cannot be had.

    It takes a C compiler with OpenMP (`$CC`, else `cc`) and an x86 processor with AVX2. The library is kept
    in `$XDG_CACHE_HOME/opteq`, by default `~/.cache/opteq`; another source or processor makes another one. It
    shares the threads of PyTorch wherever both use the same OpenMP library, as the wheels do with GCC.
    """
    target = _TARGETS.get(torch.backends.cpu.get_cpu_capability())
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if target is None or shutil.which(compiler[0]) is None:
        _log.info("Going without %s: no C compiler, or no processor that it is written for.", source.name)
        return None
    flags = ["-O3", f"-march={target}", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC"]
    key = hashlib.sha256("\0".join((*compiler, *flags)).encode() + source.read_bytes()).hexdigest()
    try:
        library = _folder() / f"{source.stem}-{key[:16]}.so"
        if not library.exists():
            # Beside its place, which it takes when it is complete: other processes may be at it too.
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder) / library.name
                command = [*compiler, *flags, str(source), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE)
                made.replace(library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else error
        _log.warning("Going without %s, which is slower: %s", source.name, reason)
        return None


def _folder() -> Path:
    """A folder that only this user can write to: what lies there is executed."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache_home) / "opteq"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="opteq-"))
