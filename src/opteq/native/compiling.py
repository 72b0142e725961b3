"""How the C sources become a library; with the standard library alone, for wheels are made by it too."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent
# Names of processors, not "native", so that machines that share a folder agree, and a wheel serves them all.
PROCESSORS = ("x86-64-v3", "x86-64-v4")
# Seconds without work after which a compiler is taken for hung, and seconds of work; it takes about ten.
PATIENCE, WORK = 30, 300


def file_name(processor: str, *compiler: str) -> str:
    """Name of a library for these processors, which is another one for other sources and flags.

    Args:
        processor: one of `PROCESSORS`.
        compiler: the command that makes it, where the name is to say so.
    """
    text = b"".join(path.read_bytes() for path in (*_sources(), *sorted(SOURCES.glob("*.h"))))
    key = hashlib.sha256("\0".join((*compiler, *_flags(processor))).encode() + text).hexdigest()
    return f"opteq-{key[:16]}.so"


def make(compiler: list[str], processor: str, path: Path) -> None:
    """Compile the sources into the file `path`, with a checksum at its end.

    Raises:
        HungError: if the compiler does not come to an end.
        subprocess.CalledProcessError: if it fails.
        OSError: if it makes nothing.
    """
    compile_with([*compiler, *_flags(processor), *map(str, _sources()), "-lm", "-o", str(path)])
    _seal(path)


def check_seal(path: Path) -> None:
    """Raise an `OSError` unless there is a whole library: another one would end the process that opens it."""
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    if hashlib.sha256(content[:-size]).digest() != content[-size:]:
        raise OSError(f"{path} is damaged")


def _sources() -> list[Path]:
    return sorted(SOURCES.glob("*.c"))


def _flags(processor: str) -> list[str]:
    return ["-O3", f"-march={processor}", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC"]


class HungError(Exception):
    """Says what a compiler did that does not come to an end."""


def compile_with(command: list[str]) -> None:
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
        HungError: it does nothing, or too much.
    """
    work, idle_since = 0.0, time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=PATIENCE / 10)[0]
        before, work = work, _work(process.pid)
        if work != before:
            idle_since = time.monotonic()
        elif time.monotonic() - idle_since > PATIENCE:
            raise HungError(f"did nothing for {PATIENCE:g} seconds")
        if work > WORK:
            raise HungError(f"did not finish within {WORK:g} seconds of work")


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
