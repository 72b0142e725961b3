"""What a training tells of how far it is, on a terminal and in a pipe."""

import math
import re

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from opteq.system import progress
from opteq.training.progress import TrainingBar, TrainingLines, progress_bar


class Small(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.linear(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.linear(batch[0])

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def loader():
    return DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)


@pytest.fixture
def impatient(monkeypatch):
    """A user who wonders at once."""
    monkeypatch.setattr(progress, "PATIENCE", 0)
    monkeypatch.setattr(progress, "_LINES", math.inf)


def make_trainer(callback, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", max_epochs=2, callbacks=[callback], **quiet, **options)


@pytest.mark.usefixtures("impatient")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
class TestLines:
    def test_of_a_training(self, loader, capsys):
        trainer = make_trainer(TrainingLines(), accumulate_grad_batches=2, num_sanity_val_steps=0)
        capsys.readouterr()
        trainer.fit(Small(), loader, loader)
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if "so far" in line]
        assert "\r" not in out + err
        pattern = r"Epoch {}, loss [\d.e-]+: {}%, 0:0\d so far, about 0:0\d left"
        # Of 2 epochs with 4 batches; that it is validated in between is no work of its own.
        assert re.fullmatch(pattern.format(1, "12"), lines[0])
        assert re.fullmatch(pattern.format(2, "100"), lines[-1])
        assert len(lines) == 8

    @pytest.mark.parametrize(("command", "name"), [("validate", "Validation"), ("test", "Test")])
    def test_of_an_evaluation(self, loader, capsys, command, name):
        getattr(make_trainer(TrainingLines()), command)(Small(), loader, verbose=False)
        lines = [line for line in capsys.readouterr().err.splitlines() if "so far" in line]
        shares = [line.partition(",")[0] for line in lines]
        assert shares == [f"{name}: {share}%" for share in (25, 50, 75, 100)]

    def test_none_while_they_are_disabled(self, loader, capsys):
        lines = TrainingLines()
        lines.disable()
        make_trainer(lines).test(Small(), loader, verbose=False)
        assert "so far" not in capsys.readouterr().err
        lines.enable()
        make_trainer(lines).test(Small(), loader, verbose=False)
        assert "so far" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_the_bar_has_the_rest_of_the_whole_training(loader):
    told = []

    class Watched(TrainingBar):
        def get_metrics(self, trainer, pl_module):
            metrics = super().get_metrics(trainer, pl_module)
            told.append((self._pace.done, self._pace.left, self._pace.elapsed, metrics.get("left")))
            return metrics

    make_trainer(Watched(), num_sanity_val_steps=0).fit(Small(), loader, loader)
    done, left, _, text = told[-1]
    assert (done, left, text) == (8, 0, "0:00")
    half = next(row for row in told if row[0] == 4)
    assert half[1] == pytest.approx(half[2], abs=0.5)


def test_the_output_decides(monkeypatch):
    for terminal, kind in ((True, TrainingBar), (False, TrainingLines)):
        monkeypatch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
        assert type(progress_bar()) is kind
