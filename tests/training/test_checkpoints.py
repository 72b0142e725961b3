import errno
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from opteq.errors import ConfigError, OpteqError
from opteq.training.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint, read_checkpoint


def checkpoint(epoch=0):
    return {"state_dict": {"weight": torch.full((50,), float(epoch))}, "epoch": epoch}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint(), path)
    return path


def test_round_trip(path):
    for read in (read_checkpoint, AtomicCheckpointIO().load_checkpoint):
        found = read(path)
        assert found["epoch"] == 0
        assert torch.equal(found["state_dict"]["weight"], torch.zeros(50))


def test_a_full_disk_leaves_the_earlier_checkpoint(path, monkeypatch):
    def no_space(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OpteqError, match=r"No space left on device.*earlier checkpoints are untouched"):
        AtomicCheckpointIO().save_checkpoint(checkpoint(1), path)
    assert read_checkpoint(path)["epoch"] == 0
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_an_interrupted_write_leaves_the_earlier_checkpoint(path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint(checkpoint(1), path)
    assert read_checkpoint(path)["epoch"] == 0


@pytest.mark.parametrize("kept", [0, 10, 500, -30])
def test_truncated(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"last\.ckpt is truncated"):
        read_checkpoint(path)


def test_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint .*nowhere\.ckpt"):
        read_checkpoint(tmp_path / "nowhere.ckpt")


def test_another_kind_of_file(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match="not a checkpoint of a training run"):
        read_checkpoint(path)


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_code_in_a_checkpoint_is_not_executed(tmp_path):
    path, trace = tmp_path / "evil.ckpt", tmp_path / "trace"
    torch.save(checkpoint() | {"extra": _Touch(trace)}, path)
    with pytest.raises(ConfigError):
        read_checkpoint(path)
    assert not trace.exists()


class Scored(LightningModule):
    """Has in each epoch the score and the loss that it is given."""

    def __init__(self, *epochs: tuple[float, float]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.epochs = epochs

    def training_step(self, batch, batch_idx):
        score, loss = self.epochs[self.current_epoch]
        self.log("val_accuracy", score, on_epoch=True)
        self.log("val_loss", loss, on_epoch=True)
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1)


def best_epoch(folder, *epochs, resumed=None):
    """The epoch whose checkpoint is kept as the best."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=len(epochs),
        logger=False,
        callbacks=[BestCheckpoint(folder, "val_accuracy"), LastCheckpoint(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(torch.zeros(1, 1))
    trainer.fit(Scored(*epochs), loader, ckpt_path=resumed)
    return read_checkpoint(folder / "best.ckpt")["epoch"]


@pytest.mark.filterwarnings("ignore:.*workers", "ignore:.*logging interval", "ignore:.*not empty")
@pytest.mark.filterwarnings("ignore:.*LeafSpec", "ignore:.*`training_step`")
class TestTheBest:
    @pytest.mark.parametrize(
        ("epochs", "best"),
        [
            ([(0.5, 3.0), (1.0, 2.0), (0.5, 1.0)], 1),  # the highest score, whatever its loss
            ([(1.0, 2.0), (1.0, 1.0), (1.0, 1.5)], 1),  # of equal ones that with the lowest loss
            ([(1.0, 1.0), (1.0, float("nan")), (1.0, 1.0)], 0),
            ([(0.5, 0.1), (1.0, 2.0), (1.0, 1.0)], 2),  # not with a loss below that of another score
        ],
    )
    def test_is_the_highest_score_and_of_equal_ones_the_lowest_loss(self, tmp_path, epochs, best):
        assert best_epoch(tmp_path, *epochs) == best

    @pytest.mark.parametrize(("loss", "best"), [(0.9, 2), (1.1, 1)])
    def test_goes_on_after_an_interruption(self, tmp_path, loss, best):
        begun = [(1.0, 2.0), (1.0, 1.0)]
        best_epoch(tmp_path, *begun)
        assert best_epoch(tmp_path, *begun, (1.0, loss), resumed=tmp_path / "last.ckpt") == best

    def test_a_training_from_before_losses_were_kept_goes_on(self, tmp_path):
        begun = [(0.5, 2.0), (1.0, 1.0)]
        best_epoch(tmp_path, *begun)
        checkpoint = read_checkpoint(tmp_path / "last.ckpt")
        (key,) = (key for key in checkpoint["callbacks"] if key.startswith("BestCheckpoint"))
        del checkpoint["callbacks"][key]["loss"]
        AtomicCheckpointIO().save_checkpoint(checkpoint, tmp_path / "last.ckpt")
        assert best_epoch(tmp_path, *begun, (0.9, 0.1), resumed=tmp_path / "last.ckpt") == 1
        assert best_epoch(tmp_path, *begun, (0.9, 0.1), (1.1, 3.0), resumed=tmp_path / "last.ckpt") == 3
