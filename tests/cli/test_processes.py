"""Processes that others have started."""

import os
import subprocess
import sys


def test_torchrun_starts_a_training(tiny, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "--",
    ]
    command += ["opteq", "fit", "--config", tiny, "--run", "both", "--report", "false"]
    # The name of the machine, by which gloo would look for an address, need not be known to it.
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Starting with 2 processes" in done.stderr
    assert done.stdout.count("Test accuracy") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["both"]


def test_options_that_contradict_torchrun_are_refused(refuses, tiny, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    sentence = refuses("fit", "--config", tiny, "--trainer.devices", 1)
    assert sentence.startswith(
        "torchrun started 2 processes, but --trainer.devices and --trainer.num_nodes are"
    )
