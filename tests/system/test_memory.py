"""Memory that the process keeps."""

import platform
import subprocess
import sys

import pytest

# Pages that go back to the system when a tensor of 48 MB, the first of its size, is freed.
COUNT = """
import sys, torch
from pathlib import Path
from opteq.system.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
tensor = torch.ones(12 * 2**20)
before = resident()
del tensor
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_freed_memory_stays():
    def pages(mode):
        done = subprocess.run([sys.executable, "-c", COUNT, mode], check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert pages("leave") > 10_000  # of 12,288, each 4 KiB
    assert pages("keep") < 100
