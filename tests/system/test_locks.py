"""Claims on folders, between processes."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from opteq.errors import ConfigError
from opteq.system.locks import exclusive

HOLD = """
import os, sys, time
from pathlib import Path
from opteq.system.locks import exclusive
with exclusive(Path(sys.argv[1])):
    heard, told = os.pipe()
    child = os.fork()
    if not child:  # lives on after its parent, as workers of loaders do for a while
        os.write(told, b".")
        os.closerange(0, 3)
        time.sleep(20)
        os._exit(0)
    os.read(heard, 1)  # on a busy machine it starts later
    print("held", child, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_one_processs_at_a_time_and_free_once_it_is_killed(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        held, child = other.stdout.readline().split()
        assert held == "held"
        with pytest.raises(ConfigError, match=r"Another process is at work in .*; wait until it is done"):
            exclusive(tmp_path).__enter__()
        other.kill()
    try:
        with exclusive(tmp_path):
            pass
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with exclusive(tmp_path):
        pass
