"""What is left after a training was cut short, and how it goes on."""

import csv
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from opteq.training.checkpoints import read_checkpoint


@pytest.fixture
def start(tiny, tmp_path):
    """Starts a long training in a process of its own; returns it when it has saved two epochs."""
    processes = []

    def run():
        process = subprocess.Popen(
            [sys.executable, "-m", "opteq", "fit", "--config", tiny, "--trainer.max_epochs", "100000"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        last = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
        deadline = time.monotonic() + 120
        while not (last.is_file() and read_checkpoint(last)["epoch"] >= 1):
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "no checkpoint within two minutes"
            time.sleep(0.05)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def epochs_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["epoch"]) for row in csv.DictReader(file)]


def test_a_killed_training_goes_on(start, tiny, opteq, tmp_path, caplog):
    process = start()
    process.kill()
    process.wait()
    folder = tmp_path / "runs" / "tiny"
    done = read_checkpoint(folder / "checkpoints" / "last.ckpt")["epoch"] + 1
    result = opteq("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", done + 1)
    assert result.status == 0, result.err
    assert f"Resuming runs/tiny after {done} epochs from runs/tiny/checkpoints/last.ckpt" in caplog.text
    assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["epoch"] == done
    assert epochs_of(folder) == list(range(done + 1))


def test_an_interrupt_ends_with_a_sentence(start, tmp_path):
    process = start()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        "opteq: Interrupted; runs/tiny/checkpoints/last.ckpt is complete. "
        "Go on with the same command and --ckpt_path last --run tiny."
    )
    read_checkpoint(tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt")


def test_a_full_disk_costs_no_checkpoint(tiny, opteq, refuses, tmp_path):
    assert opteq("fit", "--config", tiny).status == 0
    last = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files stops a write halfway, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        sentence = refuses("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "earlier checkpoints are untouched. Make room and continue with --ckpt_path last." in sentence
    assert last.read_bytes() == before
    assert not list(last.parent.glob("*.part"))
    result = opteq("fit", "--config", tiny, "--ckpt_path", "last", "--trainer.max_epochs", 3)
    assert result.status == 0, result.err
    assert epochs_of(last.parent.parent) == [0, 1, 2]


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


def test_an_interrupted_report_is_written_by_going_on(tiny, opteq, monkeypatch):
    written = vars(sys.modules["opteq.evaluation.report"])["write_report"]
    monkeypatch.setattr("opteq.evaluation.report.write_report", interrupt)
    status, _, err = opteq("fit", "--config", tiny)
    assert status == 130
    assert err.splitlines()[-1] == (
        "opteq: Interrupted; runs/tiny/checkpoints/last.ckpt is complete. "
        "Go on with the same command and --ckpt_path last --run tiny."
    )
    monkeypatch.setattr("opteq.evaluation.report.write_report", written)
    status, out, err = opteq("fit", "--config", tiny, "--ckpt_path", "last", "--run", "tiny")
    assert status == 0, err
    assert "Nothing was left to train" in out
    assert "look at runs/tiny/report.html" in out


@pytest.mark.parametrize("start", [["-m", "opteq"], ["-c", "from opteq.__main__ import main; exit(main())"]])
def test_an_interrupt_while_it_is_imported_is_a_sentence(tmp_path, start):
    # The first module that the command imports interrupts it, as Ctrl-C would.
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run([sys.executable, *start], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "opteq: Interrupted; the same command starts again.\n"


@pytest.mark.parametrize("command", ["presets", "info", "predict", "export", "show"])
def test_what_leaves_nothing_starts_again(opteq, tmp_path, monkeypatch, command):
    for name in ("_list_presets", "_print_info", "_predict", "_export", "_show"):
        monkeypatch.setattr(f"opteq.cli.{name}", interrupt)
    operands = [] if command in ("presets", "info") else ["runs/x", "images"]
    status, out, err = opteq(command, *operands)
    assert (status, out) == (130, "")
    assert err == "opteq: Interrupted; the same command starts again.\n"
