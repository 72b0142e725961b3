"""Memory that the process keeps."""

import platform
import subprocess
import sys

import pytest

# Pages newly handed out for twenty rounds of tensors of 24 MB that do not outlive a round.
COUNT = """
import resource, sys, torch
from opteq.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def rounds():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(6 * 2**20) for _ in range(3)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
rounds()
print(rounds())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are those of glibc")
def test_freed_memory_is_used_again():
    def pages(mode):
        done = subprocess.run([sys.executable, "-c", COUNT, mode], check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert pages("keep") < 0.05 * pages("leave")
