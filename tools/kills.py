"""Ends trainings at random moments and resumes them: `python tools/kills.py [TRIALS] [SEED]`.

Every trial trains in a process of its own, which is killed (SIGKILL) or, on Linux as root, in every second
trial meets a full disk; then it is resumed until it is done. Its weights, curves and results must be those of
a training that nothing interrupted, bit for bit.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

import opteq.training.command  # noqa: F401 - so that trials need not import it
from opteq.cli import main
from opteq.training.checkpoints import read_checkpoint

EPOCHS = 12
CONFIG = """\
model:
  network:
    class_path: opteq.models.classifier.ImageClassifier
    init_args:
      stem: {class_path: opteq.models.stems.ConvStem, init_args: {channels: 4}}
      body: {class_path: opteq.models.bodies.Unit, init_args: {hidden: 4}}
      head: {class_path: opteq.models.heads.Head}
data:
  class_path: opteq.data.digits.Digits
  init_args: {batch_size: 64, train_limit: 192, augmentation: crop}
trainer: {accelerator: cpu, enable_progress_bar: false}
"""
OPTIONS = (
    "--config",
    "config.yaml",
    "--run",
    "run",
    "--report",
    "false",
    "--trainer.max_epochs",
    str(EPOCHS),
)


def start(folder: Path, *options: str) -> int:
    """Train in a process of its own, in a folder; returns its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        # Beside the folder, whose disk may be full.
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        os.chdir(folder)
        status = main(["fit", *OPTIONS, *options])
    except BaseException:
        traceback.print_exc()
    finally:
        # Whatever happens, what is left to do is the parent's.
        os._exit(status)


def ended(process: int) -> int:
    """Exit status of a process, once it has one."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(folder: Path, process: int) -> None:
    """The end of the process."""
    os.kill(process, signal.SIGKILL)
    ended(process)


def fill(folder: Path, process: int) -> None:
    """No room on the disk, until the process has ended."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    ended(process)
    ballast.unlink()


def differences(one: Path, other: Path) -> list[str]:
    """What is not the same in the folders of two runs."""
    found = [
        name
        for name in ("metrics.csv", "model.safetensors")
        if (one / name).read_bytes() != (other / name).read_bytes()
    ]
    for name in ("last.ckpt", "best.ckpt"):
        ours, theirs = (read_checkpoint(run / "checkpoints" / name)["state_dict"] for run in (one, other))
        found += [f"{name}:{key}" for key in ours if not torch.equal(ours[key], theirs[key])]
    return found


def epochs_done(folder: Path) -> int:
    """How many epochs the table of a run has, which is written just before their checkpoints."""
    table = folder / "runs" / "run" / "metrics.csv"
    return len(table.read_text().splitlines()) - 1 if table.is_file() else 0


def trial(folder: Path, end: Callable[[Path, int], None], epoch: int, seconds: float) -> bool:
    """End a training some time into an epoch and resume it; returns whether it was still running."""
    folder.joinpath("config.yaml").write_text(CONFIG)
    process = start(folder)
    while epochs_done(folder) < epoch:
        time.sleep(0.001)
    time.sleep(seconds)
    was_running = not (folder / "runs" / "run" / "summary.json").is_file()
    end(folder, process)
    resumes = ("--ckpt_path", "last") if (folder / "runs" / "run" / "config.yaml").is_file() else ()
    if ended(start(folder, *resumes)):
        raise SystemExit(f"The training could not be resumed:\n{folder.with_suffix('.log').read_text()}")
    return was_running


def run(trials: int, seed: int) -> int:
    """Make the trials; returns how many ended otherwise than without an interruption."""
    rng, bad = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        (whole / "config.yaml").write_text(CONFIG)
        begin = time.monotonic()
        if ended(start(whole)):
            raise SystemExit(whole.with_suffix(".log").read_text())
        one_epoch = (time.monotonic() - begin) / EPOCHS
        for number in range(trials):
            folder = Path(scratch) / f"trial{number}"
            folder.mkdir()
            fills = (
                number % 2
                and not subprocess.run(
                    ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True
                ).returncode
            )
            epoch, seconds = rng.randrange(EPOCHS), rng.uniform(0, one_epoch)
            try:
                was_running = trial(folder, fill if fills else kill, epoch, seconds)
                # One that was ended before its folder was complete is started again, in another one.
                last = max((folder / "runs").iterdir())
                found = differences(whole / "runs" / "run", last)
            finally:
                if fills:
                    subprocess.run(["umount", str(folder)], check=True)
            bad += bool(found)
            what = "full disk" if fills else "killed"
            when = f"{1000 * seconds:.0f} ms into epoch {epoch}" if was_running else "when it was done"
            print(f"{number + 1}: {what} {when}: {found or 'same'}", flush=True)
    return bad


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    differing = run(*(arguments + [20, 0][len(arguments) :]))
    sys.exit(f"{differing} trainings differ." if differing else 0)
