"""What other systems lack is not asked for: simulated, for there is but one here."""

import subprocess
import sys

import pytest

WITHOUT = """
import sys, tempfile
from pathlib import Path
from types import SimpleNamespace
import torch
import lightning.pytorch, lightning.pytorch.cli, tensorboard, torchvision, sklearn.datasets, matplotlib.pyplot

# Third parties are there. From here on it is the other system.
sys.platform = {platform!r}
for module in {missing!r}:
    sys.modules[module] = None
if sys.platform == "win32":
    def locking(descriptor, mode, count):
        if locked:
            raise PermissionError(13, "Permission denied")
    sys.modules["msvcrt"] = SimpleNamespace(LK_NBLCK=2, locking=locking)
locked = False
import os
for name in {unknown!r}:
    delattr(os, name)
torch.backends.cpu.get_cpu_capability = lambda: {capability!r}

import opteq
import opteq.training.command
from opteq.errors import ConfigError
from opteq.system.locks import exclusive
from opteq.training.summary import peak_memory_bytes

layer = opteq.EquilibriumLayer(opteq.OptEqUnit(opteq.Dense(4, 5), opteq.Dense(3, 5)))
layer(torch.ones(2, 3)).sum().backward()
assert not opteq.native.status().used
assert opteq.keep_freed_memory() is False
peak = peak_memory_bytes()
assert peak is None if sys.platform == "win32" else peak > 0
with exclusive(Path(tempfile.mkdtemp())) as folder:
    pass
if sys.platform == "win32":
    locked = True
    try:
        exclusive(Path(tempfile.mkdtemp())).__enter__()
    except ConfigError as error:
        assert "Another process" in str(error)
    else:
        raise AssertionError
"""

WINDOWS = {
    "platform": "win32",
    "missing": ["fcntl", "resource"],
    "unknown": ["getuid", "fork"],
    "capability": "AVX2",
}
ARM_MAC = {"platform": "darwin", "missing": ["msvcrt"], "unknown": [], "capability": "DEFAULT"}


@pytest.mark.parametrize("system", [WINDOWS, ARM_MAC], ids=["Windows", "a Mac with an ARM processor"])
def test_layers_and_training_are_there(system, tmp_path):
    script = WITHOUT.format(**system)
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
