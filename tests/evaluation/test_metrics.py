import numpy as np
import pytest

from opteq.errors import ConfigError
from opteq.evaluation.metrics import read_curves


def read(tmp_path, text):
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    return read_curves(path)


def test_columns_become_curves_of_epoch_means(tmp_path):
    panels = read(
        tmp_path,
        "epoch,lr-SGD,step,train_loss,val_accuracy,val_loss\n"
        "0,0.1,9,3.0,,\n0,0.1,19,2.0,,\n0,,19,,0.5,2.5\n1,0.05,29,1.0,,\n1,,39,,0.75,1.5\n",
    )
    assert list(panels) == ["loss", "accuracy", "lr-SGD"]
    np.testing.assert_array_equal(panels["loss"]["train"], [[1, 2], [2.5, 1.0]])
    np.testing.assert_array_equal(panels["loss"]["val"], [[1, 2], [2.5, 1.5]])
    np.testing.assert_array_equal(panels["accuracy"]["val"], [[1, 2], [0.5, 0.75]])
    np.testing.assert_array_equal(panels["lr-SGD"][""], [[1, 2], [0.1, 0.05]])


def test_empty_columns_and_nan_are_left_out(tmp_path):
    panels = read(tmp_path, "epoch,step,train_loss,val_loss\n0,9,nan,\n1,19,2.0,\n")
    assert list(panels["loss"]) == ["train"]
    np.testing.assert_array_equal(panels["loss"]["train"], [[2], [2.0]])


def test_a_row_cut_short_is_read_as_far_as_it_goes(tmp_path):
    panels = read(tmp_path, "epoch,step,train_loss,val_loss\n0,9,2.0,3.0\n1,19,1.0")
    np.testing.assert_array_equal(panels["loss"]["train"], [[1, 2], [2.0, 1.0]])
    np.testing.assert_array_equal(panels["loss"]["val"], [[1], [3.0]])


def test_a_table_without_rows_has_no_curves(tmp_path):
    assert read(tmp_path, "epoch,step,train_loss\n") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a column `epoch`"),
        ("loss\n1\n", "a column `epoch`"),
        ("epoch,step,train_loss\n0,9,abc\n", "number in line 2 .*'abc'"),
        ("epoch,step,train_loss\n0,9,1.0\n0,10,1.0,7\n", "Line 3 .* more values"),
        ('epoch,step,train_loss\n0,9,"1.0', "not a CSV table"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"epoch,step\n\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a CSV table"):
        read_curves(path)
