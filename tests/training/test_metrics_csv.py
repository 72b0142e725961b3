import csv

import pytest

from opteq.training.metrics_csv import MetricsCSV


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.csv"


def log_epoch(logger, epoch, loss):
    logger.log_metrics({"epoch": epoch, "val_loss": loss}, step=10 * epoch + 9)
    logger.log_metrics({"epoch": epoch, "train_loss": 2 * loss}, step=10 * epoch + 9)


def test_one_row_per_epoch(path):
    logger = MetricsCSV(path)
    log_epoch(logger, 0, 0.5)
    log_epoch(logger, 1, 0.25)
    assert read(path) == [
        {"epoch": "0", "step": "9", "train_loss": "1.0", "val_loss": "0.5"},
        {"epoch": "1", "step": "19", "train_loss": "0.5", "val_loss": "0.25"},
    ]


def test_is_on_the_disk_after_every_call(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"epoch": 0, "val_loss": 1.0}, step=9)
    assert read(path) == [{"epoch": "0", "step": "9", "val_loss": "1.0"}]


def test_resuming_appends_and_drops_what_no_checkpoint_holds(path):
    logger = MetricsCSV(path)
    for epoch in range(3):
        log_epoch(logger, epoch, 1.0)
    resumed = MetricsCSV(path, epochs=2)
    log_epoch(resumed, 2, 0.125)
    rows = read(path)
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [row["val_loss"] for row in rows] == ["1.0", "1.0", "0.125"]


def test_a_new_run_starts_a_new_table(path):
    log_epoch(MetricsCSV(path), 0, 1.0)
    log_epoch(MetricsCSV(path), 0, 2.0)
    assert [row["val_loss"] for row in read(path)] == ["2.0"]


def test_the_final_test_is_left_out(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"epoch": 3, "test_accuracy": 1.0}, step=9)
    assert not path.exists()


def test_new_columns_leave_earlier_rows_empty(path):
    logger = MetricsCSV(path)
    logger.log_metrics({"epoch": 0, "val_loss": 1.0}, step=9)
    logger.log_metrics({"epoch": 1, "extra": 3.0}, step=19)
    assert read(path) == [
        {"epoch": "0", "step": "9", "extra": "", "val_loss": "1.0"},
        {"epoch": "1", "step": "19", "extra": "3.0", "val_loss": ""},
    ]
