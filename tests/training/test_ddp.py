import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("train_on_processes.py")


def train(processes, gradient, path):
    """Weights and metrics of a training with 32 images per step, on a number of processes."""
    arguments = [str(processes), str(32 // processes), gradient, str(path)]
    # Gloo looks up the machine's name to find an address, which not every machine can resolve.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("gradient", ["implicit"])
def test_pitfall_12_two_processes_equal_one(gradient, tmp_path):
    one, two = (train(processes, gradient, tmp_path / f"{processes}.pt") for processes in (1, 2))
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-6, atol=1e-8, msg=name)
    for name in ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "train_solver_steps"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-6), name
    assert two["metrics"]["train_unconverged"] == two["metrics"]["train_adjoint_unconverged"] == 0
