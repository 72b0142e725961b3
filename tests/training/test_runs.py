import os

import pytest

from opteq.errors import ConfigError
from opteq.training.checkpoints import AtomicCheckpointIO
from opteq.training.runs import checkpoint_options, latest_run, resume_run, save_config, start_run

MODEL = {"network": {"class_path": "opteq.A", "init_args": {"channels": 3}}, "learning_rate": 0.1}


def finished(runs_dir, name, epochs=2, age=0):
    """Creates a run with a checkpoint that was written `age` seconds ago."""
    run = start_run(runs_dir, name)
    save_config(run.folder, {"model": MODEL})
    path = run.checkpoints / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "epoch": epochs - 1}, path)
    now = path.stat().st_mtime
    os.utime(path, (now, now - age))
    return run.folder


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    folders = [start_run(tmp_path / "runs", "a").folder for _ in range(3)]
    assert [folder.name for folder in folders] == ["a", "a-2", "a-3"]
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.parametrize("name", ["a/b", "..", "", "."])
def test_a_name_is_not_a_path(tmp_path, name):
    with pytest.raises(ConfigError, match="--run"):
        start_run(tmp_path, name)


def test_a_checkpoint_to_start_from_is_read_before_the_folder_is_created(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.ckpt"):
        start_run(tmp_path / "runs", "a", tmp_path / "nowhere.ckpt")
    assert not (tmp_path / "runs").exists()


def test_the_newest_checkpoint_of_the_name_is_the_latest(tmp_path):
    finished(tmp_path, "digits", age=20)
    wanted = finished(tmp_path, "digits", age=10)
    finished(tmp_path, "digits", age=30)
    finished(tmp_path, "digits-large", age=0)
    start_run(tmp_path, "digits")
    assert latest_run(tmp_path, "digits") == wanted


def test_no_run_to_resume(tmp_path):
    start_run(tmp_path, "digits")
    with pytest.raises(ConfigError, match=r"no checkpoint .*without --ckpt_path"):
        latest_run(tmp_path, "digits")


def test_a_run_without_a_checkpoint_starts_anew_in_its_folder(tmp_path):
    folder = start_run(tmp_path, "digits").folder
    save_config(folder, {"model": MODEL})
    assert latest_run(tmp_path, "digits") == folder
    run = resume_run(folder, MODEL)
    assert (run.folder, run.checkpoint, run.epochs) == (folder, None, 0)
    trained = finished(tmp_path, "digits", age=10**6)
    assert latest_run(tmp_path, "digits") == trained


def test_resuming_knows_the_epochs(tmp_path):
    folder = finished(tmp_path, "digits", epochs=7)
    run = resume_run(folder, MODEL)
    assert (run.folder, run.checkpoint, run.epochs) == (folder, folder / "checkpoints" / "last.ckpt", 7)


def test_resuming_with_another_model_names_what_changed(tmp_path):
    folder = finished(tmp_path, "digits")
    changed = {"network": {"class_path": "opteq.A", "init_args": {"channels": 4}}, "learning_rate": 0.2}
    with pytest.raises(ConfigError) as error:
        resume_run(folder, changed)
    assert "model.network.channels was 3 and is now 4" in str(error.value)
    assert "model.learning_rate was 0.1 and is now 0.2" in str(error.value)


@pytest.mark.parametrize("text", ["", "data: {}", "model: ["])
def test_a_damaged_configuration(tmp_path, text):
    folder = finished(tmp_path, "digits")
    (folder / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        resume_run(folder, MODEL)


def test_checkpoint_options(tmp_path):
    folder = finished(tmp_path, "digits")
    config = ["--config", str(folder / "config.yaml"), "--ckpt_path"]
    assert checkpoint_options(folder) == [*config, str(folder / "checkpoints" / "last.ckpt")]
    (folder / "checkpoints" / "best.ckpt").touch()
    assert checkpoint_options(folder) == [*config, str(folder / "checkpoints" / "best.ckpt")]
    for name in ("best", "last"):
        named = str(folder / "checkpoints" / f"{name}.ckpt")
        assert checkpoint_options(folder, checkpoint=name) == [*config, named]
    assert checkpoint_options(folder, checkpoint="mine.ckpt") == [*config, "mine.ckpt"]
    with pytest.raises(ConfigError, match="not the folder of a run"):
        checkpoint_options(tmp_path)


def test_a_damaged_best_checkpoint_is_named_before_the_training(tmp_path):
    folder = finished(tmp_path, "digits")
    (folder / "checkpoints" / "best.ckpt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"best\.ckpt is damaged; move it away to resume without it"):
        resume_run(folder, MODEL)
