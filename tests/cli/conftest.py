from typing import NamedTuple

# Imported before any test runs: Lightning's log handler keeps the stream it finds, which inside a test
# is one that pytest closes afterwards.
import lightning.pytorch  # noqa: F401
import pytest

from opteq.cli import main

TINY = """\
seed_everything: 1
model:
  network:
    class_path: opteq.models.classifier.ImageClassifier
    init_args:
      stem: {class_path: opteq.models.stems.ConvStem, init_args: {channels: 4}}
      body: {class_path: opteq.models.bodies.Unit, init_args: {hidden: 4}}
      head: {class_path: opteq.models.heads.Head}
  optimizer: adamw
  learning_rate: 1.0e-2
data:
  class_path: opteq.data.digits.Digits
  init_args: {batch_size: 64, train_limit: 128}
trainer:
  accelerator: cpu
  max_epochs: 2
  enable_progress_bar: false
"""


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A configuration that trains in a second."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def opteq(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder, without drawing the report, which takes longest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "opteq.evaluation.report.write_report", lambda folder, network, data: folder / "report.html"
    )

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture
def refuses(opteq):
    """Runs a command that must fail, and returns the one sentence it fails with."""

    def run(*arguments):
        status, _, err = opteq(*arguments)
        # What a command is at stands on stderr too.
        lines = [line for line in err.splitlines() if line.startswith("opteq: ")]
        assert status == 2, err
        assert len(lines) == 1, err
        assert err.rstrip().endswith(lines[0])
        assert "Traceback" not in err
        return lines[0].removeprefix("opteq: ")

    return run
