import errno
import os
from pathlib import Path

import pytest
import torch

from opteq.errors import ConfigError, OpteqError
from opteq.training.checkpoints import AtomicCheckpointIO, read_checkpoint


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
