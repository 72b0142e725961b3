import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("train_on_processes.py")


def train_here(path):
    """Trains in this process with 16 images per step."""
    spec = importlib.util.spec_from_file_location("train_on_processes", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval")
        script.main(1, 16, path)


def train_on_two_processes(path):
    """Trains in two other processes with 8 images per step each."""
    # The name of the machine, by which gloo would look for an address, need not be known to it.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), "2", "8", str(path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stderr


def test_pitfall_12_two_processes_equal_one(tmp_path):
    """For sizes that leave a process without a sample of its own in the last batch, too."""
    train_here(tmp_path / "one.pt")
    train_on_two_processes(tmp_path / "two.pt")
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one.pt", "two.pt"))
    assert list(one) == [15, 16, 17, 26]
    for size, alone in one.items():
        together = two[size]
        assert alone["metrics"]["images"] == 2 * size
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(together["weights"][name], weight, rtol=1e-6, atol=1e-8, msg=name)
        assert together["metrics"].keys() == alone["metrics"].keys()
        for name, value in alone["metrics"].items():
            if not name.endswith("residual_max"):  # what is left below the tolerance of 1e-10 is rounding
                assert together["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-9), (size, name)
    assert {"train_loss", "val_accuracy", "test_loss", "test_accuracy_top5", "test_unconverged"} <= set(
        one[15]["metrics"]
    )
