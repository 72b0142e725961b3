"""The range test of the learning rate, by the command."""

import csv
from contextlib import redirect_stderr

import numpy as np
import pytest
import yaml

from opteq.cli import main
from opteq.errors import ConfigError
from opteq.training.findrate import steepest
from tests.cli.conftest import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a run whose rate was found, and one that was given the same."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.yaml").write_text(TINY)
    with (folder / "stderr.txt").open("w") as said, redirect_stderr(said):
        assert fit(folder, "found", "--find_lr", "true") == 0
    assert fit(folder, "given", "--model.learning_rate", f"{rate_of(folder / 'found')!r}") == 0
    return folder


def fit(folder, name, *options):
    command = ("fit", "--config", f"{folder}/tiny.yaml", "--runs_dir", f"{folder}", "--report", "false")
    return main([*command, "--run", name, *options])


def rate_of(run):
    return yaml.safe_load((run / "config.yaml").read_text())["model"]["learning_rate"]


def rows(run):
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_training_goes_on_as_if_it_had_been_given_the_rate(folder):
    assert 1e-6 < rate_of(folder / "found") < 1
    assert rate_of(folder / "found") != 1e-2
    assert rows(folder / "found") == rows(folder / "given")
    assert len(rows(folder / "found")) == 2
    assert (folder / "found" / "learning_rate.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "given" / "learning_rate.png").exists()


def test_in_a_pipe_the_range_test_has_no_line_for_every_step(folder):
    assert "Finding best initial lr" not in (folder / "stderr.txt").read_text()


def test_nothing_is_told_of_the_steps_that_are_undone(folder, caplog):
    assert fit(folder, "told", "--find_lr", "true", "--trainer.max_epochs", "1") == 0
    (found,) = (text for text in caplog.messages if text.startswith("Training with the learning rate"))
    assert caplog.messages[-2:] == [found, "Testing the best checkpoint …"]
    assert "max_steps" not in caplog.text
    assert ".lr_find" not in caplog.text


def test_an_interrupted_training_keeps_its_rate(folder, caplog):
    rate = rate_of(folder / "found")
    caplog.clear()
    more = ("--find_lr", "true", "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert fit(folder, "found", *more) == 0
    assert rate_of(folder / "found") == rate
    assert "Training with the learning rate" not in caplog.text
    assert [int(row["epoch"]) for row in rows(folder / "found")] == [0, 1, 2]


def test_other_ways_are_refused(folder, capsys):
    checkpoint = folder / "given" / "checkpoints" / "last.ckpt"
    assert fit(folder, "other", "--find_lr", "true", "--ckpt_path", f"{checkpoint}") == 2
    assert "--find_lr is for new weights" in capsys.readouterr().err
    callback = "--trainer.callbacks+=lightning.pytorch.callbacks.LearningRateFinder"
    assert fit(folder, "other", callback) == 2
    assert "use --find_lr true" in capsys.readouterr().err
    assert not (folder / "other").exists()


def test_the_steepest_fall_is_that_on_a_log_scale():
    rates = np.logspace(-6, 0, 90)
    # A logistic fall in log10 of the rate is steepest at its middle, here 1e-2.
    losses = 2.3 - 1 / (1 + np.exp(-4 * (np.log10(rates) + 2)))
    assert steepest(rates, losses) == pytest.approx(1e-2, rel=0.1)
    losses[-20:] = np.nan
    assert steepest(rates, losses) == pytest.approx(1e-2, rel=0.1)
    with pytest.raises(ConfigError, match="suggest no learning rate"):
        steepest(rates[:1], losses[:1])
